"""The key-value cache and attention over it, for one prefill or one decode iteration.

Decoding on a CPU is bound by reading the cache, so nothing is gathered: the query of each sequence is laid
beside each of its blocks, the blocks are multiplied where they lie (one batched product over the used range
of the pool), and only the scores, ``head_dim`` times smaller than the keys, are put into the order of the
sequences for one softmax. Work grows with the tokens really cached, never with the longest sequence times
the batch. A block that several siblings share is multiplied once with all their queries.

Block 0 is the null block (``cache``): its values are zero, so the padding of block tables adds nothing.
Shapes: B sequences, H query heads, K key-value heads, G = H / K, D head dimension, S tokens of a block, N
blocks of the longest sequence, R rows: one per (block, sequence using it, query head).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class PagedKV:
    """Keys and values ``[layers, num_blocks, K, S, D]``, zero at first."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.num_kv_heads, self.block_size, self.head_dim = num_kv_heads, block_size, head_dim
        self.device = device
        self._heads = np.arange(num_kv_heads, dtype=np.int64) * block_size

    def rows(self, blocks_T: Ints, offsets_T: Ints) -> Tensor:
        """Where token t's heads go in ``write``: ``[T * K]``."""
        first_T = blocks_T * (self.num_kv_heads * self.block_size) + offsets_T
        return self.to_device((first_T[:, None] + self._heads).reshape(-1))

    def write(self, layer: int, rows: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        self.keys[layer].view(-1, self.head_dim).index_copy_(0, rows, keys_TKD.reshape(-1, self.head_dim))
        self.values[layer].view(-1, self.head_dim).index_copy_(0, rows, values_TKD.reshape(-1, self.head_dim))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, destination = torch.tensor(copies, device=self.device).unbind(1)
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]

    def zero_(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class PrefillAttention:
    """New tokens of several sequences, each attending to its cache and to those of its own before it.

    ``tables_BN`` are the block tables, ``starts_B`` the tokens cached already, ``counts_B`` the new ones.
    Tokens come packed, ``T = sum(counts)``; only inside the attention product are they padded.
    """

    def __init__(self, kv: PagedKV, tables_BN: Ints, starts_B: Ints, counts_B: Ints) -> None:
        self._kv = kv
        self._batch, self._longest = len(counts_B), int(counts_B.max())
        sequence_T = np.repeat(np.arange(self._batch), counts_B)
        offset_T = np.arange(len(sequence_T)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        positions_T = starts_B[sequence_T] + offset_T
        padded_T = sequence_T * self._longest + offset_T
        packed = np.zeros(self._batch * self._longest, dtype=np.int64)
        packed[padded_T] = np.arange(len(sequence_T))
        block_T = tables_BN[sequence_T, positions_T // kv.block_size]
        visible = np.arange(tables_BN.shape[1] * kv.block_size) <= (
            starts_B[:, None, None] + np.arange(self._longest)[None, :, None]
        )
        self.positions = kv.to_device(positions_T)
        self._rows = kv.rows(block_T, positions_T % kv.block_size)
        self._packed, self._padded = kv.to_device(packed), kv.to_device(padded_T)
        self._tables = kv.to_device(tables_BN.reshape(-1))
        self._visible_B1QL = kv.to_device(visible).unsqueeze(1)

    def __call__(self, layer: int, q_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
        """``[T, H * D]``"""
        kv = self._kv
        kv.write(layer, self._rows, keys_TKD, values_TKD)
        num_heads = q_THD.shape[1]
        q_BHQD = q_THD[self._packed].view(self._batch, self._longest, num_heads, -1).transpose(1, 2)
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD,
            self._contiguous(kv.keys[layer]),
            self._contiguous(kv.values[layer]),
            attn_mask=self._visible_B1QL,
            enable_gqa=num_heads != kv.num_kv_heads,
        )
        return out_BHQD.transpose(1, 2).reshape(-1, num_heads * kv.head_dim)[self._padded]

    def _contiguous(self, pool: Tensor) -> Tensor:
        """``[B, K, N * S, D]``: the blocks of each sequence one after another."""
        blocks = pool.index_select(0, self._tables).view(self._batch, -1, *pool.shape[1:])
        return blocks.transpose(1, 2).reshape(self._batch, pool.shape[1], -1, pool.shape[3])


@dataclass(frozen=True, slots=True)
class _Pass:
    """Blocks multiplied together, each with the queries of the same number of sequences."""

    blocks: slice | Tensor
    queries_R: Tensor
    """Row of ``q [B * H, D]`` for each score row."""
    width: int
    """Query rows per block and key-value head."""


class DecodeAttention:
    """One new token of each sequence, so T is B. ``lengths_B`` are the tokens cached before it."""

    def __init__(self, kv: PagedKV, tables_BN: Ints, lengths_B: Ints, num_heads: int) -> None:
        self._kv, self._num_heads = kv, num_heads
        num_seqs, width = tables_BN.shape
        used_BN = np.arange(width) <= (lengths_B // kv.block_size)[:, None]
        seq_P, column_P = np.nonzero(used_BN)  # P pairs of (sequence, block)
        block_P = tables_BN[seq_P, column_P]
        shared_P = np.bincount(block_P)[block_P] > 1
        first_BNH = np.zeros((num_seqs, width, num_heads), dtype=np.int64) + np.arange(num_heads)
        passes: list[_Pass] = []
        probs: list[Ints] = []
        num_rows = 0
        for chosen_P in (~shared_P, shared_P):
            if passes and not chosen_P.any():
                continue
            blocks, owners, rows = self._lay_out(block_P[chosen_P], seq_P[chosen_P], scan=not passes)
            pair = np.flatnonzero(chosen_P)
            first_BNH[seq_P[pair], column_P[pair]] = num_rows + rows
            source = np.zeros(owners.size * num_heads, dtype=np.int64)
            slots = (seq_P[pair, None] * num_heads + np.arange(num_heads)) * width + column_P[pair, None]
            source[rows] = slots
            heads = self._head_rows(owners)
            passes.append(_Pass(blocks, kv.to_device(heads), owners.shape[1] * num_heads // kv.num_kv_heads))
            probs.append(source)
            num_rows += source.size
        self._passes = passes
        self._splits = [len(source) for source in probs]
        self._scores_BHN = kv.to_device(first_BNH.transpose(0, 2, 1).reshape(-1))
        self._probs_R = kv.to_device(np.concatenate(probs))
        hidden = np.arange(width * kv.block_size) > lengths_B[:, None]
        self._hidden_B1L = kv.to_device(hidden).unsqueeze(1)
        self.positions = kv.to_device(lengths_B)
        blocks_B = tables_BN[np.arange(num_seqs), lengths_B // kv.block_size]
        self._rows = kv.rows(blocks_B, lengths_B % kv.block_size)
        self._shape = (num_seqs, num_heads, width)

    def _lay_out(self, block_P: Ints, seq_P: Ints, *, scan: bool) -> tuple[slice | Tensor, Ints, Ints]:
        """Blocks to multiply, the sequences ``[blocks, users]`` of each, and the pairs' rows ``[P, H]``.

        Scanning takes the pool up to the highest used block where it lies, unless less than half of it is in
        use. Unused entries compute something that nobody reads.
        """
        order = np.argsort(block_P, kind="stable")
        unique, index, counts = np.unique(block_P, return_inverse=True, return_counts=True)
        rank = np.empty(len(block_P), dtype=np.int64)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks: slice | Tensor
        end = int(block_P.max(initial=0)) + 1
        if scan and 2 * len(unique) >= end:
            blocks, place_P, num_blocks = slice(0, end), block_P, end
        else:
            unique = np.concatenate([[0], unique])
            blocks, place_P, num_blocks = self._kv.to_device(unique), index + 1, len(unique)
        owners = np.zeros((num_blocks, int(counts.max(initial=1))), dtype=np.int64)
        owners[place_P, rank] = seq_P
        num_kv, group = self._kv.num_kv_heads, self._num_heads // self._kv.num_kv_heads
        head = np.arange(self._num_heads)
        rows = ((place_P[:, None] * num_kv + head // group) * owners.shape[1] + rank[:, None]) * group
        return blocks, owners, rows + head % group

    def _head_rows(self, owners: Ints) -> Ints:
        """Rows of ``q [B * H, D]`` in the order block, key-value head, user, head of the group."""
        num_kv = self._kv.num_kv_heads
        heads = np.arange(self._num_heads, dtype=np.int64).reshape(1, num_kv, 1, -1)
        return (owners[:, None, :, None] * self._num_heads + heads).reshape(-1)

    def __call__(self, layer: int, q_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
        """``[B, H * D]``"""
        kv, (num_seqs, num_heads, width) = self._kv, self._shape
        kv.write(layer, self._rows, keys_TKD, values_TKD)
        q = (q_THD * kv.head_dim**-0.5).reshape(-1, kv.head_dim)
        size = kv.block_size
        scores_R = _joined([self._scores(p, q, kv.keys[layer]) for p in self._passes])
        scores_BHL = scores_R.index_select(0, self._scores_BHN).view(num_seqs, num_heads, width * size)
        probs_BHL = torch.softmax(scores_BHL.float().masked_fill_(self._hidden_B1L, -torch.inf), -1)
        probs_R = probs_BHL.to(q.dtype).view(-1, size).index_select(0, self._probs_R)
        parts = zip(self._passes, probs_R.split(self._splits), strict=True)
        out_R = _joined([self._weighted(p, rows, kv.values[layer]) for p, rows in parts])
        out_BHND = out_R.index_select(0, self._scores_BHN).view(num_seqs, num_heads, width, kv.head_dim)
        return out_BHND.sum(2).view(num_seqs, -1)

    @staticmethod
    def _scores(p: _Pass, q: Tensor, pool: Tensor) -> Tensor:
        """``[R, S]``"""
        keys = pool[p.blocks].flatten(0, 1)
        return torch.bmm(q.index_select(0, p.queries_R).view(len(keys), p.width, -1), keys.mT).flatten(0, 1)

    @staticmethod
    def _weighted(p: _Pass, probs_R: Tensor, pool: Tensor) -> Tensor:
        """``[R, D]``: each block's share of the outputs."""
        values = pool[p.blocks].flatten(0, 1)
        return torch.bmm(probs_R.view(len(values), p.width, -1), values).flatten(0, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
