"""The shape of a language model, read from its ``config.json``: parameters, cache and widths, without weights.

Counts equal the transformers implementations, to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollover.devices.records import ModelShape
from rollover.errors import ModelError, nearest
from rollover.hf.architecture import Architecture
from rollover.hf.config import read_config


def read_shape(model: str | Path) -> ModelShape:
    """Return the shape of ``model``: a folder with a ``config.json``, such a file, or an id on the Hugging Face hub."""
    path = Path(model) if Path(model).exists() else _from_hub(str(model))
    file = path / "config.json" if path.is_dir() else path
    name = file.parent.resolve().name if Path(model).exists() else str(model)
    config = read_config(path)
    return replace(parse(config, name=name, file=str(file)), not_embedded=_not_embedded(config))


def _not_embedded(config: Mapping[str, Any]) -> str:
    """Return why the embedded engine cannot run the model; empty if it can."""
    try:
        Architecture.from_config(config)
    except ModelError as error:
        return str(error)
    except KeyError as error:
        return f"its config lacks {error}"
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return f"its config does not describe a decoder: {error}"
    return ""


def parse(config: Mapping[str, Any], *, name: str, file: str = "config.json") -> ModelShape:
    """Return the shape that a parsed ``config.json`` describes; raises ``ModelError`` naming ``file`` and key."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ModelError(f"{file}: model_type {family!r} is not supported{nearest(str(family), _FAMILIES)}")
    keys = _Keys(config, file)
    if (config.get("use_sliding_window") or family in ("mistral", "mixtral")) and config.get("sliding_window"):
        raise ModelError(f"{file}: sliding_window: sliding-window attention is not supported")
    attention = _FAMILIES[family](keys)
    return _shape(keys, name, attention, _feed_forward(keys, family))


class _Keys:
    """A config's keys, checked as they are read."""

    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        self.config = config
        self.file = file

    def count(self, key: str, default: int | None = None) -> int:
        """Read a whole number above zero."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.file}: {key} must be a whole number above zero, got {value!r}")
        return value

    def number(self, key: str, default: int = 0) -> int:
        return self.count(key, 1) if self.config.get(key) else default

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.config.get(key, default))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    parameters: int
    query_width: int
    kv_width: int
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedForward:
    """The feed-forward parts of all layers."""

    dense: int
    """Parameters that every token uses."""
    experts: int = 0
    """Parameters of the routed experts."""
    num_experts: int = 0
    per_token: int = 0
    width: int
    """Intermediate activations per token in the widest layer."""


def _grouped(keys: _Keys, *, bias: bool = False, out_bias: bool = False, normed: bool = False) -> _Attention:
    """Describe attention with grouped queries; ``normed``: queries and keys are normalised per head."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{keys.file}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    head = keys.count("head_dim", 128 if keys.config["model_type"] == "qwen3" else max(1, hidden // heads))
    query, kv = heads * head, 2 * kv_heads * head
    parameters = hidden * (query + kv) + query * hidden
    parameters += bias * (query + kv) + out_bias * hidden + normed * 2 * head
    return _Attention(parameters=parameters, query_width=query, kv_width=kv, kv_heads=kv_heads)


def _latent(keys: _Keys) -> _Attention:
    """Describe multi-head latent attention (arXiv 2405.04434, section 2.1): one latent vector is cached."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    latent, rope = keys.count("kv_lora_rank"), keys.count("qk_rope_head_dim")
    nope, value = keys.count("qk_nope_head_dim"), keys.count("v_head_dim")
    rank, query = keys.number("q_lora_rank"), heads * (nope + rope)
    bias = keys.flag("attention_bias")
    queries = (hidden * rank + bias * rank + rank + rank * query) if rank else hidden * query
    caches = hidden * (latent + rope) + bias * (latent + rope) + latent + latent * heads * (nope + value)
    parameters = queries + caches + heads * value * hidden + bias * hidden
    return _Attention(
        parameters=parameters, query_width=(query + heads * value) // 2, kv_width=latent + rope, kv_heads=1
    )


def _biased(keys: _Keys, normed: bool = False) -> _Attention:
    bias = keys.flag("attention_bias")
    return _grouped(keys, bias=bias, out_bias=bias, normed=normed)


_FAMILIES: dict[str, Callable[[_Keys], _Attention]] = {
    "llama": _biased,
    "mistral": _grouped,
    "qwen2": lambda keys: _grouped(keys, bias=True),
    "qwen3": lambda keys: _biased(keys, normed=True),
    "mixtral": _grouped,
    "qwen2_moe": lambda keys: _grouped(keys, bias=keys.flag("qkv_bias", True)),
    "qwen3_moe": lambda keys: _biased(keys, normed=True),
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
}


def _feed_forward(keys: _Keys, family: str) -> _FeedForward:
    """Describe the gated feed-forward layers, dense or with routed experts."""
    hidden, layers = keys.count("hidden_size"), keys.count("num_hidden_layers")
    if family in ("llama", "mistral", "qwen2", "qwen3"):
        width = keys.count("intermediate_size")
        bias = (2 * width + hidden) * (family == "llama" and keys.flag("mlp_bias"))
        return _FeedForward(dense=layers * (3 * hidden * width + bias), width=width)
    experts, width, shared, extra = _experts(keys, family)
    per_token = keys.count("num_experts_per_tok")
    if per_token > experts:
        raise ModelError(f"{keys.file}: num_experts_per_tok {per_token} exceeds the {experts} experts")
    sparse = _sparse_layers(keys, family, layers)
    plain = keys.count("intermediate_size") if sparse < layers else 0
    dense = (layers - sparse) * 3 * hidden * plain + sparse * (3 * hidden * shared + extra + hidden * experts)
    return _FeedForward(
        dense=dense,
        experts=sparse * experts * 3 * hidden * width,
        num_experts=experts,
        per_token=per_token,
        width=max(plain, per_token * width + shared),
    )


def _experts(keys: _Keys, family: str) -> tuple[int, int, int, int]:
    """Return the number and width of routed experts, the shared width, and a layer's other parameters."""
    if family == "mixtral":
        return keys.count("num_local_experts"), keys.count("intermediate_size"), 0, 0
    width = keys.count("moe_intermediate_size")
    number = "num_local_experts" if keys.config.get("num_experts") is None else "num_experts"
    if family == "qwen2_moe":
        return (keys.count(number), width, keys.count("shared_expert_intermediate_size"), keys.count("hidden_size"))
    if family == "qwen3_moe":
        return keys.count(number), width, 0, 0
    return keys.count("n_routed_experts"), width, keys.number("n_shared_experts") * width, 0


def _sparse_layers(keys: _Keys, family: str, layers: int) -> int:
    """Return the number of layers with routed experts."""
    if family.startswith("deepseek"):
        return layers - min(layers, keys.number("first_k_dense_replace"))
    if family == "mixtral":
        return layers
    step, dense = keys.count("decoder_sparse_step", 1), keys.config.get("mlp_only_layers") or ()
    return sum((i + 1) % step == 0 and i not in dense for i in range(layers))


def _shape(keys: _Keys, name: str, attention: _Attention, ffn: _FeedForward) -> ModelShape:
    hidden, layers, vocab = (keys.count(k) for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    tied = keys.flag("tie_word_embeddings")
    always = layers * (attention.parameters + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2) + ffn.dense
    visited = ffn.experts * ffn.per_token // ffn.num_experts if ffn.num_experts else 0
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden=hidden,
        num_heads=keys.count("num_attention_heads"),
        query_width=attention.query_width,
        kv_width=attention.kv_width,
        kv_heads=attention.kv_heads,
        ffn_width=ffn.width,
        vocab_size=vocab,
        parameters=always + ffn.experts,
        active_parameters=always + visited,
        embedding_parameters=0 if tied else vocab * hidden,
        expert_parameters=ffn.experts,
        num_experts=ffn.num_experts,
        experts_per_token=ffn.per_token,
    )


def _from_hub(model: str) -> Path:
    """Return the path of the ``config.json`` of a model on the hub, downloaded if need be."""
    folder = f"{model}: no such folder"
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelError(f"{folder}; give a folder with a config.json, or a hub id such as Qwen/Qwen3-8B")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelError(f"{folder}; to look it up on the hub: pip install huggingface_hub") from None
    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the client's errors share no base, and each says what was wrong
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{folder}, and the hub does not provide it: {reason}") from None
