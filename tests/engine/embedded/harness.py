"""Driving the synchronous core: all laws of the embedded engine that need no event loop are tested through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore, Output
from tests.engine.contract import tokens

CONFIG = EmbeddedConfig(device="cpu", kv_cache_bytes=2**20, block_size_tokens=4, stream_interval_tokens=1)


def core_of(folder: Path, **settings: Any) -> EngineCore:
    return EngineCore(folder, replace(CONFIG, **settings))


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
        self.core.scheduler.check()

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


def run(core: EngineCore, *requests: GenerateRequest) -> Calls:
    calls = Calls(core, requests)
    calls.finish()
    return calls
