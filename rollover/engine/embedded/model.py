"""The weights of a decoder of the Llama, Qwen2 and Qwen3 families, and its forward pass in PyTorch's operations.

Queries, keys and values of a layer are one matrix, gate and up another. ``Weights.slots`` maps every Hugging Face
parameter name to where its values go, so new weights are copied in place and no buffer ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollover.engine.embedded.ops import Layout, M, TorchMatrix, rms_norm, same_bits, silu_product
from rollover.hf.architecture import Architecture


class Slot(NamedTuple):
    """The place of a parameter of a checkpoint.

    Example:
        ``Slot((64,), norm.copy_, partial(same_bits, norm), norm.clone)`` for a norm of 64 weights.
    """

    shape: tuple[int, ...]
    fill: Callable[[Tensor], object]
    holds: Callable[[Tensor], bool]
    """Says whether weights that it was filled with are there, bit for bit."""
    read: Callable[[], Tensor]
    """Gives the weights that are there, in the number format that they were rounded to."""


@dataclass(slots=True)
class Layer(Generic[M]):
    """Holds the weights of a layer; queries, keys and values are one matrix, gate and up another.

    Example: with hidden size 1024, 16 heads and 8 key-value heads of 128, ``qkv`` maps 1024 to (16 + 2 * 8) * 128 =
    4096.
    """

    input_norm: Tensor
    qkv: M
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: M
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: M
    down: M


class Attention(Protocol):
    """Attends for one iteration: it knows where each token stands and what it attends to.

    Example:
        ``attention(0, layer, qkv_TF)`` gives ``[T, H * D]`` for the first layer.
    """

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_TF: Tensor, /) -> Tensor:
        """Return ``[T, H * D]`` from the joint projection ``[T, (H + 2 K) D]``; write keys and values to the cache."""
        ...


class Weights(Generic[M]):
    """Holds the weights of a decoder; they are undefined until every slot has been filled."""

    def __init__(self, arch: Architecture, device: torch.device, layout: Layout[M]) -> None:
        self.arch, self._device, self._layout = arch, device, layout
        self.slots: dict[str, Slot] = {}
        shape = (arch.vocab_size, arch.hidden_size)
        self.embedding = torch.empty(shape, dtype=layout.weight_dtype, device=device)
        if arch.tied_embeddings:
            self.lm_head = layout.tied_matrix(self.embedding)
        else:
            self.lm_head = self._matrix({"lm_head": arch.vocab_size}, arch.hidden_size)
        self.slots["model.embed_tokens.weight"] = Slot(
            shape, self._fill_embedding, self._holds_embedding, lambda: self.embedding
        )
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(arch.num_layers)]
        self.norm = self._vector("model.norm.weight", arch.hidden_size)

    def _fill_embedding(self, weights: Tensor) -> None:
        self.embedding.copy_(weights)
        if self.arch.tied_embeddings:
            self.lm_head.fill(0, self.embedding)

    def _holds_embedding(self, weights: Tensor) -> bool:
        is_there = same_bits(self.embedding, weights)
        return is_there and (not self.arch.tied_embeddings or self.lm_head.holds(0, self.embedding))

    def _vector(self, name: str, size: int) -> Tensor:
        """Make a norm's weight: computed with in ``dtype``, rounded to ``weight_dtype``."""
        vector = torch.empty(size, dtype=self._layout.dtype, device=self._device)
        self.slots[name] = self._vector_slot(vector)
        return vector

    def _vector_slot(self, vector: Tensor) -> Slot:
        return Slot(
            (len(vector),),
            partial(self._fill_vector, vector),
            partial(self._holds_vector, vector),
            partial(vector.to, self._layout.weight_dtype),
        )

    def _holds_vector(self, vector: Tensor, weights: Tensor) -> bool:
        return same_bits(vector, weights.to(self._layout.weight_dtype))

    def _fill_vector(self, vector: Tensor, weights: Tensor) -> None:
        vector.copy_(weights.to(self._layout.weight_dtype))

    def _matrix(self, rows: Mapping[str, int], in_size: int) -> M:
        """Make one matrix for several parameters ``[rows, in]``."""
        return self._with_slots(self._layout.matrix(in_size, sum(rows.values())), rows, in_size)

    def _with_slots(self, matrix: M, rows: Mapping[str, int], in_size: int) -> M:
        first = 0
        for name, num_rows in rows.items():
            self.slots[f"{name}.weight"] = Slot(
                (num_rows, in_size),
                partial(matrix.fill, first),
                partial(matrix.holds, first),
                partial(matrix.read, first, num_rows),
            )
            first += num_rows
        return matrix

    def _bias(self, rows: Mapping[str, int]) -> Tensor:
        bias = torch.empty(sum(rows.values()), dtype=self._layout.dtype, device=self._device)
        for name, part in zip(rows, bias.split(list(rows.values())), strict=True):
            self.slots[f"{name}.bias"] = self._vector_slot(part)
        return bias

    def _layer(self, prefix: str) -> Layer[M]:
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
            gate_up=self._with_slots(self._layout.gated_matrix(hidden, arch.intermediate_size), gate_up, hidden),
            down=self._matrix(down, arch.intermediate_size),
        )


class Decoder:
    """Runs the forward pass over weights in PyTorch's layout."""

    def __init__(self, weights: Weights[TorchMatrix], dtype: torch.dtype) -> None:
        self._weights, self._eps, self._dtype = weights, weights.arch.norm_eps, dtype

    def logits(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        """Compute logits ``[T, vocab]``; write the tokens' keys and values to the cache."""
        hidden_TH = self.prefill(token_ids_T, attention)
        return self._weights.lm_head.times(rms_norm(hidden_TH, self._weights.norm, self._eps))

    def prefill(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        """Compute ``[T, H]`` before the last norm; write the tokens' keys and values to the cache."""
        x_TH = F.embedding(token_ids_T, self._weights.embedding).to(self._dtype)
        for index, layer in enumerate(self._weights.layers):
            qkv_TF = layer.qkv.times(rms_norm(x_TH, layer.input_norm, self._eps))
            if layer.qkv_bias is not None:
                qkv_TF += layer.qkv_bias
            layer.output.add_times(attention(index, layer, qkv_TF), x_TH)
            if layer.output_bias is not None:
                x_TH += layer.output_bias
            gate_up_TF = layer.gate_up.times(rms_norm(x_TH, layer.post_norm, self._eps))
            layer.down.add_times(silu_product(gate_up_TF), x_TH)
        return x_TH
