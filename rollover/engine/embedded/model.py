"""The decoder of the Llama, Qwen2 and Qwen3 families: embeddings, layers, logits.

Weights live in fused buffers (queries, keys and values in one matrix; gate and up in another).
``Decoder.named`` maps every Hugging Face parameter name to its part of a buffer, so loading is a copy in
place and the addresses of the buffers never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollover.engine.embedded.architecture import Architecture
from rollover.engine.embedded.ops import Ops


@dataclass(slots=True)
class Layer:
    """Weights of one layer; matrices are ``[in, out]``, which multiplies faster than ``[out, in]`` on a CPU."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Attention(Protocol):
    """One iteration's attention: it knows where each token stands and what it attends to."""

    def __call__(self, index: int, layer: Layer, qkv_TF: Tensor, /) -> Tensor:
        """``[T, H * D]`` from the joint projection ``[T, (H + 2 K) D]``; writes keys and values to the cache."""
        ...


class Decoder:
    """Weights are undefined until every tensor of ``named`` has been filled."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        self.arch, self.dtype, self.device, self._ops = arch, dtype, device, ops
        self.named: dict[str, Tensor] = {}
        self.embedding = self._empty("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(arch.num_layers)]
        self.norm = self._empty("model.norm.weight", arch.hidden_size)
        self.lm_head = self.embedding
        if not arch.tied_embeddings:
            self.lm_head = self._empty("lm_head.weight", arch.vocab_size, arch.hidden_size)

    def logits(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        """``[T, vocab]``; writes the tokens' keys and values to the cache."""
        hidden_TH = self._hidden(token_ids_T, attention)
        return F.linear(self._ops.rms_norm(hidden_TH, self.norm, self.arch.norm_eps), self.lm_head)

    def prefill(self, token_ids_T: Tensor, attention: Attention) -> None:
        """Only writes the cache."""
        self._hidden(token_ids_T, attention)

    def _hidden(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        arch, ops = self.arch, self._ops
        x_TH = F.embedding(token_ids_T, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv_TF = _linear(ops.rms_norm(x_TH, layer.input_norm, arch.norm_eps), layer.qkv, layer.qkv_bias)
            x_TH.addmm_(attention(index, layer, qkv_TF), layer.output)
            if layer.output_bias is not None:
                x_TH += layer.output_bias
            gate_up_TF = _linear(ops.rms_norm(x_TH, layer.post_norm, arch.norm_eps), layer.gate_up)
            x_TH.addmm_(ops.silu_product(gate_up_TF), layer.down)
        return x_TH

    def _empty(self, name: str, *shape: int) -> Tensor:
        """An uninitialised weight, known under its Hugging Face name."""
        self.named[name] = tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor

    def _matrix(self, names: dict[str, int], in_size: int) -> Tensor:
        """One ``[in, out]`` buffer for several parameters ``[rows, in]``, side by side."""
        buffer = torch.empty((in_size, sum(names.values())), dtype=self.dtype, device=self.device)
        for name, part in zip(names, buffer.split(list(names.values()), 1), strict=True):
            self.named[f"{name}.weight"] = part.t()
        return buffer

    def _bias(self, names: dict[str, int]) -> Tensor:
        buffer = torch.empty(sum(names.values()), dtype=self.dtype, device=self.device)
        for name, part in zip(names, buffer.split(list(names.values())), strict=True):
            self.named[f"{name}.bias"] = part
        return buffer

    def _layer(self, prefix: str) -> Layer:
        arch, attn, mlp = self.arch, f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, q_size, kv_size = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = {f"{attn}q_proj": q_size, f"{attn}k_proj": kv_size, f"{attn}v_proj": kv_size}
        output, down = {f"{attn}o_proj": hidden}, {f"{mlp}down_proj": hidden}
        gate_up = {f"{mlp}gate_proj": arch.intermediate_size, f"{mlp}up_proj": arch.intermediate_size}
        return Layer(
            input_norm=self._empty(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._matrix(qkv, hidden),
            qkv_bias=self._bias(qkv) if arch.qkv_bias else None,
            q_norm=self._empty(f"{attn}q_norm.weight", arch.head_dim) if arch.qk_norm else None,
            k_norm=self._empty(f"{attn}k_norm.weight", arch.head_dim) if arch.qk_norm else None,
            output=self._matrix(output, q_size),
            output_bias=self._bias(output) if arch.output_bias else None,
            post_norm=self._empty(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._matrix(gate_up, hidden),
            down=self._matrix(down, arch.intermediate_size),
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
