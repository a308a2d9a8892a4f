"""Attention of one new token of each sequence over the paged cache, as Triton kernels.

Nothing is gathered: a program reads the blocks of its sequence where they lie. Sizes of the launch depend on the number
of sequences alone, lengths are read on the device, so a recorded launch serves all lengths. A sequence is split among
several programs where there are few, and their sums are combined (Dao et al., Flash-Decoding, 2023).

Layouts are as in ``kv_cache`` and, for the joint projection, as in ``model``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.model import Layer
from rollover.engine.embedded.ops import TorchMatrix
from rollover.engine.embedded.rotary import Rotary, norm_all_heads

_LEAST_ROWS = 16
"""The least number of rows of a matrix that Triton multiplies."""
_PROGRAMS = 1024
"""The number of programs that keep a GPU's memory busy."""


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, cosines, sines, keys, values, tables, lengths, row_stride, table_stride, eps,
    num_heads, num_kv, NORM: tl.constexpr, ROTATE: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a query head in place, or write a key or value head to the cache. Program (b, h): head h of
    sequence b."""
    b, h = tl.program_id(0), tl.program_id(1)
    position = tl.load(lengths + b)
    block = tl.load(tables + b * table_stride + position // S)
    offset = position % S
    half = tl.arange(0, D // 2)
    head = qkv + b * row_stride + h * D
    low, high = tl.load(head + half).to(tl.float32), tl.load(head + D // 2 + half).to(tl.float32)
    if h < num_heads + num_kv:
        if NORM:
            weight = q_norm if h < num_heads else k_norm
            scale = 1 / tl.sqrt((tl.sum(low * low) + tl.sum(high * high)) / D + eps)
            low *= scale * tl.load(weight + half).to(tl.float32)
            high *= scale * tl.load(weight + D // 2 + half).to(tl.float32)
        if ROTATE:
            cosine = tl.load(cosines + position * (D // 2) + half).to(tl.float32)
            sine = tl.load(sines + position * (D // 2) + half).to(tl.float32)
            low, high = low * cosine - high * sine, high * cosine + low * sine
        if h < num_heads:
            tl.store(head + half, low.to(qkv.dtype.element_ty))
            tl.store(head + D // 2 + half, high.to(qkv.dtype.element_ty))
        else:
            cell = keys + (block * num_kv + h - num_heads) * D * S + offset
            tl.store(cell + half * S, low.to(keys.dtype.element_ty))
            tl.store(cell + (D // 2 + half) * S, high.to(keys.dtype.element_ty))
    else:
        cell = values + (block * num_kv + h - num_heads - num_kv) * D * S + offset * D
        tl.store(cell + half, low.to(values.dtype.element_ty))
        tl.store(cell + D // 2 + half, high.to(values.dtype.element_ty))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, keys, values, tables, lengths, sums, peaks, totals, row_stride, table_stride, num_kv, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, S: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of key-value head k to a part of the blocks of sequence b. Program (b, k, split). With
    WINDOW 0 there is no window.

    ``input_precision`` concerns float32 alone; "ieee" is the only one known to all GPUs.
    """
    b, k, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b) + 1
    num_blocks = tl.cdiv(length, S)
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    share = tl.cdiv(num_blocks - oldest // S, SPLITS)
    start = oldest // S + split * share
    g, d, s = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, S)
    mine = g[:, None] < GROUP
    q = tl.load(qkv + b * row_stride + (k * GROUP + g[:, None]) * D + d[None, :], mask=mine, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    for j in range(start, tl.minimum(start + share, num_blocks)):
        cell = (tl.load(tables + b * table_stride + j) * num_kv + k) * D * S
        scores = tl.dot(q, tl.load(keys + cell + d[:, None] * S + s[None, :]), input_precision="ieee") * scale
        scores = tl.where(j * S + s[None, :] < length, scores, float("-inf"))
        if WINDOW:
            scores = tl.where(j * S + s[None, :] >= oldest, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        block = tl.load(values + cell + s[:, None] * D + d[None, :])
        out = out * shrink[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
    row = ((b * num_kv + k) * GROUP + g) * SPLITS + split
    tl.store(sums + row[:, None] * D + d[None, :], out, mask=mine)
    tl.store(peaks + row, peak, mask=g < GROUP)
    tl.store(totals + row, total, mask=g < GROUP)


@triton.jit
def _combine(sums, peaks, totals, out, D: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Combine the parts of one query head. Program (row). A part without blocks has peak minus infinity and weighs
    nothing."""
    row = tl.program_id(0)
    part, d = tl.arange(0, SPLITS), tl.arange(0, D)
    peak = tl.load(peaks + row * SPLITS + part)
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(totals + row * SPLITS + part), 0)
    rows = tl.load(sums + (row * SPLITS + part[:, None]) * D + d[None, :])
    tl.store(out + row * D + d, (tl.sum(rows * weight[:, None], 0) / total).to(out.dtype.element_ty))


def fits(head_dim: int, block_size: int) -> bool:
    """Return True for powers of two, which Triton's vectors need."""
    return all(n >= _LEAST_ROWS and n & (n - 1) == 0 for n in (head_dim, block_size))


class TritonAttention:
    """``tables_BN`` are the block tables and ``lengths_B`` the tokens cached before the new ones, on the device."""

    def __init__(self, kv: KVCache, rotary: Rotary, tables_BN: Tensor, lengths_B: Tensor) -> None:
        self._kv, self._rotary, self._tables_BN, self._lengths_B = kv, rotary, tables_BN, lengths_B.contiguous()
        parts = -(-_PROGRAMS // (len(lengths_B) * kv.num_kv_heads))
        self._splits = min(16, triton.next_power_of_2(parts))

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_BF: Tensor) -> Tensor:
        """Return ``[B, H * D]``."""
        kv, rotary, splits = self._kv, self._rotary, self._splits
        num_seqs, num_heads, num_kv, size = len(qkv_BF), rotary.num_heads, kv.num_kv_heads, kv.head_dim
        group = num_heads // num_kv
        if not rotary.norms_heads:
            norm_all_heads(rotary, layer, qkv_BF)
        norms, shape = rotary.norms_heads, rotary.layers[index]
        stored = (kv.keys[index], kv.values[index], self._tables_BN, self._lengths_B)
        strides = (qkv_BF.stride(0), self._tables_BN.stride(0))
        _place[num_seqs, num_heads + 2 * num_kv](
            *(qkv_BF, *((layer.q_norm, layer.k_norm) if norms else (None, None))),
            *(rotary.cosines, rotary.sines, *stored, *strides),
            *(rotary.norm_eps, num_heads, num_kv),
            **{"NORM": norms, "ROTATE": shape.rotates, "D": size, "S": kv.block_size},
        )
        sums = qkv_BF.new_empty(num_seqs * num_heads, splits, size, dtype=torch.float32)
        peaks, totals = sums.new_empty(2, num_seqs * num_heads, splits).unbind()
        _attend[num_seqs, num_kv, splits](
            *(qkv_BF, *stored, sums, peaks, totals, *strides, num_kv, rotary.scale),
            **{"GROUP": group, "ROWS": max(_LEAST_ROWS, triton.next_power_of_2(group)), "D": size},
            **{"S": kv.block_size, "SPLITS": splits, "WINDOW": shape.window or 0},
        )
        out_BF = qkv_BF.new_empty(num_seqs, num_heads * size)
        _combine[(num_seqs * num_heads,)](sums, peaks, totals, out_BF, D=size, SPLITS=splits)
        return out_BF
