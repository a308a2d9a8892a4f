"""Weights of a transformers model in training in the form that engines take: by Hugging Face name, adapters merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from rollover.errors import ModelError, RunError
from rollover.hf.hub import resolve_model
from rollover.trainer.lora import merged_weights
from rollover.trainer.models import named_weights
from rollover.weights.base import WeightSource
from rollover.weights.sources import MemoryWeights

_OF_ADAPTERS = ("lora_", "base_layer", "modules_to_save", "original_module", "token_adapter")
"""Parts of parameter names that indicate a peft method other than a low-rank matrix beside a linear layer."""


def policy_source(model: Any, version: int) -> WeightSource:
    """Return the weights of ``model``, to be published as ``version``. They are views: the model must not be trained
    until they are loaded. Those of low-rank adapters are merged when they are read, and the model stays as it is.
    Raises ``ModelError`` if the model has adapters of a kind that cannot be merged."""
    if not hasattr(model, "peft_config"):
        return MemoryWeights(version, named_weights(model))
    base = model.get_base_model()
    for name, layer in base.named_modules():
        if hasattr(layer, "base_layer"):
            _check_plain(name, layer)
    weights = merged_weights(base)
    if left := [name for name in weights if any(part in name for part in _OF_ADAPTERS)]:
        raise ModelError(
            f"the model has adapters that cannot be merged into its weights, first {left[0]!r}: use LoRA on linear"
            " layers, without DoRA and modules_to_save"
        )
    return MemoryWeights(version, weights)


def _check_plain(name: str, layer: Any) -> None:
    active: Sequence[str] = list(getattr(layer, "active_adapters", ()))
    adapter = active[0] if len(active) == 1 else ""
    plain = (
        adapter in getattr(layer, "lora_A", {})
        and isinstance(layer.base_layer, torch.nn.Linear)
        and not getattr(layer, "use_dora", {}).get(adapter)
        and not getattr(layer, "lora_bias", {}).get(adapter)
    )
    if not plain:
        raise ModelError(
            f"the adapter of {name!r} is not plain LoRA on a linear layer (active: {', '.join(active) or 'none'}) and"
            " cannot be merged for the engine: use a single LoRA adapter without DoRA and bias"
        )


def next_logits(model: Any, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the logits of the token after each prompt, shape (prompts, vocabulary)."""
    device = next(model.parameters()).device
    with torch.no_grad(), _evaluating(model):
        rows = [
            model(input_ids=torch.tensor([list(ids)], device=device)).logits[0, -1].float().cpu() for ids in prompts
        ]
    stacked: NDArray[np.float32] = torch.stack(rows).numpy()
    return stacked


def dropouts(model: Any) -> list[str]:
    """Return the names of the modules that drop activations while ``model`` trains."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Dropout) and module.p > 0)
        or any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items())
    ]


def number_format(model: Any, args: Any) -> str:
    """Return the number format in which TRL computes log-probs, by torch's name."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def model_folder(model: Any, tokenizer: Any, place: Path, *, is_untrained: bool) -> Path:
    """Return a folder with config, tokenizer and some weights of ``model``, from which an engine is opened: the one
    that it was loaded from, or ``place``, to which it is written if there is none. Raises ``RunError`` if the run began
    with another model.

    Args:
        is_untrained: whether no batch was trained. The model in ``place`` must then be this one.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if name := getattr(base.config, "_name_or_path", ""):
        return resolve_model(name)
    if not (place / "config.json").exists():
        plain = dict(policy_source(model, 0).tensors())
        base.save_pretrained(place, state_dict={name: tensor.contiguous() for name, tensor in plain.items()})
        tokenizer.save_pretrained(place)
    elif is_untrained and not _is_model_of(place, dict(policy_source(model, 0).tensors())):
        raise RunError(
            f"this run began with another model ({place}), and no checkpoint was saved yet: create the"
            " same model each time, for instance by calling transformers.set_seed before, or remove that run"
        )
    return place


def _is_model_of(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
    saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return saved.keys() <= tensors.keys() and all(torch.equal(t, tensors[name].cpu()) for name, t in saved.items())


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off within this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
