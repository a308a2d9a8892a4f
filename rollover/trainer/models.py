"""Model folders: which ones can be trained, how they are loaded and how they are written.

Folders are ordinary Hugging Face ones, weights are safetensors only. What is refused here is what the
embedded engine could not run or what packed attention would compute wrongly. Imports torch only when a model
is loaded, so that a plan can be checked without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.errors import ConfigError, ModelError
from rollover.hf.companions import Companions, without_own_files, write_companions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Supported values of ``model_type`` in ``config.json``."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SNAPSHOT_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def resolve_model(name: str | Path, *, weights: bool = True) -> Path:
    """The local folder of a model given by path or hub id; a hub id is downloaded, with its weights unless told not to.

    Raises ``ModelError`` when there is neither a folder nor a reachable repository of that name.
    """
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as error:  # a name that no file system takes, a home that nobody has
        raise ModelError(f"model folder {str(name)!r} cannot be looked for: {error}") from None
    if not _HUB_ID.fullmatch(str(name)):
        raise ModelError(
            f"model folder {str(name)!r} does not exist; give a folder with config.json or a hub id (--model.path)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=_SNAPSHOT_FILES + ["*.safetensors"] * weights))
    except Exception as error:  # the hub client's errors share no base class with those of its HTTP library
        raise ModelError(
            f"model {str(name)!r} is no folder here and could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the connection, or give a local folder (--model.path)"
        ) from error


def read_model_config(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    """``config.json`` of a folder that can be trained. Raises ``ModelError`` saying why one cannot. Needs no torch.

    weights: the folder must hold some.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"model folder {str(folder)!r} does not exist")
    if not path.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no config.json; is it a Hugging Face model folder?")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        model_type = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not a model config with a 'model_type': {error}") from error
    if model_type not in MODEL_TYPES:
        raise ModelError(f"{path}: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    layer_types = config.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple):
        raise ModelError(f"{path}: layer_types must be a list, got {layer_types!r}")
    if config.get("use_sliding_window") or "sliding_attention" in layer_types:
        raise ModelError(f"{path}: sliding-window attention is not supported; full attention is")
    if config.get("quantization_config"):
        raise ModelError(f"{path}: quantized weights cannot be trained; give the unquantized model")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model folder {str(folder)!r} has no *.safetensors weights (other formats are not read)")
    return dict(config)


def check_same_architecture(checkpoint: Path, initial: Path) -> None:
    """Raises ``ModelError`` when a checkpoint is not of the run's model."""
    shape = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    old, new = read_model_config(checkpoint), read_model_config(initial)
    for key in shape:
        if old.get(key) != new.get(key):
            raise ModelError(
                f"checkpoint {str(checkpoint)!r} has a model with {key} = {old.get(key)!r}, "
                f"but the run's model {str(initial)!r} has {new.get(key)!r}: "
                "resume with the model the run began with"
            )


def pick_device(name: str) -> torch.device:
    """The device a config names; ``auto`` prefers a GPU. Raises ``ConfigError`` when it is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"trainer.device {name!r} cannot be used ({reason}); set 'auto' or 'cpu'") from error
    return device


def load_policy(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
) -> Any:
    """A causal language model that runs packed rows (see ``logprobs.response_logprobs``).

    ``dtype`` is float32 when left out. Dropout is off. Raises ``ModelError`` for folders that
    ``read_model_config`` refuses and for weights that do not fit their config.
    """
    import torch
    from safetensors import SafetensorError
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    from rollover.trainer.attention import PACKED_ATTENTION

    folder = resolve_model(name)
    read_model_config(folder)
    try:
        with _quiet_transformers():
            model: Any
            info: dict[str, Any]
            model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                dtype=dtype or torch.float32,
                attn_implementation=PACKED_ATTENTION,
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
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        model.config.tie_word_embeddings = False  # as the weights have it, which overrule the config where they differ
    if gradient_checkpointing:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model.to(device or "cpu")


def named_weights(model: Any) -> Mapping[str, Tensor]:
    """Parameters by their Hugging Face names, as views without gradient; a tied matrix appears once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_model(model: Any, folder: Path, *, companions: Companions) -> None:
    """Write ``config.json`` and ``model.safetensors``, and beside them the tokenizer and generation files among
    ``companions``."""
    from safetensors.torch import save_file

    write_companions(without_own_files(companions), folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {name: weight.contiguous() for name, weight in named_weights(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and load reports on the user's screen: what they would say becomes an error here."""
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
