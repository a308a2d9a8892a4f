"""The ``config.json`` of a Hugging Face folder: read in one place, with the checks that a model can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from rollover.errors import ModelError, parse_json

MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Models that need no proof to be packed, unless they have windows (``trainer.proof``): the class in transformers by
``model_type``. Those that several devices train, and that take adapters, are in ``trainer.checks``; those of the
embedded engine in ``hf.architecture``."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys by which configs of several families name the number of experts."""

_OTHER_NAMES = {
    "max_position_embeddings": ("n_positions", "seq_length"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd", "n_embed"),
}
"""Names that GPT-2 and BLOOM have for sizes, by the usual ones."""


def size_of(config: Mapping[str, Any], key: str) -> Any:
    """Return a size of a model, whatever its family names it; ``None`` if the config does not say."""
    return next((config[name] for name in (key, *_OTHER_NAMES.get(key, ())) if config.get(name) is not None), None)


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer of a model; 0 if it has none."""
    return next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of a folder, or such a file by itself. Raises ``ModelError`` when there is none or it is not
    a table of keys."""
    path = folder if folder.is_file() else folder / "config.json"
    if not folder.exists():
        raise ModelError(f"model folder {str(folder)!r} does not exist")
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{str(folder)!r} holds adapters, which are not a model by themselves: rollover export RUN FOLDER merges"
            " those of a run into its model, merge_and_unload of peft any other"
        )
    if not path.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no config.json; is it a Hugging Face model folder?")
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a model config: it cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a model config: expected a table of keys, got {type(config).__name__}")
    return config


def max_context(folder: Path) -> float:
    """Return the most tokens that a model reads at once, by its ``config.json``; infinity if that does not say."""
    found = size_of(read_config(folder), "max_position_embeddings")
    return found if isinstance(found, int) else inf


def read_model_config(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    """Read the config of a model that can be trained. Raises ``ModelError`` saying why one cannot.

    weights: the folder must hold some.
    """
    path, config = folder / "config.json", read_config(folder)
    model_type, layer_types = config.get("model_type"), config.get("layer_types") or ()
    if (folder / "adapter_config.json").is_file():  # transformers would train them, engines leave them out
        raise ModelError(
            f"model folder {str(folder)!r} holds adapters beside a model: merge them into it with peft"
            " (merge_and_unload), or move adapter_config.json and adapter_model.safetensors away"
        )
    if not isinstance(model_type, str):
        raise ModelError(f"{path} is not a model config: it has no 'model_type'")
    if not isinstance(layer_types, list | tuple):
        raise ModelError(f"{path}: layer_types must be a list, got {layer_types!r}")
    if config.get("quantization_config"):
        raise ModelError(f"{path}: quantized weights cannot be trained; give the unquantized model")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model folder {str(folder)!r} has no *.safetensors weights (other formats are not read)")
    return config
