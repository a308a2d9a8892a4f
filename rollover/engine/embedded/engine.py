"""The embedded engine behind the two protocols: streams and deadlines around a core that a runner drives.

Each open call has a stream that the runner's deliveries fill and its ``generate`` empties. The code after a
``yield`` runs when the consumer asks for the next chunk, which is how a chunk comes to count as processed
(``core_loop.LockstepLoop``); closing the iterator counts for all chunks that are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore, Output
from rollover.engine.embedded.core_loop import Command, CoreLoop, LockstepLoop, ThreadLoop, failure
from rollover.errors import EngineError, EngineTimeout, ResourceError, RolloverError
from rollover.weights.base import WeightPath, WeightSource


class _Stream:
    """The chunks delivered for one call, and the number of them that its consumer is not done with."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Chunk | RolloverError] = asyncio.Queue()
        self.num_unprocessed = 0
        self.finished = False


class EmbeddedEngine:
    """Implements ``Engine`` and ``WeightTarget``. Used from one event loop at a time; the core's thread lives until
    ``close``. ``load`` does not insist on a pause: weights change between two iterations anyway.

    Example: ``EmbeddedEngine.from_folder(Path("qwen3-0.6b"), EmbeddedConfig())`` serves the model in that folder as
    version 0.

    Args:
        lockstep: decode on the event loop, in step with the consumers (``core_loop.LockstepLoop``): slower, and the
            same run twice is the same run. Prompts then share no cache with other prompts, which a resumed run may not
            have asked for.
    """

    takes: WeightPath = "memory"

    def __init__(self, core: EngineCore, config: EmbeddedConfig, *, lockstep: bool = False) -> None:
        self._core = core
        self._config = config
        self._timeout_s = config.command_timeout_s
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        make: Callable[..., CoreLoop] = LockstepLoop if lockstep else ThreadLoop
        self._loop = make(core, self._deliver, self._fail)

    @classmethod
    def from_folder(cls, folder: Path, config: EmbeddedConfig, *, lockstep: bool = False) -> EmbeddedEngine:
        """Serve the model in a Hugging Face folder. Raises ``ModelError`` and ``ConfigError`` as
        ``EngineCore`` does, and ``ResourceError`` when it does not fit into memory."""
        with _fitting(config):
            core = EngineCore(folder, config, isolate_prompts=lockstep)
        return cls(core, config, lockstep=lockstep)

    def __repr__(self) -> str:
        return "the embedded engine"

    @property
    def capabilities(self) -> Capabilities:
        return self._core.capabilities

    @property
    def device(self) -> torch.device:
        return self._core.device

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` for a request that cannot run and when an
        iteration fails, ``ResourceError`` when it fails for want of memory."""
        if request.request_id in self._streams:
            raise EngineError(f"request id {request.request_id!r} is in use; ids are unique per generation call")
        stream = self._streams[request.request_id] = _Stream()
        try:
            await self._do("generate", lambda core: core.add(request))
            while not (stream.finished and stream.queue.empty()):  # a failure may have come before the first look
                item = await stream.queue.get()
                if isinstance(item, RolloverError):
                    raise item
                yield item
                stream.num_unprocessed -= 1
                self._loop.processed(1)
                stream.finished = item.finish_reason is not None
        finally:
            del self._streams[request.request_id]
            if not stream.finished and not self._closed:
                self._loop.submit(lambda core: core.abort([request.request_id]))
            self._loop.processed(stream.num_unprocessed)

    async def abort(self, request_ids: Collection[str]) -> None:
        if request_ids and not self._closed:
            await self._do("abort", lambda core: core.abort(request_ids))

    async def pause(self) -> None:
        await self._do("pause", lambda core: setattr(self._loop, "paused", True))

    async def resume(self) -> None:
        await self._do("resume", lambda core: setattr(self._loop, "paused", False))

    async def load(self, version: int, source: WeightSource, *, keeps_kv: bool | None = None) -> None:
        """See ``WeightTarget.load``; ``keeps_kv`` as in ``EngineCore.load``. Raises ``ResourceError`` when it wakes and
        cannot get its memory again."""
        with _fitting(self._config):
            await self._do("load", lambda core: core.load(version, source, keeps_kv=keeps_kv))

    async def begin_fill(self) -> None:
        """See ``EngineCore.begin_fill``. Raises ``ResourceError`` as ``load`` does."""
        with _fitting(self._config):
            await self._do("take weights", lambda core: core.begin_fill())

    async def fill(self, tensors: Mapping[str, Tensor]) -> None:
        await self._do("take weights", lambda core: core.fill(tensors))

    async def end_fill(self, version: int, *, keeps_kv: bool, is_whole: bool = True) -> None:
        await self._do("take weights", lambda core: core.end_fill(version, keeps_kv=keeps_kv, is_whole=is_whole))

    async def sleep(self) -> None:
        await self._do("release its memory", lambda core: core.sleep())

    def stats(self) -> EngineStats:
        return self._loop.stats()

    async def close(self) -> None:
        """See ``Engine.close``. A thread that does not get to it in time ends when it does."""
        if not self._closed:
            await self._do("close", self._end, is_last=True)

    def _end(self, core: EngineCore) -> list[Output]:
        self._loop.stop()
        return core.abort_all()

    async def _do(self, what: str, command: Command, *, is_last: bool = False) -> None:
        if self._closed:
            raise EngineError(f"the embedded engine cannot {what}: it has been closed")
        future = self._loop.submit(command)
        self._closed = is_last
        try:
            async with asyncio.timeout(self._timeout_s):
                await future
        except TimeoutError:
            raise EngineTimeout(
                f"the embedded engine did not get to {what!r} within command_timeout_s = {self._timeout_s}"
            ) from None

    def _deliver(self, outputs: list[Output]) -> None:
        for request_id, chunk in outputs:
            if stream := self._streams.get(request_id):
                stream.num_unprocessed += 1
                stream.queue.put_nowait(chunk)
            else:  # its consumer has closed it
                self._loop.processed(1)

    def _fail(self, request_ids: list[str], error: RolloverError) -> None:
        for request_id in request_ids:
            if stream := self._streams.get(request_id):
                stream.finished = True
                stream.queue.put_nowait(error)


@contextmanager
def _fitting(config: EmbeddedConfig) -> Iterator[None]:
    """Name the setting that helps where weights and cache do not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RolloverError) or not isinstance(failure(error), ResourceError):
            raise
        raise ResourceError(
            f"weights and cache do not fit into memory: lower engine.kv_cache_bytes (now {config.kv_cache_bytes}),"
            " engine.prefill_chunk_tokens or engine.max_running, or choose a smaller model"
        ) from error
