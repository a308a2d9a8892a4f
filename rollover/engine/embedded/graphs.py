"""Decoding in batches of a few fixed sizes, so that a GPU replays what it recorded once.

An iteration is then one launch, whatever the number of layers. What changes from one to the next, token ids, lengths,
block tables and noise, is copied to where the recording reads it; the host waits once, for the tokens drawn. Sequences
that fill a batch up to its size own no block: they write to a spare one. On a CPU the same steps run without recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.engine.embedded.experts import apply_to_all
from rollover.engine.embedded.kv_cache import KVCache, SlotMapping
from rollover.engine.embedded.model import Attention, Decoder, Layer
from rollover.engine.embedded.model_runner import InputBatch, RunnerSizes, TorchModelRunner, wanted_routes
from rollover.engine.embedded.ops import TorchMatrix
from rollover.engine.embedded.rotary import Heads, Rotary
from rollover.engine.embedded.sampler import Drawn, drawn, sample
from rollover.hf.architecture import Architecture
from rollover.types import SamplingParams

_Outputs = tuple[Tensor, Tensor, Tensor | None]
_STEPS = 16
"""Batch sizes between two powers of two."""


class GraphModelRunner(TorchModelRunner):
    """Implements ``ModelRunner`` for GPUs: prefill as it is, decoding as recorded. The last block of its cache is the
    spare one."""

    def __init__(self, arch: Architecture, sizes: RunnerSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(arch, replace(sizes, num_blocks=sizes.num_blocks + 1), dtype, device)
        self._device, self._most = device, sizes.max_decoded
        width = -(-sizes.max_context // sizes.block_size)
        self._inputs = _Inputs(bucket(self._most, self._most), width, sizes.num_blocks, device)
        self._recordings: dict[int, _Recording] = {}
        self._shared = _SharedMemory()
        self._fits_triton, experts = False, apply_to_all
        if device.type == "cuda" and find_spec("triton") is not None:
            from rollover.engine.embedded.experts_triton import apply_with_triton
            from rollover.engine.embedded.paged_triton import fits

            self._fits_triton, experts = fits(arch.head_dim, sizes.block_size), apply_with_triton
        self._recorded = Decoder(self._weights, dtype, experts)

    def decode(self, tokens: InputBatch, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64]) -> Drawn:
        num_seqs = len(params)
        size = bucket(num_seqs, self._most)
        self._inputs.set(tokens, params, uniforms_B, size)
        recording = self._recordings.get(size)
        if recording is None:
            recording = _Recording(lambda: self._iteration(size), self._device, self._shared)
            self._recordings[size] = recording
        logits_BV, drawn_2B, routes_BLK = recording.replay(lambda: self._iteration(size))
        kept: Sequence[bytes] = ()
        if any(p.is_cut for p in params):
            ids_B, logprobs_B, kept = sample(logits_BV[:num_seqs], params, uniforms_B)
            drawn_2B = torch.stack([ids_B.double(), logprobs_B.double()])
        ids, logprobs = drawn_2B[:, :num_seqs].tolist()  # waits for the device, once
        return Drawn([int(i) for i in ids], logprobs, kept, wanted_routes(routes_BLK, params, self._weights.arch))

    def _iteration(self, size: int) -> _Outputs:
        """Compute logits ``[B, vocab]``, token ids and log-probs ``[2, B]`` as float64, and experts chosen."""
        given = self._inputs
        logits_BV, routes_BLK = self._recorded.logits(given.token_ids[:size], self._attention(size))
        logits_BV = logits_BV.float()
        scales_B1, greedy_B1, noise_B1 = given.drawing[:, :size].unsqueeze(2)
        ids_B, logprobs_B = drawn(logits_BV, scales_B1.float(), noise_B1, greedy_B1 > 0)
        return logits_BV, torch.stack([ids_B.double(), logprobs_B.double()]), routes_BLK

    def _attention(self, size: int) -> Attention:
        tables_BN, lengths_B = self._inputs.tables[:size], self._inputs.lengths[:size]
        if self._fits_triton:
            from rollover.engine.embedded.paged_triton import TritonAttention

            return TritonAttention(self.kv, self._rotary, tables_BN, lengths_B)
        return GatheredAttention(self.kv, self._rotary, tables_BN, lengths_B)


class GatheredAttention:
    """Attends over copies of all blocks of the tables, in PyTorch's operations: for where there is no Triton."""

    def __init__(self, kv: KVCache, rotary: Rotary, tables_BN: Tensor, lengths_B: Tensor) -> None:
        self._kv, self._rotary, self._tables_BN = kv, rotary, tables_BN
        self._heads = Heads(rotary, lengths_B)
        tails_B = tables_BN.gather(1, lengths_B.unsqueeze(1) // kv.block_size).squeeze(1)
        self._slot_mapping = SlotMapping(tails_B, lengths_B % kv.block_size)
        places = torch.arange(tables_BN.shape[1] * kv.block_size, device=kv.device)
        ahead_B1L = (lengths_B.unsqueeze(1) - places).unsqueeze(1)
        self._hidden_B11L = {
            window: ((ahead_B1L < 0) | (ahead_B1L >= (window or len(places)))).unsqueeze(1)
            for window in {layer.window for layer in rotary.layers}
        }

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_BF: Tensor) -> Tensor:
        """Return ``[B, H * D]``."""
        kv, num_seqs = self._kv, len(qkv_BF)
        q_BHD, keys_BKD, values_BKD = self._heads(index, layer, qkv_BF)
        kv.write(index, self._slot_mapping, keys_BKD, values_BKD)
        keys = (
            kv.keys[index][self._tables_BN].permute(0, 2, 3, 1, 4).reshape(num_seqs, kv.num_kv_heads, kv.head_dim, -1)
        )
        values = kv.values[index][self._tables_BN].transpose(1, 2).reshape(num_seqs, kv.num_kv_heads, -1, kv.head_dim)
        scores = q_BHD.view(num_seqs, kv.num_kv_heads, -1, kv.head_dim) @ keys
        hidden_B11L = self._hidden_B11L[self._rotary.layers[index].window]
        scores = scores.float().mul_(self._rotary.scale).masked_fill_(hidden_B11L, -torch.inf)
        weights = scores.mul_(math.log(2)).softmax(-1).to(values.dtype)
        return (weights @ values).view(num_seqs, -1)


class _Inputs:
    """The inputs of a recording: places on the device that it reads, and on the host where they are set."""

    def __init__(self, rows: int, width: int, spare_block: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host_ints = torch.zeros(rows, 2 + width, dtype=torch.int64, pin_memory=pinned)
        self._host_drawing = torch.ones(3, rows, dtype=torch.float64, pin_memory=pinned)
        self._ints, self.drawing = self._host_ints.to(device), self._host_drawing.to(device)
        self.token_ids, self.lengths, self.tables = self._ints[:, 0], self._ints[:, 1], self._ints[:, 2:]
        self._spare_block = spare_block

    def set(
        self, tokens: InputBatch, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64], size: int
    ) -> None:
        num_seqs, width = tokens.tables_BN.shape
        ints, drawing = self._host_ints.numpy(), self._host_drawing.numpy()
        ints[:num_seqs, 0], ints[:num_seqs, 1] = tokens.token_ids_T, tokens.starts_B
        ints[:num_seqs, 2 : 2 + width] = tokens.tables_BN
        ints[num_seqs:size, :2], ints[num_seqs:size, 2] = 0, self._spare_block
        temperatures = np.array([p.temperature for p in params])
        drawing[0, :num_seqs] = 1 / math.log(2) / np.where(temperatures == 0, 1, temperatures)
        drawing[1, :num_seqs], drawing[2, :num_seqs] = temperatures == 0, uniforms_B
        self._ints[:size].copy_(self._host_ints[:size], non_blocking=True)
        self.drawing.copy_(self._host_drawing, non_blocking=True)


class _SharedMemory:
    """The memory that all recordings of a runner use in turn. It is gone when the last of them is."""

    pool: Any = None


class _Recording:
    """A computation on fixed places in memory: recorded on a GPU, simply done on a CPU."""

    def __init__(self, compute: Callable[[], _Outputs], device: torch.device, shared: _SharedMemory) -> None:
        self._graph = None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and lets libraries allocate
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Mode "global" would fail when the trainer's thread allocates meanwhile.
        with torch.cuda.graph(self._graph, pool=shared.pool, capture_error_mode="thread_local"):
            self._outputs = compute()
        shared.pool = self._graph.pool()

    def replay(self, compute: Callable[[], _Outputs]) -> _Outputs:
        """Compute, into places that the next replay overwrites; by ``compute`` where nothing is recorded. It is not
        kept: recordings that refer to their runner would keep its memory when it is dropped."""
        if self._graph is None:
            return compute()
        self._graph.replay()
        return self._outputs


def bucket(num_seqs: int, most: int) -> int:
    """Return the batch size that is recorded for ``num_seqs`` sequences: at most an eighth more than they are, or
    ``most``."""
    step = max(1, 2 ** (num_seqs - 1).bit_length() // _STEPS)
    return min(most, -(-num_seqs // step) * step)
