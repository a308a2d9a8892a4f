"""The architecture of a decoder, read from a model folder's ``config.json``. Torch-free.

The trainer reads the same file through transformers: a key that is missing or given twice means the same here as there.
Anything that would change the mathematics and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.errors import ModelError
from rollover.hf.config import MODEL_CLASSES, read_config

_QWEN_KV_HEADS = 32
_QWEN3_HEAD_DIM = 128


_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of a Llama-like decoder.

    Example: Qwen2.5-0.5B has ``vocab_size=151936``, ``hidden_size=896``, ``num_layers=24``, ``num_heads=14``,
    ``num_kv_heads=2``, ``head_dim=64`` and ``tied_embeddings=True``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    inv_freq: tuple[float, ...]
    """Rotary angle per position, one for each of ``head_dim / 2`` pairs."""
    max_position_embeddings: int
    tied_embeddings: bool
    """True if the config asks for it; weights that hold two different matrices are not tied even then
    (``engine.embedded.weights.are_tied``)."""
    qkv_bias: bool
    output_bias: bool
    """True if the attention's output projection has a bias."""
    qk_norm: bool
    """True if each query and key head has an RMS norm (Qwen3)."""

    def __post_init__(self) -> None:
        for key in _COUNTS:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{key} must be a whole number above 0, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_kv_heads} key-value heads do not divide {self.num_heads} heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even, for pairs that are rotated, got {self.head_dim}")
        if not (isinstance(self.norm_eps, float | int) and 0 <= self.norm_eps < math.inf):
            raise ModelError(f"rms_norm_eps must be a number from 0, got {self.norm_eps!r}")
        if not all(0 < frequency < math.inf for frequency in self.inv_freq):
            raise ModelError("rotary frequencies must be above 0: is rope_theta right?")

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Read the architecture of the model in ``folder``. Raises ``ModelError`` for one that is not supported."""
        path, config = folder / "config.json", read_config(folder)
        try:
            return cls.from_config(config)
        except KeyError as e:
            raise ModelError(f"{path} lacks {e}") from e
        except ModelError as e:
            raise ModelError(f"{path}: {e}") from e
        except (TypeError, ValueError, AttributeError, ArithmeticError) as e:
            raise ModelError(f"{path} does not describe a decoder: {e}") from e

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read the architecture from the contents of ``config.json``. Raises ``ModelError`` for a model that is not
        supported, ``KeyError`` for a missing key."""
        family = _family(config)
        heads = config["num_attention_heads"]
        head_dim = _head_dim(config, family)
        bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=_num_kv_heads(config, family),
            head_dim=head_dim,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            inv_freq=_inv_freq(config, head_dim),
            max_position_embeddings=config["max_position_embeddings"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            output_bias=family != "qwen2" and bias,
            qk_norm=family == "qwen3",
        )


def matrix_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the numbers of outputs and inputs of each matrix of a decoder, by the last part of its name, from the
    contents of ``config.json``.

    Example: ``{"q_proj": (896, 896), "k_proj": (128, 896), ...}`` of Qwen2.5-0.5B.
    """
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_dim = _head_dim(config, family)
    queries, keys = config["num_attention_heads"] * head_dim, _num_kv_heads(config, family) * head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "lm_head": (config["vocab_size"], hidden),
    }


def _family(config: Mapping[str, Any]) -> str:
    family, named = config["model_type"], config.get("architectures") or ()
    if family not in MODEL_CLASSES:
        raise ModelError(
            f"model_type {family!r} is not supported by the embedded engine (supported: {', '.join(MODEL_CLASSES)});"
            " set engine.kind to 'vllm' or 'sglang' if a server of theirs runs it"
        )
    if named and MODEL_CLASSES[family] not in named:
        raise ModelError(
            f"architecture {named[0]} of model_type {family!r} is not supported; supported: {MODEL_CLASSES[family]}"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    if config.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported")
    if config.get("quantization_config") is not None:
        raise ModelError("quantised weights are not supported; use the original checkpoint")
    if _slides(config):
        raise ModelError("sliding-window attention is not supported; set use_sliding_window to false")
    return family


def _head_dim(config: Mapping[str, Any], family: str) -> int:
    if family == "qwen3":
        return int(config.get("head_dim", _QWEN3_HEAD_DIM))
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _num_kv_heads(config: Mapping[str, Any], family: str) -> int:
    heads: int = config["num_attention_heads"]
    return config.get("num_key_value_heads", heads if family == "llama" else _QWEN_KV_HEADS) or heads


def _slides(config: Mapping[str, Any]) -> bool:
    if types := config.get("layer_types"):
        return any(t != "full_attention" for t in types)
    if not (config.get("use_sliding_window") and config.get("sliding_window")):
        return False
    return config.get("max_window_layers", 0) < config["num_hidden_layers"]


def _inv_freq(config: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Compute the rotary frequencies (Su et al., arXiv 2104.09864), scaled as the config asks."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rotary frequencies that differ from layer to layer are not supported")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    plain = tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    if kind == "default":
        return plain
    if kind == "linear":
        return tuple(f / rope["factor"] for f in plain)
    if kind == "llama3":
        key = "original_max_position_embeddings"
        context = config.get(key) or rope.get(key) or config["max_position_embeddings"]
        return tuple(_llama3(f, rope, context) for f in plain)
    raise ModelError(f"rope type {kind!r} is not supported; supported: 'default', 'linear', 'llama3'")


def _llama3(frequency: float, rope: Mapping[str, Any], context: int) -> float:
    """Scale a rotary frequency as Llama 3.1 does: long wavelengths are slowed by ``factor``, short ones kept, and those
    between interpolated."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequency / (2 * math.pi)
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - keep) * frequency / rope["factor"] + keep * frequency
