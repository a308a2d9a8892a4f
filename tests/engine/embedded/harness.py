"""Driving the synchronous core: all laws of the embedded engine that need no event loop are tested through it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.block_manager import BlockManager, block_key
from rollover.engine.embedded.core import EngineCore, Output
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.embedded.graphs import GraphModelRunner
from rollover.engine.embedded.scheduler import SequenceScheduler
from rollover.weights.base import WeightSource
from tests.engine.contract import tokens
from tests.engine.models import logprobs

CONFIG = EmbeddedConfig(device="cpu", kv_cache_bytes=2**20, block_size_tokens=4, stream_interval_tokens=1)

BOTH = pytest.mark.usefixtures("kernels")
"""For laws that depend on how an iteration is computed."""


def core_of(folder: Path, *, recorded: bool = False, **settings: Any) -> EngineCore:
    """Make a core; ``recorded`` decodes in batches of fixed sizes, as on a GPU."""
    runner = GraphModelRunner if recorded else None
    return EngineCore(folder, replace(CONFIG, **settings), make_model_runner=runner)


@asynccontextmanager
async def opened(folder: Path, *, lockstep: bool = False, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine.from_folder(folder, replace(CONFIG, **settings), lockstep=lockstep)
    try:
        yield engine
    finally:
        await engine.close()


def digests_of(source: WeightSource) -> dict[str, str]:
    """The SHA-256 of the bytes of each tensor, by name."""
    return {name: _digest(tensor) for name, tensor in source.tensors()}


def digests_in(core: EngineCore) -> dict[str, str]:
    """The same of the tensors that an engine has."""
    with torch.inference_mode():
        return {name: _digest(slot.read()) for name, slot in core._model_runner.slots.items()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def check_blocks(manager: BlockManager, block_tables: Sequence[Sequence[int]]) -> None:
    """Assert that each block is in one place and referenced by these tables alone, and each key leads to its
    block."""
    ref_counts = [0] * manager.num_blocks
    for index in (index for table in block_tables for index in table):
        ref_counts[index] += 1
    assert ref_counts == [block.ref_count for block in manager.blocks], "reference counts are wrong"
    evictable = [block.index for block in (*manager._evict_first, *manager._evictable)]
    places = sorted([*manager._empty, *evictable, *(i for i, n in enumerate(ref_counts) if n)])
    assert places == list(range(1, manager.num_blocks)), "a block is in two places or in none"
    assert all(manager.blocks[index].key is None for index in manager._empty), "an empty block can be found"
    cached = {block.key: block for block in manager.blocks if block.key is not None}
    assert cached == manager._cached and {*evictable} <= {block.index for block in cached.values()}
    for key, block in cached.items():
        assert key == block_key(block.parent, block.token_ids) and manager.blocks[block.index] is block
    followers = [block for parent in manager._followers.values() for block in parent]
    assert sorted(b.index for b in followers) == sorted(b.index for b in cached.values())


def check(scheduler: SequenceScheduler) -> None:
    """Assert the invariants of blocks and sequences."""
    size = scheduler.blocks.block_size
    check_blocks(scheduler.blocks, [s.block_table for s in scheduler.running])
    for sequence in scheduler.running:
        assert len(sequence.block_table) * size >= sequence.num_cached_tokens
        assert sequence.num_missing >= 0
        partial = sequence.block_table[sequence.num_cached_tokens // size :]
        assert all(scheduler.blocks.blocks[index].ref_count == 1 for index in partial), "a shared block is not full"
    assert all(not s.block_table and not s.num_cached_tokens for s in scheduler.waiting)


class Calls:
    """Chunks by request id, gathered from a core whose bookkeeping is checked after every iteration."""

    def __init__(self, core: EngineCore, requests: Iterable[GenerateRequest] = ()) -> None:
        self.core = core
        self.chunks: dict[str, list[Chunk]] = {}
        self.add(*requests)

    def add(self, *requests: GenerateRequest) -> None:
        for req in requests:
            self.core.add(req)
            self.chunks[req.request_id] = []

    def take(self, outputs: list[Output]) -> None:
        for request_id, chunk in outputs:
            self.chunks[request_id].append(chunk)
        check(self.core.scheduler)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.take(self.core.step())

    def abort(self, *request_ids: str) -> None:
        self.take(self.core.abort(request_ids))

    def finish(self, max_steps: int = 2000) -> dict[str, list[Chunk]]:
        """Run to the end, which must come."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.chunks
            self.step()
        raise AssertionError(f"calls still open after {max_steps} iterations")

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tokens(self.chunks[request_id])

    def logprobs(self, request_id: str) -> list[float]:
        return [p for c in self.chunks[request_id] for p in c.logprobs]

    def assert_logprobs_of(self, model: PreTrainedModel, *requests: GenerateRequest, within: float) -> None:
        """Assert that the log-probs of these calls are those that transformers computes for their tokens."""
        for req in requests:
            prompt, temperature = req.prompt_ids + req.response_ids, req.params.temperature or 1.0
            expected = logprobs(model, prompt, self.tokens(req.request_id), temperature)
            assert self.logprobs(req.request_id) == pytest.approx(expected, abs=within), req.request_id


def run(core: EngineCore, *requests: GenerateRequest) -> Calls:
    calls = Calls(core, requests)
    calls.finish()
    return calls
