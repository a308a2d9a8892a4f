"""The decoder of the Llama, Qwen2 and Qwen3 families: embeddings, layers, logits.

Queries, keys and values of a layer are one matrix, gate and up another. ``Decoder.slots`` maps every Hugging Face
parameter name to where its values go, so new weights are copied in place and no buffer ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollover.engine.embedded.architecture import Architecture
from rollover.engine.embedded.ops import Matrix, Ops


class Slot(NamedTuple):
    """Where a parameter of a checkpoint goes."""

    shape: tuple[int, ...]
    fill: Callable[[Tensor], None]


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix


class Attention(Protocol):
    """One iteration's attention: it knows where each token stands and what it attends to."""

    def __call__(self, index: int, layer: Layer, qkv_TF: Tensor, /) -> Tensor:
        """``[T, H * D]`` from the joint projection ``[T, (H + 2 K) D]``; writes keys and values to the cache."""
        ...


class Decoder:
    """Weights are undefined until every slot has been filled."""

    def __init__(self, arch: Architecture, device: torch.device, ops: Ops) -> None:
        self.arch, self._device, self._ops = arch, device, ops
        self.slots: dict[str, Slot] = {}
        shape = (arch.vocab_size, arch.hidden_size)
        self.embedding = torch.empty(shape, dtype=ops.weight_dtype, device=device)
        if arch.tied_embeddings:
            self._lm_head = ops.tied_matrix(self.embedding)
        else:
            self._lm_head = self._matrix({"lm_head": arch.vocab_size}, arch.hidden_size)
        self.slots["model.embed_tokens.weight"] = Slot(shape, self._fill_embedding)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(arch.num_layers)]
        self.norm = self._vector("model.norm.weight", arch.hidden_size)

    def logits(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        """``[T, vocab]``; writes the tokens' keys and values to the cache."""
        hidden_TH = self._hidden(token_ids_T, attention)
        return self._lm_head.times(self._ops.rms_norm(hidden_TH, self.norm, self.arch.norm_eps))

    def prefill(self, token_ids_T: Tensor, attention: Attention) -> None:
        """Only writes the cache."""
        self._hidden(token_ids_T, attention)

    def _hidden(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        arch, ops = self.arch, self._ops
        x_TH = F.embedding(token_ids_T, self.embedding).to(ops.dtype)
        for index, layer in enumerate(self.layers):
            qkv_TF = layer.qkv.times(ops.rms_norm(x_TH, layer.input_norm, arch.norm_eps))
            if layer.qkv_bias is not None:
                qkv_TF += layer.qkv_bias
            layer.output.add_times(attention(index, layer, qkv_TF), x_TH)
            if layer.output_bias is not None:
                x_TH += layer.output_bias
            gate_up_TF = layer.gate_up.times(ops.rms_norm(x_TH, layer.post_norm, arch.norm_eps))
            layer.down.add_times(ops.silu_product(gate_up_TF), x_TH)
        return x_TH

    def _fill_embedding(self, weights: Tensor) -> None:
        self.embedding.copy_(weights)
        if self.arch.tied_embeddings:
            self._lm_head.fill(0, self.embedding)

    def _vector(self, name: str, size: int) -> Tensor:
        """A norm's weight: computed with in ``dtype``, rounded to ``weight_dtype``."""
        vector = torch.empty(size, dtype=self._ops.dtype, device=self._device)
        self.slots[name] = Slot((size,), partial(self._fill_vector, vector))
        return vector

    def _fill_vector(self, vector: Tensor, weights: Tensor) -> None:
        vector.copy_(weights.to(self._ops.weight_dtype))

    def _matrix(self, rows: Mapping[str, int], in_size: int) -> Matrix:
        """One matrix for several parameters ``[rows, in]``."""
        matrix, first = self._ops.matrix(in_size, sum(rows.values())), 0
        for name, num_rows in rows.items():
            self.slots[f"{name}.weight"] = Slot((num_rows, in_size), partial(matrix.fill, first))
            first += num_rows
        return matrix

    def _bias(self, rows: Mapping[str, int]) -> Tensor:
        bias = torch.empty(sum(rows.values()), dtype=self._ops.dtype, device=self._device)
        for name, part in zip(rows, bias.split(list(rows.values())), strict=True):
            self.slots[f"{name}.bias"] = Slot((len(part),), partial(self._fill_vector, part))
        return bias

    def _layer(self, prefix: str) -> Layer:
        arch, attn, mlp = self.arch, f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, q_size, kv_size = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = {f"{attn}q_proj": q_size, f"{attn}k_proj": kv_size, f"{attn}v_proj": kv_size}
        output, down = {f"{attn}o_proj": hidden}, {f"{mlp}down_proj": hidden}
        gate_up = {f"{mlp}gate_proj": arch.intermediate_size, f"{mlp}up_proj": arch.intermediate_size}
        return Layer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._matrix(qkv, hidden),
            qkv_bias=self._bias(qkv) if arch.qkv_bias else None,
            q_norm=self._vector(f"{attn}q_norm.weight", arch.head_dim) if arch.qk_norm else None,
            k_norm=self._vector(f"{attn}k_norm.weight", arch.head_dim) if arch.qk_norm else None,
            output=self._matrix(output, q_size),
            output_bias=self._bias(output) if arch.output_bias else None,
            post_norm=self._vector(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._matrix(gate_up, hidden),
            down=self._matrix(down, arch.intermediate_size),
        )
