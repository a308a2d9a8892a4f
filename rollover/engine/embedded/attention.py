"""The key-value cache and attention over it, for one prefill or one decode iteration.

Decoding on a CPU is bound by reading the cache, so nothing is gathered: the query of each sequence is laid
beside each of its blocks and the blocks are multiplied where they lie, in one batched product over the used
range of the pool, which the scheduler keeps dense. Only one number per block and head travels between the
blocks of a sequence before the softmax (the largest score) and one row after it (the weighted values). Work
grows with the blocks really cached, never with the longest sequence times the batch. A block that several
siblings share is multiplied once with all their queries.

Shapes: B sequences, H query heads, K key-value heads, G = H / K, D head dimension, S tokens of a block, N
blocks of the longest sequence, E entries: one per (block, sequence using it).
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class PagedKV:
    """Keys ``[layers, num_blocks, K, D, S]`` and values ``[layers, num_blocks, K, S, D]``, zero at first.

    Keys lie transposed: products of a few queries with a block run at memory speed only if the tokens are
    adjacent, four times slower otherwise.
    """

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
        shape = (num_layers, num_blocks, num_kv_heads, head_dim, block_size)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(*shape[:3], block_size, head_dim, dtype=dtype, device=device)
        self.keys, self.values = self._keys.unbind(), self._values.unbind()  # of each layer
        self.num_kv_heads, self.block_size, self.head_dim = num_kv_heads, block_size, head_dim
        self.device = device

    def write(
        self, layer: int, blocks_T: Tensor, offsets_T: Tensor, keys_TKD: Tensor, values_TKD: Tensor
    ) -> None:
        self.keys[layer][blocks_T, :, :, offsets_T] = keys_TKD
        self.values[layer][blocks_T, :, offsets_T] = values_TKD

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """All at once: every source is read before any destination is written."""
        source, destination = torch.tensor(copies, device=self.device).unbind(1)
        for pool in (*self.keys, *self.values):
            pool[destination] = pool[source]

    def zero_(self) -> None:
        self._keys.zero_()
        self._values.zero_()

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
        self._blocks, self._offsets = kv.to_device(block_T), kv.to_device(positions_T % kv.block_size)
        self._packed, self._padded = kv.to_device(packed), kv.to_device(padded_T)
        self._tables = kv.to_device(tables_BN.reshape(-1))
        self._visible_B1QL = kv.to_device(visible).unsqueeze(1)

    def __call__(self, layer: int, q_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
        """``[T, H * D]``"""
        kv = self._kv
        kv.write(layer, self._blocks, self._offsets, keys_TKD, values_TKD)
        num_heads = q_THD.shape[1]
        q_BHQD = q_THD[self._packed].view(self._batch, self._longest, num_heads, -1).transpose(1, 2)
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD,
            self._gathered(kv.keys[layer].mT),
            self._gathered(kv.values[layer]),
            attn_mask=self._visible_B1QL,
            enable_gqa=num_heads != kv.num_kv_heads,
        )
        return out_BHQD.transpose(1, 2).reshape(-1, num_heads * kv.head_dim)[self._padded]

    def _gathered(self, pool: Tensor) -> Tensor:
        """``[B, K, N * S, D]``: the blocks of each sequence one after another."""
        blocks = pool.index_select(0, self._tables).view(self._batch, -1, *pool.shape[1:])
        return blocks.transpose(1, 2).reshape(self._batch, pool.shape[1], -1, pool.shape[3])


_HIDDEN = np.float32(-1e30)
"""Score of a position that is not there: finite, so that a block of nothing else gives no NaN."""


class _Pass:
    """Blocks multiplied together, each with the queries of the same number U of sequences: ``P * U`` entries."""

    def __init__(self, kv: PagedKV, blocks: slice | Tensor, owners_PU: Ints, visible_E: Ints, num_heads: int) -> None:
        self._kv, self._blocks = kv, blocks
        self._num_blocks, self._users = owners_PU.shape
        self._num_heads = num_heads
        self.owners = kv.to_device(owners_PU.reshape(-1))
        mask = np.where(np.arange(kv.block_size) < visible_E[:, None], np.float32(0), _HIDDEN)
        self._mask_E1S = kv.to_device(mask).unsqueeze(1)
        self._scale = kv.head_dim**-0.5 / math.log(2)

    def scores(self, layer: int, q_BHD: Tensor) -> Tensor:
        """``[E, H, S]`` in float32, masked and scaled to be exponents of 2: ``exp`` is slow where it underflows."""
        kv = self._kv
        keys = kv.keys[layer][self._blocks].flatten(0, 1)
        products = torch.bmm(self._by_block(q_BHD.index_select(0, self.owners), kv.head_dim), keys)
        return torch.add(self._mask_E1S, self._by_entry(products).float(), alpha=self._scale)

    def weighted(self, layer: int, weights_EHS: Tensor) -> Tensor:
        """``[E * H, D]`` in float32: the values of each block, summed with the weights of each entry."""
        kv = self._kv
        values = kv.values[layer][self._blocks].flatten(0, 1)
        weights = self._by_block(weights_EHS.to(values.dtype), kv.block_size)
        return self._by_entry(torch.bmm(weights, values)).float().view(-1, kv.head_dim)

    def _by_block(self, rows_EHX: Tensor, size: int) -> Tensor:
        """``[E, H, size]`` to ``[P * K, U * G, size]``."""
        num_kv = self._kv.num_kv_heads
        if self._users > 1:
            rows_EHX = rows_EHX.view(self._num_blocks, self._users, num_kv, -1).transpose(1, 2).contiguous()
        return rows_EHX.view(self._num_blocks * num_kv, -1, size)

    def _by_entry(self, products: Tensor) -> Tensor:
        """``[P * K, U * G, size]`` to ``[E, H, size]``."""
        size = products.shape[-1]
        if self._users > 1:
            split = products.view(self._num_blocks, self._kv.num_kv_heads, self._users, -1)
            products = split.transpose(1, 2).contiguous()
        return products.view(-1, self._num_heads, size)


class DecodeAttention:
    """One new token of each sequence, so T is B. ``lengths_B`` are the tokens cached before it."""

    def __init__(self, kv: PagedKV, tables_BN: Ints, lengths_B: Ints, num_heads: int) -> None:
        self._kv, self._num_heads = kv, num_heads
        last_B, offsets_B = np.divmod(lengths_B, kv.block_size)
        used_BN = np.arange(tables_BN.shape[1]) <= last_B[:, None]
        seq_E, column_E = np.nonzero(used_BN)
        block_E = tables_BN[seq_E, column_E]
        visible_E = lengths_B[seq_E] + 1 - column_E * kv.block_size
        shared_E = np.bincount(block_E)[block_E] > 1
        entry_E = block_E.copy()
        alone, together = np.flatnonzero(~shared_E), np.flatnonzero(shared_E)
        self._passes = [self._scan(block_E[alone], seq_E[alone], visible_E[alone])]
        if len(together):
            part, entries = self._gather(block_E[together], seq_E[together], visible_E[together])
            entry_E[together] = len(self._passes[0].owners) + entries
            self._passes.append(part)
        self._splits = [len(p.owners) for p in self._passes]
        self._owners = torch.cat([p.owners for p in self._passes]) if len(together) else self._passes[0].owners
        entry_BN = np.zeros_like(tables_BN)  # entry 0 is the null block's: nothing is visible in it
        entry_BN[used_BN] = entry_E
        self._entries = kv.to_device(entry_BN.reshape(-1))
        rows_BHN = entry_BN[:, None] * num_heads + np.arange(num_heads)[:, None]
        used_BHN = np.broadcast_to(used_BN[:, None], rows_BHN.shape)
        counts = np.repeat(last_B + 1, num_heads)
        self._value_rows, self._value_starts = kv.to_device(rows_BHN[used_BHN]), kv.to_device(counts.cumsum() - counts)
        self.positions, self._offsets = kv.to_device(lengths_B), kv.to_device(offsets_B)
        self._tails = kv.to_device(tables_BN[np.arange(len(tables_BN)), last_B])

    def _scan(self, block_E: Ints, seq_E: Ints, visible_E: Ints) -> _Pass:
        """The pool up to the last of these blocks, where it lies: its entries are the blocks. Those that nobody
        uses compute something that nobody reads."""
        end = int(block_E.max(initial=0)) + 1
        owners_P1, visible_P = np.zeros((end, 1), dtype=np.int64), np.zeros(end, dtype=np.int64)
        owners_P1[block_E, 0], visible_P[block_E] = seq_E, visible_E
        return _Pass(self._kv, slice(0, end), owners_P1, visible_P, self._num_heads)

    def _gather(self, block_E: Ints, seq_E: Ints, visible_E: Ints) -> tuple[_Pass, Ints]:
        """Copies of blocks of several users, and the entry of each (block, sequence)."""
        blocks_P, place_E, counts_P = np.unique(block_E, return_inverse=True, return_counts=True)
        order = np.argsort(place_E, kind="stable")
        rank_E = np.empty_like(place_E)
        rank_E[order] = np.arange(len(order)) - np.repeat(counts_P.cumsum() - counts_P, counts_P)
        owners_PU = np.zeros((len(blocks_P), int(counts_P.max())), dtype=np.int64)
        owners_PU[place_E, rank_E] = seq_E
        entry_E = place_E * owners_PU.shape[1] + rank_E
        visible = np.zeros(owners_PU.size, dtype=np.int64)
        visible[entry_E] = visible_E
        return _Pass(self._kv, self._kv.to_device(blocks_P), owners_PU, visible, self._num_heads), entry_E

    def __call__(self, layer: int, q_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
        """``[B, H * D]``"""
        kv, num_seqs, num_heads = self._kv, len(q_THD), self._num_heads
        kv.write(layer, self._tails, self._offsets, keys_TKD, values_TKD)
        scores_EHS = _joined([p.scores(layer, q_THD) for p in self._passes])
        top_BNH = scores_EHS.amax(-1).index_select(0, self._entries).view(num_seqs, -1, num_heads)
        top_EH1 = top_BNH.amax(1).index_select(0, self._owners).unsqueeze(-1)
        weights_EHS = scores_EHS.sub_(top_EH1).exp2_()
        sum_BNH = weights_EHS.sum(-1).index_select(0, self._entries).view(num_seqs, -1, num_heads)
        parts = zip(self._passes, weights_EHS.split(self._splits), strict=True)
        rows = _joined([p.weighted(layer, weights) for p, weights in parts])
        out, *_ = torch.embedding_bag(rows, self._value_rows, self._value_starts)  # sums the rows of each head
        return out.div_(sum_BNH.sum(1).view(-1, 1)).to(q_THD.dtype).view(num_seqs, -1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
