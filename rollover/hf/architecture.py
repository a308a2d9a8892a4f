"""The architecture of a decoder, read from a model folder's ``config.json``. Torch-free.

The trainer reads the same file through transformers: a key that is missing or given twice means the same here as there.
Anything that would change the mathematics and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollover.errors import ModelError
from rollover.hf.config import num_experts, read_config
from rollover.hf.rope import Rope, read_rope


class Norms(NamedTuple):
    """The names of a layer's RMS norms within the layer; ``None`` for a norm that it does not have.

    Example: ``Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")`` for OLMo 2, which
    normalises what it adds to the hidden state, and not the hidden state.
    """

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The traits by which the models of one ``model_type`` differ from Llama. A new family is a row of ``FAMILIES``."""

    model_class: str
    """The class in transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config may lack, as transformers reads them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config cannot change."""
    output_bias: bool = True
    """The attention's output projection has a bias if the others have."""
    qk_norm: Literal["", "head", "all"] = ""
    """Queries and keys have an RMS norm: each head, or all heads together."""
    norms: Norms = field(default_factory=Norms)
    windows: Literal["", "all", "types"] = ""
    """Layers that attend to a window if the config names one: none, all, or as ``layer_types`` says."""
    is_interleaved: bool = False
    """Rotated pairs are neighbours, and the first numbers of a head may be rotated alone."""
    skips_rotation: bool = False
    """Some layers do not rotate (``no_rope_layers``)."""
    is_fused: bool = False
    """Gate and up projection are one tensor of the checkpoint."""
    is_scaled: bool = False
    """The config has multipliers."""
    has_experts: bool = False


_QWEN: dict[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(model_class="LlamaForCausalLM"),
    "qwen2": Family(
        model_class="Qwen2ForCausalLM",
        defaults=_QWEN,
        fixed={"attention_bias": True},
        output_bias=False,
        windows="types",
    ),
    "qwen3": Family(
        model_class="Qwen3ForCausalLM", defaults={**_QWEN, "head_dim": 128}, qk_norm="head", windows="types"
    ),
    "qwen3_moe": Family(
        model_class="Qwen3MoeForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm="head",
        windows="all",
        has_experts=True,
    ),
    "mistral": Family(
        model_class="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        fixed={"attention_bias": False, "use_sliding_window": True},
        windows="all",
    ),
    "olmo2": Family(
        model_class="Olmo2ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        qk_norm="all",
        norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ),
    "smollm3": Family(
        model_class="SmolLM3ForCausalLM",
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        windows="types",
        skips_rotation=True,
    ),
    "granite": Family(model_class="GraniteForCausalLM", is_scaled=True),
    "glm4": Family(
        model_class="Glm4ForCausalLM",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        output_bias=False,
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        is_interleaved=True,
        is_fused=True,
    ),
}
"""The models that the embedded engine runs, by ``model_type``, which is what transformers goes by."""


_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"),
)


class LayerShape(NamedTuple):
    """The traits by which one layer differs from the others."""

    window: int | None = None
    """The tokens that a token attends to, itself included; ``None`` for all."""
    rotates: bool = True
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The experts of a layer.

    Example: Qwen3-30B-A3B has ``ExpertShape(num=128, per_token=8, intermediate_size=768, is_normalised=True)``.
    """

    num: int
    per_token: int
    intermediate_size: int
    is_normalised: bool
    """The weights of a token's experts are divided by their sum."""

    def __post_init__(self) -> None:
        for key in ("num", "per_token", "intermediate_size"):
            _check_count(f"experts: {key}", getattr(self, key))
        if self.per_token > self.num:
            raise ModelError(f"num_experts_per_tok = {self.per_token} is more than the {self.num} experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of a Llama-like decoder.

    Example: Qwen2.5-0.5B has ``vocab_size=151936``, ``hidden_size=896``, ``num_heads=14``, ``num_kv_heads=2``,
    ``head_dim=64``, ``tied_embeddings=True`` and 24 ``layers``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tied_embeddings: bool
    """True if the config asks for it; weights that hold two different matrices are not tied even then
    (``engine.embedded.weights.are_tied``)."""
    qkv_bias: bool
    family: Family
    layers: tuple[LayerShape, ...]
    experts: ExpertShape | None = None
    embedding_scale: float = 1.0
    attention_scale: float
    """The factor of products of queries and keys."""
    residual_scale: float = 1.0
    """The factor of what a layer adds to the hidden state."""
    logit_scale: float = 1.0

    @property
    def output_bias(self) -> bool:
        """Return whether the attention's output projection has a bias."""
        return self.qkv_bias and self.family.output_bias

    @property
    def head_order(self) -> tuple[int, ...] | None:
        """Return the rows of a head of a checkpoint in the order in which pairs that are rotated lie half a head apart,
        those that are not at the end of each half; ``None`` if they lie so already."""
        if not self.family.is_interleaved:
            return None
        rotated = 2 * sum(frequency > 0 for frequency in self.rope.inv_freq)
        middle = (rotated + self.head_dim) // 2
        return (
            *(*range(0, rotated, 2), *range(rotated, middle)),
            *(*range(1, rotated, 2), *range(middle, self.head_dim)),
        )

    def __post_init__(self) -> None:
        for key in _COUNTS:
            _check_count(key, getattr(self, key))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_kv_heads} key-value heads do not divide {self.num_heads} heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even, for pairs that are rotated, got {self.head_dim}")
        if not (isinstance(self.norm_eps, float | int) and 0 <= self.norm_eps < math.inf):
            raise ModelError(f"rms_norm_eps must be a number from 0, got {self.norm_eps!r}")

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Read the architecture of the model in ``folder``. Raises ``ModelError`` if it is not supported."""
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
        keys = {**family.defaults, **config, **family.fixed}
        head_dim = _head_dim(keys)
        return cls(
            vocab_size=keys["vocab_size"],
            hidden_size=keys["hidden_size"],
            intermediate_size=keys["intermediate_size"],
            num_layers=keys["num_hidden_layers"],
            num_heads=keys["num_attention_heads"],
            num_kv_heads=num_kv_heads(keys),
            head_dim=head_dim,
            norm_eps=keys.get("rms_norm_eps", 1e-6),
            rope=read_rope(keys, head_dim, partial=family.is_interleaved),
            max_position_embeddings=keys["max_position_embeddings"],
            tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
            qkv_bias=bool(keys.get("attention_bias", False)),
            family=family,
            layers=tuple(_layers(keys, family)),
            experts=_experts(keys) if family.has_experts else None,
            **{"attention_scale": head_dim**-0.5, **(_scales(keys) if family.is_scaled else {})},
        )


def _check_count(key: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} must be a whole number above 0, got {value!r}")


def matrix_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the numbers of outputs and inputs of each matrix of a decoder, by the last part of its name, from the
    contents of ``config.json``; of a mixture of experts only the matrices of attention.

    Example: ``{"q_proj": (896, 896), "k_proj": (128, 896), ...}`` of Qwen2.5-0.5B.
    """
    family = FAMILIES.get(config["model_type"])
    keys = {**(family.defaults if family else {}), **config}
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], _head_dim(keys)
    queries, keys_size = config["num_attention_heads"] * head_dim, num_kv_heads(config) * head_dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys_size, hidden),
        "v_proj": (keys_size, hidden),
        "o_proj": (hidden, queries),
    }
    if num_experts(config):
        return attention
    return attention | {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "lm_head": (config["vocab_size"], hidden),
    }


def _family(config: Mapping[str, Any]) -> Family:
    name, named = config["model_type"], config.get("architectures") or ()
    if name not in FAMILIES:
        raise ModelError(
            f"model_type {name!r} is not supported by the embedded engine (supported: {', '.join(FAMILIES)});"
            " set engine.kind to 'vllm' or 'sglang' if a server of theirs runs it"
        )
    family = FAMILIES[name]
    if named and family.model_class not in named:
        raise ModelError(
            f"architecture {named[0]} of model_type {name!r} is not supported; supported: {family.model_class}"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    if config.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported")
    if config.get("quantization_config") is not None:
        raise ModelError("quantised weights are not supported; use the original checkpoint")
    return family


def _head_dim(keys: Mapping[str, Any]) -> int:
    return int(keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"])


def num_kv_heads(config: Mapping[str, Any]) -> int:
    """Return the number of key-value heads, from the contents of ``config.json``."""
    family = FAMILIES.get(config["model_type"])
    keys = {**(family.defaults if family else {}), **config}
    heads: int = keys["num_attention_heads"]
    return keys.get("num_key_value_heads") or heads


def _layers(keys: Mapping[str, Any], family: Family) -> Iterator[LayerShape]:
    """Read what sets each layer apart."""
    num, rotates = keys["num_hidden_layers"], [True] * keys["num_hidden_layers"]
    if family.skips_rotation:
        every, given = keys.get("no_rope_layer_interval", 4), keys.get("no_rope_layers")
        rotates = [bool(given[i]) if given is not None else (i + 1) % every != 0 for i in range(num)]
    window = keys.get("sliding_window") if keys.get("use_sliding_window") else None
    step, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers") or ()
    for i, slides in enumerate(_sliding(keys, family, window, rotates)):
        yield LayerShape(
            window=window if slides else None,
            rotates=rotates[i],
            has_experts=family.has_experts and i not in dense and (i + 1) % step == 0,
        )


def _sliding(keys: Mapping[str, Any], family: Family, window: int | None, rotates: list[bool]) -> list[bool]:
    """Return whether each layer attends to a window."""
    if family.windows == "all":
        return [window is not None] * len(rotates)
    if (types := keys.get("layer_types")) is not None:
        if unknown := next((t for t in types if t not in ("full_attention", "sliding_attention")), None):
            raise ModelError(f"layer type {unknown!r} is not supported; supported: full_attention, sliding_attention")
        if "sliding_attention" in types and (window is None or not family.windows):
            raise ModelError("layer_types names sliding_attention, but the model's other keys give it no window")
        return [t == "sliding_attention" for t in types[: len(rotates)]]
    if window is None or not family.windows:
        return [False] * len(rotates)
    if family.skips_rotation:
        return [not rotated for rotated in rotates]
    return [i >= keys["max_window_layers"] for i in range(len(rotates))]


def _experts(keys: Mapping[str, Any]) -> ExpertShape:
    return ExpertShape(
        num=keys.get("num_local_experts") or keys["num_experts"],
        per_token=keys["num_experts_per_tok"],
        intermediate_size=keys["moe_intermediate_size"],
        is_normalised=bool(keys.get("norm_topk_prob", False)),
    )


def _scales(keys: Mapping[str, Any]) -> dict[str, float]:
    return {
        "embedding_scale": keys.get("embedding_multiplier", 1.0),
        "attention_scale": keys.get("attention_multiplier", 1.0),
        "residual_scale": keys.get("residual_multiplier", 1.0),
        "logit_scale": 1 / keys.get("logits_scaling", 1.0),
    }
