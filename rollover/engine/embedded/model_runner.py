"""Runs the model over a batch of tokens: the ``ModelRunner`` protocol and its version in PyTorch's operations.

A model runner owns the weights and the key-value cache. What it computes for a token depends on the token's prefix, up
to rounding, and not on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rollover.engine.embedded.experts import apply_by_expert
from rollover.engine.embedded.kv_cache import Ints, KVCache, SlotMapping
from rollover.engine.embedded.model import Decoder, Layer, Slot, Weights
from rollover.engine.embedded.ops import TorchLayout, TorchMatrix
from rollover.engine.embedded.rotary import Heads, Rotary
from rollover.engine.embedded.sampler import Drawn, sample
from rollover.hf.architecture import Architecture
from rollover.routes import expert_bytes
from rollover.types import SamplingParams


@dataclass(frozen=True, slots=True)
class InputBatch:
    """New tokens of B sequences, one sequence after the other.

    Example:
        Two new tokens after five cached ones, and one after eight, in blocks of 4: ``token_ids_T = [11, 12, 13]``,
        ``tables_BN = [[3, 1, 0], [2, 5, 4]]``, ``starts_B = [5, 8]``, ``counts_B = [2, 1]``.
    """

    token_ids_T: Ints
    tables_BN: Ints
    """Block table of each sequence, padded with the null block."""
    starts_B: Ints
    """The number of tokens cached already."""
    counts_B: Ints
    """The number of new ones."""


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """Sizes of what a ``ModelRunner`` allocates once.

    Example:
        ``RunnerSizes(num_blocks=4096, block_size=32, max_context=2048, max_decoded=64, max_prefilled=2048)`` holds
        131,040 tokens of cache; block 0 stays empty.
    """

    num_blocks: int
    block_size: int
    max_context: int
    """The number of positions."""
    max_decoded: int
    """The most rows decoded at the same time."""
    max_prefilled: int
    """The most tokens prefilled at the same time."""


class ModelRunner(Protocol):
    """Runs the model over batches of tokens.

    Example:
        A prompt of 5 tokens is one ``prefill`` of 4 and one ``decode`` of the last; then each token drawn is decoded.
    """

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Say where the parameters of a checkpoint go."""
        ...

    @property
    def kv(self) -> KVCache: ...

    def prefill(self, tokens: InputBatch) -> None:
        """Compute tokens whose keys and values alone are wanted, and write these to the cache."""
        ...

    def decode(self, tokens: InputBatch, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64]) -> Drawn:
        """Write the tokens' keys and values to the cache, and draw one token of each sequence, with its log-prob, from
        the logits of its only new one."""
        ...


MakeModelRunner = Callable[[Architecture, RunnerSizes, torch.dtype, torch.device], ModelRunner]
"""Makes a model runner of a model's architecture, sizes, the type of its weights and a device."""


class PrefillAttention:
    """Attention of new tokens of several sequences, each attending to its cache and to its own new tokens before it.

    Tokens come packed, ``T = sum(counts)``; only inside the attention product are they padded. Shapes: B sequences, Q
    new tokens of the longest, H query heads, K key-value heads, D head dimension, S tokens of a block, N blocks of the
    longest sequence.
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
        places = np.arange(tables_BN.shape[1] * kv.block_size)
        ahead = starts_B[:, None, None] + np.arange(self._longest)[:, None] - places
        self._heads = Heads(rotary, kv.to_device(positions_T))
        self._slot_mapping = SlotMapping(kv.to_device(block_T), kv.to_device(positions_T % kv.block_size))
        self._packed, self._padded = kv.to_device(packed), kv.to_device(padded_T)
        self._tables = kv.to_device(tables_BN.reshape(-1))
        self._scale, self._windows = rotary.attention_scale, [layer.window for layer in rotary.layers]
        self._visible_B1QL = {
            window: kv.to_device((ahead >= 0) & (ahead < (window or len(places)))).unsqueeze(1)
            for window in {*self._windows}
        }

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_TF: Tensor) -> Tensor:
        """Return ``[T, H * D]``."""
        kv = self._kv
        q_THD, keys_TKD, values_TKD = self._heads(index, layer, qkv_TF)
        kv.write(index, self._slot_mapping, keys_TKD, values_TKD)
        num_heads = q_THD.shape[1]
        q_BHQD = q_THD[self._packed].view(self._batch, self._longest, num_heads, -1).transpose(1, 2)
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD,
            self._gathered(kv.keys[index].mT),
            self._gathered(kv.values[index]),
            attn_mask=self._visible_B1QL[self._windows[index]],
            scale=self._scale,
            enable_gqa=num_heads != kv.num_kv_heads,
        )
        return out_BHQD.transpose(1, 2).reshape(-1, num_heads * kv.head_dim)[self._padded]

    def _gathered(self, pool: Tensor) -> Tensor:
        """Return ``[B, K, N * S, D]``: the blocks of each sequence one after another."""
        blocks = pool.index_select(0, self._tables).view(self._batch, -1, *pool.shape[1:])
        return blocks.transpose(1, 2).reshape(self._batch, pool.shape[1], -1, pool.shape[3])


class TorchModelRunner:
    """Implements ``ModelRunner`` in PyTorch's operations, on any device that PyTorch knows."""

    def __init__(self, arch: Architecture, sizes: RunnerSizes, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = Weights(arch, device, TorchLayout(dtype, device))
        self.slots = self._weights.slots
        self._decoder = Decoder(self._weights, dtype, apply_by_expert)
        self._rotary = Rotary(arch, sizes.max_context, dtype, device)
        self.kv = KVCache(arch, sizes.num_blocks, sizes.block_size, dtype, device)

    def prefill(self, tokens: InputBatch) -> None:
        attention = PrefillAttention(self.kv, self._rotary, tokens.tables_BN, tokens.starts_B, tokens.counts_B)
        self._decoder.prefill(self.kv.to_device(tokens.token_ids_T), attention)

    def decode(self, tokens: InputBatch, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64]) -> Drawn:
        attention = PrefillAttention(self.kv, self._rotary, tokens.tables_BN, tokens.starts_B, tokens.counts_B)
        logits_BV, routes_BLK = self._decoder.logits(self.kv.to_device(tokens.token_ids_T), attention)
        tokens_B, logprobs_B, kept = sample(logits_BV, params, uniforms_B)
        ids, logprobs = torch.stack([tokens_B.double(), logprobs_B.double()]).tolist()  # waits for the device, once
        return Drawn([int(i) for i in ids], logprobs, kept, wanted_routes(routes_BLK, params, self._weights.arch))


def wanted_routes(
    routes_BLK: Tensor | NDArray[np.int32] | None, params: Sequence[SamplingParams], arch: Architecture
) -> Sequence[bytes]:
    """Return the routes of B sequences (``rollover.routes``); nothing if none wants one."""
    if routes_BLK is None or arch.experts is None or not any(p.returns_routes for p in params):
        return ()
    ids = np.asarray(routes_BLK.cpu() if isinstance(routes_BLK, Tensor) else routes_BLK)
    packed = ids[: len(params)].astype(f"<u{expert_bytes(arch.experts.num)}")
    return [row.tobytes() for row in packed]
