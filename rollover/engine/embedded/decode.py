"""Attention of the newest token of each sequence to what is cached, in PyTorch's operations, for one iteration.

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
from torch import Tensor

from rollover.engine.embedded.kv_cache import Ints, KVCache, SlotMapping
from rollover.engine.embedded.model import Layer
from rollover.engine.embedded.ops import TorchMatrix
from rollover.engine.embedded.rotary import Heads, Rotary

_HIDDEN = np.float32(-1e30)
"""Score of a position that is not there: finite, so that a block of nothing else gives no NaN."""


class _Pass:
    """Blocks multiplied together, each with the queries of the same number U of sequences: ``P * U`` entries."""

    def __init__(self, kv: KVCache, blocks: slice | Tensor, owners_PU: Ints, visible_E: Ints, num_heads: int) -> None:
        self._kv, self._blocks = kv, blocks
        self._num_blocks, self._users = owners_PU.shape
        self._num_heads = num_heads
        self.owners = kv.to_device(owners_PU.reshape(-1))
        mask = np.where(np.arange(kv.block_size) < visible_E[:, None], np.float32(0), _HIDDEN)
        self._mask_E1S = kv.to_device(mask).unsqueeze(1)
        self._scale = kv.head_dim**-0.5 / math.log(2)

    def scores(self, layer: int, q_BHD: Tensor) -> Tensor:
        """Compute ``[E, H, S]`` in float32, masked and scaled to be exponents of 2: ``exp`` is slow where it
        underflows."""
        kv = self._kv
        keys = kv.keys[layer][self._blocks].flatten(0, 1)
        products = torch.bmm(self._by_block(q_BHD.index_select(0, self.owners), kv.head_dim), keys)
        return torch.add(self._mask_E1S, self._by_entry(products).float(), alpha=self._scale)

    def weighted(self, layer: int, weights_EHS: Tensor) -> Tensor:
        """Compute ``[E * H, D]`` in float32: the values of each block, summed with the weights of each entry."""
        kv = self._kv
        values = kv.values[layer][self._blocks].flatten(0, 1)
        weights = self._by_block(weights_EHS.to(values.dtype), kv.block_size)
        return self._by_entry(torch.bmm(weights, values)).float().view(-1, kv.head_dim)

    def _by_block(self, rows_EHX: Tensor, size: int) -> Tensor:
        """Reorder ``[E, H, size]`` to ``[P * K, U * G, size]``."""
        num_kv = self._kv.num_kv_heads
        if self._users > 1:
            rows_EHX = rows_EHX.view(self._num_blocks, self._users, num_kv, -1).transpose(1, 2).contiguous()
        return rows_EHX.view(self._num_blocks * num_kv, -1, size)

    def _by_entry(self, products: Tensor) -> Tensor:
        """Reorder ``[P * K, U * G, size]`` to ``[E, H, size]``."""
        size = products.shape[-1]
        if self._users > 1:
            split = products.view(self._num_blocks, self._kv.num_kv_heads, self._users, -1)
            products = split.transpose(1, 2).contiguous()
        return products.view(-1, self._num_heads, size)


class DecodeAttention:
    """One new token of each sequence, so T is B. ``lengths_B`` are the tokens cached before it."""

    def __init__(self, kv: KVCache, rotary: Rotary, tables_BN: Ints, lengths_B: Ints) -> None:
        self._kv, self._num_heads = kv, rotary.num_heads
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
        rows_BHN = entry_BN[:, None] * self._num_heads + np.arange(self._num_heads)[:, None]
        used_BHN = np.broadcast_to(used_BN[:, None], rows_BHN.shape)
        counts = np.repeat(last_B + 1, self._num_heads)
        self._value_rows, self._value_starts = kv.to_device(rows_BHN[used_BHN]), kv.to_device(counts.cumsum() - counts)
        self._heads = Heads(rotary, kv.to_device(lengths_B))
        tails_B = tables_BN[np.arange(len(tables_BN)), last_B]
        self._slot_mapping = SlotMapping(kv.to_device(tails_B), kv.to_device(offsets_B))

    def _scan(self, block_E: Ints, seq_E: Ints, visible_E: Ints) -> _Pass:
        """Read the pool up to the last of these blocks, where it lies: its entries are the blocks. Unused blocks are
        computed too, and their results are not read."""
        end = int(block_E.max(initial=0)) + 1
        owners_P1, visible_P = np.zeros((end, 1), dtype=np.int64), np.zeros(end, dtype=np.int64)
        owners_P1[block_E, 0], visible_P[block_E] = seq_E, visible_E
        return _Pass(self._kv, slice(0, end), owners_P1, visible_P, self._num_heads)

    def _gather(self, block_E: Ints, seq_E: Ints, visible_E: Ints) -> tuple[_Pass, Ints]:
        """Copy the blocks of several users; return the copies and the entry of each (block, sequence)."""
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

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_BF: Tensor) -> Tensor:
        """Return ``[B, H * D]``."""
        kv, num_seqs, num_heads = self._kv, len(qkv_BF), self._num_heads
        q_BHD, keys_BKD, values_BKD = self._heads(layer, qkv_BF)
        kv.write(index, self._slot_mapping, keys_BKD, values_BKD)
        scores_EHS = _joined([p.scores(index, q_BHD) for p in self._passes])
        top_BNH = scores_EHS.amax(-1).index_select(0, self._entries).view(num_seqs, -1, num_heads)
        top_EH1 = top_BNH.amax(1).index_select(0, self._owners).unsqueeze(-1)
        weights_EHS = scores_EHS.sub_(top_EH1).exp2_()
        sum_BNH = weights_EHS.sum(-1).index_select(0, self._entries).view(num_seqs, -1, num_heads)
        parts = zip(self._passes, weights_EHS.split(self._splits), strict=True)
        rows = _joined([p.weighted(index, weights) for p, weights in parts])
        out, *_ = torch.embedding_bag(rows, self._value_rows, self._value_starts)  # sums the rows of each head
        return out.div_(sum_BNH.sum(1).view(-1, 1)).to(q_BHD.dtype).view(num_seqs, -1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
