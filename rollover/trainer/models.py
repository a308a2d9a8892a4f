"""The policy as a transformers model: load it from a Hugging Face folder, name its weights, write it as a folder.

``hf.config`` refuses models that the embedded engine cannot run or that packed attention would compute wrongly. Weights
are safetensors only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollover.errors import ConfigError, ModelError
from rollover.hf.companions import Companions, without_own_files, write_companions
from rollover.hf.config import read_model_config
from rollover.hf.hub import resolve_model
from rollover.trainer.experts import Routes, prepare_experts
from rollover.trainer.hub_names import hub_weights, named_tensors
from rollover.trainer.proof import attention_of, prove

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it would warn peft of unused kernels


def pick_device(name: str, section: str = "trainer") -> torch.device:
    """Return the device that a section of the config names; ``auto`` prefers a GPU. Raises ``ConfigError`` when it does
    not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, dtype=torch.float64, device=device)  # of rewards and metrics
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{section}.device {name!r} cannot be used ({reason}); set 'auto' or 'cpu'") from error
    return device


def open_model(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
) -> Any:
    """Load a causal language model that runs packed rows (see ``logprobs.response_logprobs``). ``dtype`` is float32
    when left out. Dropout is off. Raises ``ModelError`` for folders that ``read_model_config`` refuses and for weights
    that do not fit their config."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model(name)
    read_model_config(folder)
    layout = prove(transformers_config(folder))
    try:
        with _quiet_transformers():
            model: Any
            info: dict[str, Any]
            model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                dtype=dtype or torch.float32,
                attn_implementation=attention_of(layout),
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model folder {str(folder)!r} cannot be loaded: {error}") from error
    problems = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if problems:
        kind, names = next(iter(problems.items()))
        raise ModelError(
            f"model folder {str(folder)!r}: weights do not fit config.json: {kind.replace('_', ' ')}: {names[0]}"
        )
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # as in the weights, which override the config
    model.is_padded = layout == "padded"
    prepare_experts(model)
    if gradient_checkpointing:
        recompute_layers(model)
    return model.to(device or "cpu")


def transformers_config(folder: Path) -> Any:
    """Read the config of a model as transformers does. Raises ``ModelError`` when it cannot."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"model folder {str(folder)!r} cannot be loaded: {error}") from error


def recompute_layers(model: Any) -> None:
    """Let the backward pass recompute the activations of each layer instead of keeping them."""
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, model.routes)


def _recomputed(forward: Callable[..., Any], routes: Routes, *arguments: Any, **named: Any) -> Any:
    given = routes.given

    def run(*arguments: Any, **named: Any) -> Any:
        routes.given = given  # other rows may have followed by the time of the backward pass
        return forward(*arguments, **named)

    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


def named_weights(model: Any) -> Mapping[str, Tensor]:
    """Return the weights and their buffers by their names on the hub, as views without gradient if they have the same
    name in the model; a tied matrix appears once."""
    return hub_weights(model, named_tensors(model))


def save_model(model: Any, folder: Path, *, companions: Companions) -> None:
    """Write ``config.json`` and ``model.safetensors``, and beside them the tokenizer and generation files among
    ``companions``."""
    save_weights(model, named_weights(model), folder, companions=companions)


def save_weights(model: Any, weights: Mapping[str, Tensor], folder: Path, *, companions: Companions) -> None:
    """Write a folder like ``save_model``, with ``weights`` instead of the model's own."""
    write_companions(without_own_files(companions), folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and load reports on the user's screen; problems that they would report become errors
    here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
