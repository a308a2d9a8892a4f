"""A slow machine on a fast one: an engine whose calls wait by the clock for their tokens, or for a file to go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.base import Chunk, GenerateRequest
from rollover.run import worker
from rollover.swarm.worker.config import WorkerConfig
from rollover.types import FinishReason


class ThrottledEngine:
    """An engine that hands out ``tokens_per_s`` at most, over all its calls; while the file ``halt`` is there nothing but
    the single tokens of a check. A call that is stopped waits no more, and hands over what the engine has decoded, where
    there is no such file."""

    def __init__(self, engine: Any, tokens_per_s: float, halt: Path) -> None:
        self._engine, self._halt = engine, halt
        self._tokens_per_s = tokens_per_s
        self._free_s = 0.0
        """Time at which all that was promised so far has been handed out."""
        self._stopped: dict[str, asyncio.Event] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __repr__(self) -> str:
        return repr(self._engine)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        stopped = self._stopped[request.request_id] = asyncio.Event()
        is_check = request.params.max_new_tokens == 1
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if not stopped.is_set():
                        now_s = asyncio.get_running_loop().time()
                        self._free_s = max(now_s, self._free_s) + len(chunk.token_ids) / self._tokens_per_s
                        with suppress(TimeoutError):
                            await asyncio.wait_for(stopped.wait(), self._free_s - now_s)
                    while not is_check and not stopped.is_set() and self._halt.exists():
                        with suppress(TimeoutError):
                            await asyncio.wait_for(stopped.wait(), 0.05)
                    if not is_check and stopped.is_set() and self._halt.exists():
                        yield replace(chunk, token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)
                        return
                    yield chunk
        finally:
            del self._stopped[request.request_id]

    async def abort(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if (stopped := self._stopped.get(request_id)) is not None:
                stopped.set()
        await self._engine.abort(request_ids)


def throttle_workers(tokens_per_s: float, halt: Path) -> None:
    """From now on the engines of workers in this process decode so fast at most, and nothing while ``halt`` is there."""
    opener = worker.opener

    def throttled(config: WorkerConfig, *, name: str, root: Path) -> Any:
        open_on = opener(config, name=name, root=root)

        async def opened(folder: Path) -> Any:
            engine = await open_on(folder)
            return replace(engine, engine=ThrottledEngine(engine.engine, tokens_per_s, halt))

        return opened

    worker.opener = throttled  # for good: the process ends with its worker
