"""Attention of new tokens to what is cached and to each other, for one prefill.

Shapes: B sequences, Q new tokens of the longest, H query heads, K key-value heads, D head dimension, S tokens of a
block, N blocks of the longest sequence.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from rollover.engine.embedded.kv_cache import Ints, KVCache, SlotMapping
from rollover.engine.embedded.model import Layer
from rollover.engine.embedded.ops import TorchMatrix
from rollover.engine.embedded.rotary import Heads, Rotary


class PrefillAttention:
    """New tokens of several sequences, each attending to its cache and to those of its own before it.

    ``tables_BN`` are the block tables, ``starts_B`` the tokens cached already, ``counts_B`` the new ones.
    Tokens come packed, ``T = sum(counts)``; only inside the attention product are they padded.
    """

    def __init__(self, kv: KVCache, rotary: Rotary, tables_BN: Ints, starts_B: Ints, counts_B: Ints) -> None:
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
        self._heads = Heads(rotary, kv.to_device(positions_T))
        self._slot_mapping = SlotMapping(kv.to_device(block_T), kv.to_device(positions_T % kv.block_size))
        self._packed, self._padded = kv.to_device(packed), kv.to_device(padded_T)
        self._tables = kv.to_device(tables_BN.reshape(-1))
        self._visible_B1QL = kv.to_device(visible).unsqueeze(1)

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_TF: Tensor) -> Tensor:
        """Return ``[T, H * D]``."""
        kv = self._kv
        q_THD, keys_TKD, values_TKD = self._heads(layer, qkv_TF)
        kv.write(index, self._slot_mapping, keys_TKD, values_TKD)
        num_heads = q_THD.shape[1]
        q_BHQD = q_THD[self._packed].view(self._batch, self._longest, num_heads, -1).transpose(1, 2)
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD,
            self._gathered(kv.keys[index].mT),
            self._gathered(kv.values[index]),
            attn_mask=self._visible_B1QL,
            enable_gqa=num_heads != kv.num_kv_heads,
        )
        return out_BHQD.transpose(1, 2).reshape(-1, num_heads * kv.head_dim)[self._padded]

    def _gathered(self, pool: Tensor) -> Tensor:
        """Return ``[B, K, N * S, D]``: the blocks of each sequence one after another."""
        blocks = pool.index_select(0, self._tables).view(self._batch, -1, *pool.shape[1:])
        return blocks.transpose(1, 2).reshape(self._batch, pool.shape[1], -1, pool.shape[3])
