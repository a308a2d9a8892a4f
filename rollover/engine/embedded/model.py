"""The weights of a decoder of the families in ``hf.architecture``, and its forward pass in PyTorch's operations.

Queries, keys and values of a layer are one matrix, gate and up another. ``Weights.slots`` maps every Hugging Face
parameter name to where its values go, so new weights are copied in place and no buffer ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rollover.engine.embedded.experts import ApplyExperts, Experts, choose
from rollover.engine.embedded.ops import Layout, M, Matrix, TorchMatrix, rms_norm, silu_product
from rollover.hf.architecture import Architecture, LayerShape

MX = TypeVar("MX", bound=Matrix)


class Slot(NamedTuple):
    """The place of a parameter of a checkpoint."""

    shape: tuple[int, ...]
    fill: Callable[[Tensor], object]
    read: Callable[[], Tensor]
    """Gives the weights that are there, in the number format that they were rounded to."""


@dataclass(slots=True)
class Mlp(Generic[M]):
    """Holds the weights of a gated MLP."""

    gate_up: M
    down: M


@dataclass(slots=True)
class Layer(Generic[M]):
    """Holds the weights of a layer; queries, keys and values are one matrix, gate and up another.

    A norm that the family does not have is ``None``.
    """

    input_norm: Tensor | None
    qkv: M
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: M
    output_bias: Tensor | None
    output_norm: Tensor | None
    """Norm of what the attention adds to the hidden state."""
    mlp_norm: Tensor | None
    mlp: Mlp[M] | Experts[M]
    mlp_output_norm: Tensor | None
    """Norm of what the MLP adds to the hidden state."""


class Attention(Protocol):
    """Attends for one iteration: it knows where each token stands and what it attends to."""

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_TF: Tensor, /) -> Tensor:
        """Return ``[T, H * D]`` from the joint projection ``[T, (H + 2 K) D]``; write keys and values to the cache."""
        ...


class Weights(Generic[M]):
    """Holds the weights of a decoder; they are undefined until every slot has been filled."""

    def __init__(self, arch: Architecture, device: torch.device, layout: Layout[M]) -> None:
        self.arch, self._device, self._layout = arch, device, layout
        self.slots: dict[str, Slot] = {}
        shape = (arch.vocab_size, arch.hidden_size)
        embedding = self.embedding = torch.empty(shape, dtype=layout.weight_dtype, device=device)
        if arch.tied_embeddings:
            head = self.lm_head = layout.tied_matrix(embedding)
            slot = Slot(shape, lambda weights: head.fill(0, embedding.copy_(weights)), lambda: embedding)
        else:
            self.lm_head = self._matrix({"lm_head": arch.vocab_size}, arch.hidden_size)
            slot = Slot(shape, embedding.copy_, lambda: embedding)
        self.slots["model.embed_tokens.weight"] = slot  # a reference to ``self`` would be a cycle, freed late
        self.layers = [self._layer(f"model.layers.{i}.", shape) for i, shape in enumerate(arch.layers)]
        self.norm = self._vector("model.norm.weight", arch.hidden_size)

    def _vector(self, name: str, size: int) -> Tensor:
        """Make a norm's weight: computed with in ``dtype``, rounded to ``weight_dtype``."""
        vector = torch.empty(size, dtype=self._layout.dtype, device=self._device)
        self.slots[name] = self._vector_slot(vector)
        return vector

    def _vector_slot(self, vector: Tensor) -> Slot:
        dtype = self._layout.weight_dtype
        return Slot((len(vector),), lambda weights: vector.copy_(weights.to(dtype)), lambda: vector.to(dtype))

    def _matrix(self, rows: Mapping[str, int], in_size: int) -> M:
        """Make one matrix for several parameters ``[rows, in]``."""
        return self._with_slots(self._layout.matrix(in_size, sum(rows.values())), rows, in_size)

    def _with_slots(self, matrix: MX, rows: Mapping[str, int], in_size: int) -> MX:
        first = 0
        for name, num_rows in rows.items():
            self.slots[f"{name}.weight"] = Slot(
                (num_rows, in_size),
                partial(matrix.fill, first),
                partial(matrix.read, first, num_rows),
            )
            first += num_rows
        return matrix

    def _bias(self, rows: Mapping[str, int]) -> Tensor:
        bias = torch.empty(sum(rows.values()), dtype=self._layout.dtype, device=self._device)
        for name, part in zip(rows, bias.split(list(rows.values())), strict=True):
            self.slots[f"{name}.bias"] = self._vector_slot(part)
        return bias

    def _layer(self, prefix: str, shape: LayerShape) -> Layer[M]:
        arch, attn = self.arch, f"{prefix}self_attn."
        hidden, q_size, kv_size = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = {f"{attn}q_proj": q_size, f"{attn}k_proj": kv_size, f"{attn}v_proj": kv_size}
        norms = arch.family.norms
        widths = (arch.head_dim,) * 2 if arch.family.qk_norm == "head" else (q_size, kv_size)
        names = (f"{attn}q_norm.weight", f"{attn}k_norm.weight") if arch.family.qk_norm else (None, None)
        layer = Layer(
            input_norm=self._norm(prefix, norms.attention_in),
            qkv=self._matrix(qkv, hidden),
            qkv_bias=self._bias(qkv) if arch.qkv_bias else None,
            q_norm=None if names[0] is None else self._vector(names[0], widths[0]),
            k_norm=None if names[1] is None else self._vector(names[1], widths[1]),
            output=self._matrix({f"{attn}o_proj": hidden}, q_size),
            output_bias=self._bias({f"{attn}o_proj": hidden}) if arch.output_bias else None,
            output_norm=self._norm(prefix, norms.attention_out),
            mlp_norm=self._norm(prefix, norms.mlp_in),
            mlp=self._experts(f"{prefix}mlp.") if shape.has_experts else self._mlp(f"{prefix}mlp."),
            mlp_output_norm=self._norm(prefix, norms.mlp_out),
        )
        if (order := arch.head_order) is not None:
            for name in (f"{attn}{part}.{kind}" for part in ("q_proj", "k_proj") for kind in ("weight", "bias")):
                if name in self.slots:
                    self.slots[name] = _reordered(self.slots[name], order)
        return layer

    def _norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self._vector(f"{prefix}{name}.weight", self.arch.hidden_size)

    def _mlp(self, prefix: str) -> Mlp[M]:
        hidden, inner = self.arch.hidden_size, self.arch.intermediate_size
        gate_up = {f"{prefix}gate_proj": inner, f"{prefix}up_proj": inner}
        if self.arch.family.is_fused:
            gate_up = {f"{prefix}gate_up_proj": 2 * inner}
        return Mlp(
            gate_up=self._with_slots(self._layout.gated_matrix(hidden, inner), gate_up, hidden),
            down=self._matrix({f"{prefix}down_proj": hidden}, inner),
        )

    def _experts(self, prefix: str) -> Experts[M]:
        shape, hidden = self.arch.experts, self.arch.hidden_size
        assert shape is not None
        inner, make = shape.intermediate_size, self._layout.expert_matrices
        each = [f"{prefix}experts.{e}." for e in range(shape.num)]
        gates = {f"{name}{part}": inner for name in each for part in ("gate_proj", "up_proj")}
        downs = {f"{name}down_proj": hidden for name in each}
        gate_up, down = make(shape.num, hidden, inner, gated=True), make(shape.num, inner, hidden, gated=False)
        self._with_slots(gate_up, gates, hidden)
        self._with_slots(down, downs, inner)
        return Experts(shape, self._matrix({f"{prefix}gate": shape.num}, hidden), gate_up, down)


def _reordered(slot: Slot, order: tuple[int, ...]) -> Slot:
    """Return the place of a parameter whose rows go there head by head in this order."""
    rows = torch.arange(slot.shape[0]).view(-1, len(order))[:, list(order)].reshape(-1)
    back = rows.argsort()
    return Slot(
        slot.shape,
        lambda weights: slot.fill(weights[rows.to(weights.device)]),
        lambda: slot.read().cpu()[back],
    )


class Decoder:
    """Runs the forward pass over weights in PyTorch's layout.

    Args:
        apply: how to compute experts.
    """

    def __init__(self, weights: Weights[TorchMatrix], dtype: torch.dtype, apply: ApplyExperts) -> None:
        self._weights, self._eps, self._dtype, self._apply = weights, weights.arch.norm_eps, dtype, apply

    def logits(self, token_ids_T: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Compute logits ``[T, vocab]``, and give them with the experts chosen, ``[T, layers with experts, k]``, if
        there are any; write the tokens' keys and values to the cache."""
        hidden_TH, routes_TLK = self.prefill(token_ids_T, attention)
        logits_TV = self._weights.lm_head.times(rms_norm(hidden_TH, self._weights.norm, self._eps))
        scale = self._weights.arch.logit_scale
        return logits_TV if scale == 1 else logits_TV.mul_(scale), routes_TLK

    def prefill(self, token_ids_T: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Compute ``[T, H]`` before the last norm, and give it with the experts chosen; write the tokens' keys and
        values to the cache."""
        x_TH = F.embedding(token_ids_T, self._weights.embedding).to(self._dtype)
        if (scale := self._weights.arch.embedding_scale) != 1:
            x_TH = x_TH * scale
        routes: list[Tensor] = []
        for index, layer in enumerate(self._weights.layers):
            qkv_TF = layer.qkv.times(self._normed(x_TH, layer.input_norm))
            if layer.qkv_bias is not None:
                qkv_TF += layer.qkv_bias
            self._add(layer.output, attention(index, layer, qkv_TF), layer.output_bias, layer.output_norm, x_TH)
            normed_TH = self._normed(x_TH, layer.mlp_norm)
            if isinstance(layer.mlp, Experts):
                weights_TK, ids_TK = choose(layer.mlp, normed_TH)
                routes.append(ids_TK)
                x_TH.add_(self._apply(layer.mlp, normed_TH, weights_TK, ids_TK))
            else:
                gated_TF = silu_product(layer.mlp.gate_up.times(normed_TH))
                self._add(layer.mlp.down, gated_TF, None, layer.mlp_output_norm, x_TH)
        return x_TH, torch.stack(routes, 1) if routes else None

    def _normed(self, x_TH: Tensor, weight_H: Tensor | None) -> Tensor:
        return x_TH if weight_H is None else rms_norm(x_TH, weight_H, self._eps)

    def _add(
        self, matrix: TorchMatrix, inputs_TF: Tensor, bias_H: Tensor | None, norm_H: Tensor | None, x_TH: Tensor
    ) -> None:
        """Add a product to the hidden state in place."""
        scale = self._weights.arch.residual_scale
        if norm_H is None:
            matrix.add_times(inputs_TF, x_TH, scale)
            if bias_H is not None:
                x_TH.add_(bias_H, alpha=scale)
            return
        added_TH = matrix.times(inputs_TF)
        if bias_H is not None:
            added_TH += bias_H
        x_TH.add_(rms_norm(added_TH, norm_H, self._eps), alpha=scale)
