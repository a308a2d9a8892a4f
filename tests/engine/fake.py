"""A scripted engine for tests: one token per running call and tick, no model, no wall clock.

Invariants: the token and the log-prob at response position ``p`` are ``token_at(seed, p, version)``
and ``logprob_at(seed, p, version)``, whatever was batched, parked or aborted in between, so a test can
compute every token it should see. A sample ends with ``stop`` once its *whole* response is
``length(request)`` tokens long, or earlier with ``length`` at ``max_new_tokens``; its last token on ``stop``
is the first of ``params.stop_token_ids`` when there is one.

Driven by hand, ``await engine.tick()`` decodes one token for each running call (the first ``max_running`` in
order of arrival) and then lets the event loop turn a few times, so that consumers have acted when it returns.
With ``auto=True`` it ticks by itself while a call is open: every ``tick_s`` seconds of ``clock``, or as
fast as the loop turns when there is none. Weights are any source; one without a tensor does not fit.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from rollover.clock import Clock
from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.kind import OpenedEngine
from rollover.errors import EngineError
from rollover.types import FinishReason
from rollover.weights.base import WeightPath, WeightSource

FIRST_TOKEN = 1000
"""All scripted tokens lie in ``[FIRST_TOKEN, FIRST_TOKEN + 4096)``: no clash with a test's stop ids."""


def token_at(seed: int, position: int, version: int) -> int:
    return FIRST_TOKEN + zlib.crc32(f"t{seed}/{position}/{version}".encode()) % 4096


def logprob_at(seed: int, position: int, version: int) -> float:
    return -(zlib.crc32(f"p{seed}/{position}/{version}".encode()) % 1024) / 256


class _Call:
    """An open ``generate``: the response so far, what is not yet streamed, and the stream."""

    def __init__(self, request: GenerateRequest, version: int, num_prefilled_tokens: int) -> None:
        self.request, self.version, self.kv_version = request, version, version
        self.num_prefilled_tokens = num_prefilled_tokens
        self.length = len(request.response_ids)
        self.pending: list[tuple[int, float]] = []
        self.stream: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()

    def flush(self, reason: FinishReason | None = None) -> None:
        tokens, logprobs = zip(*self.pending, strict=True) if self.pending else ((), ())
        self.stream.put_nowait(
            Chunk(
                token_ids=tokens,
                logprobs=logprobs,
                policy_version=self.version,
                kv_version=self.kv_version,
                finish_reason=reason,
                num_prefilled_tokens=self.num_prefilled_tokens,
            )
        )
        self.pending, self.num_prefilled_tokens = [], 0


class FakeEngine:
    """Implements ``Engine`` and ``WeightTarget``. ``num_ticks`` counts decode iterations, ``requests`` keeps
    every request in the order it came, ``events`` what was done to the weights."""

    def __init__(
        self,
        length: Callable[[GenerateRequest], int],
        *,
        max_running: int = 64,
        max_context_tokens: int = 4096,
        stream_interval_tokens: int = 1,
        auto: bool = False,
        clock: Clock | None = None,
        tick_s: float = 1.0,
        version: int = 0,
    ) -> None:
        self.length, self.auto, self.clock, self.tick_s, self.version = length, auto, clock, tick_s, version
        self.stream_interval_tokens = stream_interval_tokens
        self.capabilities = Capabilities(
            max_running=max_running,
            max_context_tokens=max_context_tokens,
            keeps_kv_on_abort=True,
            in_flight_update=True,
            seeded=True,
        )
        self.requests: list[GenerateRequest] = []
        self.events: list[tuple[str, int]] = []
        self.num_ticks = self.decoded_tokens = self.prefilled_tokens = self.reprefilled_tokens = 0
        self._seen: set[str] = set()
        self._calls: dict[str, _Call] = {}
        self._parked: dict[str, int] = {}  # sample_key -> tokens in its cache
        self._paused = self._closed = False
        self._ticker: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        call = self._open(request)
        try:
            while True:
                item = await call.stream.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._end(call, FinishReason.ABORT)

    async def abort(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if call := self._calls.get(request_id):
                self._end(call, FinishReason.ABORT)

    async def close(self) -> None:
        await self.abort(list(self._calls))
        self._closed = True

    def fail(self, error: EngineError) -> None:
        """All open calls raise ``error``; the engine lives on."""
        for call in self._calls.values():
            call.stream.put_nowait(error)
        self._calls.clear()

    takes: WeightPath = "memory"

    async def sleep(self) -> None:
        assert not self._calls, "a call is open"
        self._parked.clear()
        self.events.append(("sleep", self.version))

    async def pause(self) -> None:
        self._paused = True
        self.events.append(("pause", self.version))

    async def resume(self) -> None:
        self._paused = False
        self.events.append(("resume", self.version))

    async def load(self, version: int, source: WeightSource) -> None:
        if version < self.version:
            raise EngineError(f"weights went back from version {self.version} to {version}")
        source.manifest.require_full(version, "the scripted engine")
        if not source.manifest.tensors:
            raise EngineError("weights do not fit: no tensor given")
        self.version = version
        self._parked.clear()
        for call in self._calls.values():  # a chunk has one version; the cache stays old
            if call.pending:
                call.flush()
            call.version = version
        self.events.append(("load", version))

    def stats(self) -> EngineStats:
        num_running = min(len(self._calls), self.capabilities.max_running)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._calls) - num_running,
            policy_version=self.version,
            decoded_tokens=self.decoded_tokens,
            prefilled_tokens=self.prefilled_tokens,
            reprefilled_tokens=self.reprefilled_tokens,
            decode_iterations=self.num_ticks,
        )

    async def tick(self, n: int = 1) -> None:
        """``n`` decode iterations; nothing is decoded while paused."""
        for _ in range(n):
            if not self._paused:
                self.num_ticks += 1
                for call in list(self._calls.values())[: self.capabilities.max_running]:
                    self._decode(call)
            for _ in range(4):
                await asyncio.sleep(0)

    def _decode(self, call: _Call) -> None:
        request, position = call.request, call.length
        token = token_at(request.seed, position, call.version)
        call.length += 1
        stopped = call.length >= self.length(request)
        if stopped and request.params.stop_token_ids:
            token = request.params.stop_token_ids[0]
        call.pending.append((token, logprob_at(request.seed, position, call.version)))
        self.decoded_tokens += 1
        if stopped or token in request.params.stop_token_ids:
            self._end(call, FinishReason.STOP)
        elif call.length == request.params.max_new_tokens:
            self._end(call, FinishReason.LENGTH)
        elif len(call.pending) >= self.stream_interval_tokens:
            call.flush()

    def _open(self, request: GenerateRequest) -> _Call:
        size = len(request.prompt_ids) + request.params.max_new_tokens
        if self._closed:
            raise EngineError("the engine is closed")
        if request.request_id in self._seen:
            raise EngineError(f"request id {request.request_id!r} was used before")
        if len(request.response_ids) >= request.params.max_new_tokens:
            raise EngineError(f"request {request.request_id!r} has no budget left")
        if size > self.capabilities.max_context_tokens:
            raise EngineError(f"prompt and response ({size} tokens) exceed the context")
        num_response, cached = len(request.response_ids), self._parked.pop(request.sample_key, None)
        hit = cached == len(request.prompt_ids) + num_response
        call = _Call(request, self.version, 0 if hit else num_response)
        self.prefilled_tokens += 0 if hit else len(request.prompt_ids) + num_response
        self.reprefilled_tokens += call.num_prefilled_tokens
        self._seen.add(request.request_id)
        self.requests.append(request)
        self._calls[request.request_id] = call
        if self.auto and (self._ticker is None or self._ticker.done()):
            self._ticker = asyncio.get_running_loop().create_task(self._run())
        return call

    async def _run(self) -> None:
        while self._calls:
            await (self.clock.sleep(self.tick_s) if self.clock else asyncio.sleep(0))
            await self.tick()

    def _end(self, call: _Call, reason: FinishReason) -> None:
        if self._calls.pop(call.request.request_id, None) is None:
            return
        if reason is FinishReason.ABORT:
            self._parked[call.request.sample_key] = len(call.request.prompt_ids) + call.length
        call.flush(reason)


def opened(engine: Any) -> OpenedEngine:
    """Return the record of a scripted engine that takes weights, in the roles whose methods it has."""
    return OpenedEngine(engine=engine, weights=engine, until_up=getattr(engine, "until_up", None))
