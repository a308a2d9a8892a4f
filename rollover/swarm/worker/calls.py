"""The worker's generation calls: each is decoded by the engine and held as a stream until it is acknowledged.

====================  ===================================  ====================================================
task                  waits for                            is unblocked by
====================  ===================================  ====================================================
a call                an engine that serves its version    ``serve``; its deadline
... to continue       room for tokens; the end of a stop   an acknowledgement; the end of ``stopped``
... its next chunk    the engine                           a chunk; an abort
``abort``             the engine                           its deadline for stopped calls
``stopped``           the engine, and all calls            ``stop_timeout_s``
====================  ===================================  ====================================================

Invariants: the coordinator sees one call, however often the engine was stopped in between; a call samples from
no version older than it allows; a call that ends says so exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from rollover.clock import Clock
from rollover.engine.background import within
from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.engine.ends import check_end, reached_end
from rollover.errors import CallDisplaced, EngineError, RolloverError
from rollover.privacy import redacted_text
from rollover.swarm.wire.messages import Adopt, Assign, CallFailed, unpack_ids
from rollover.swarm.worker.held import HeldCalls
from rollover.swarm.worker.held_stream import HeldStream, StreamEnding
from rollover.swarm.worker.waiting import Changes
from rollover.types import FinishReason, SamplingParams

_MAX_REASON = 1000
"""Characters of an engine's error that are sent."""
_MIN_FAILURES = 5
"""Failures in a row before an engine is called broken."""


class EngineHealth:
    """Counts failures in a row, over all calls of an engine.

    Args:
        broken_after_s: seconds of failures without a token in between after which an engine is broken.

    Example: five calls that fail within a second are a bad moment; seven within two minutes, and no token, are the end.
    """

    def __init__(self, broken_after_s: float) -> None:
        self._broken_after_s = broken_after_s
        self._failing_since_s: float | None = None
        self._num_failures = 0
        self.broken: str | None = None
        """The reason why the engine is permanently broken, if it is."""

    def decoded(self) -> None:
        self._failing_since_s, self._num_failures = None, 0

    def failed(self, reason: str, now_s: float) -> None:
        self._num_failures += 1
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        failing_s = now_s - self._failing_since_s
        if self._num_failures >= _MIN_FAILURES and failing_s >= self._broken_after_s:
            self.broken = (
                f"the engine has failed {self._num_failures} calls in {failing_s:.0f} s and given no token: {reason}"
            )


class OpenCall:
    """A call that is decoded, or waits to be."""

    def __init__(self, stream: HeldStream) -> None:
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.request_id: str | None = None
        """Id of the engine's current generation call for it."""
        self.begun_s = 0.0
        """Time at which the engine received that call."""
        self.is_aborted = False
        self.is_interrupted = False
        """The engine was asked to stop it, for a while."""

    def request(self) -> GenerateRequest:
        """Return the generation call that continues after the decoded tokens. Raises ``ValueError`` and
        ``ProtocolError`` for an assignment that makes none."""
        assign = self.stream.assign
        params = SamplingParams(
            max_new_tokens=assign.max_new_tokens,
            temperature=assign.temperature,
            top_p=assign.top_p,
            top_k=assign.top_k,
            min_p=assign.min_p,
            returns_kept=assign.returns_kept,
            returns_routes=assign.returns_routes,
            stop_token_ids=assign.stop_token_ids,
            stop_strings=assign.stop_strings,
        )
        return GenerateRequest(
            request_id=assign.call_id,
            sample_key=assign.sample_key,
            prompt_key=assign.prompt_key,
            prompt_ids=unpack_ids(assign.prompt_ids),
            response_ids=self.stream.response_ids,
            params=params,
            seed=assign.seed,
            least_version=assign.least_version,
        )


class WorkerCalls:
    """Decodes the calls that a worker is given.

    Args:
        spawn: starts a task; what it raises is a mistake of ours.
        notify: called when something can be sent.
        version_timeout_s: how long a call waits for the weights that it asks for.
        stop_timeout_s: how long the engine may take to hand over stopped calls.
        broken_after_s: seconds of failing calls without a token after which an engine is broken for good.
    """

    def __init__(
        self,
        held: HeldCalls,
        clock: Clock,
        *,
        spawn: Callable[..., asyncio.Task[Any]],
        notify: Callable[[], None],
        version_timeout_s: float = 900.0,
        stop_timeout_s: float = 120.0,
        broken_after_s: float = 120.0,
    ) -> None:
        self._held, self._clock, self._spawn, self._notify = held, clock, spawn, notify
        self._version_timeout_s, self._stop_timeout_s = version_timeout_s, stop_timeout_s
        self._calls: dict[str, OpenCall] = {}
        self._engine: Engine | None = None
        self._version = -1
        self._changes = Changes()
        self._num_stops = 0
        self._is_making_room = False
        self._numbers = itertools.count()
        self.health = EngineHealth(broken_after_s)
        self.num_decoded = 0
        """Tokens decoded since the worker began."""
        self._ended_call_s = 0.0

    @property
    def num_running(self) -> int:
        return sum(call.request_id is not None for call in self._calls.values())

    @property
    def call_s(self) -> float:
        """Return the seconds that calls have been with the engine since the worker began, summed over the calls."""
        now_s = self._clock.now_s()
        return self._ended_call_s + sum(now_s - c.begun_s for c in self._calls.values() if c.request_id is not None)

    def __len__(self) -> int:
        return len(self._calls)

    # -- from the coordinator -----------------------------------------------------------------------------------

    def assign(self, assign: Assign) -> None:
        """Start a call. Raises ``ProtocolError`` if it is held already."""
        self._start(self._held.open(assign))

    def _start(self, stream: HeldStream) -> None:
        call = self._calls[stream.call_id] = OpenCall(stream)
        call.task = self._spawn(self._run(call))

    def adopt(self, adopt: Adopt) -> CallFailed | None:
        """Continue an offered call under an id, even when it was stopped; or return why not. Raises
        ``ProtocolError`` if it is not offered."""
        answer = self._held.adopt(adopt)
        if isinstance(answer, CallFailed):
            self._cancel(adopt.held)
            return answer
        if (call := self._calls.pop(adopt.held, None)) is not None:
            self._calls[adopt.call_id] = call
            if call.is_aborted:  # and wanted again before it had ended
                call.is_aborted, call.is_interrupted = False, True
        elif answer.ending is None and answer.call_id not in self._calls:
            self._start(answer)
        self._changes.notify()
        self._notify()
        return None

    async def abort(self, call_ids: Collection[str]) -> None:
        """Stop calls; each ends with ``abort``, unless it had ended before."""
        found = [call for call_id in call_ids if (call := self._calls.get(call_id)) is not None]
        for call in found:
            call.is_aborted = True
        self._changes.notify()
        try:
            await self._ask_to_stop(found)
        except EngineError as e:
            self.health.failed(str(e), self._clock.now_s())

    def release(self, call_ids: Collection[str]) -> None:
        """Stop calls and forget their tokens."""
        self._held.release(call_ids)
        for call_id in call_ids:
            self._cancel(call_id)
        self._changes.notify()

    def acked(self, call_id: str, offset: int) -> None:
        """Let go of journaled tokens. Raises ``ProtocolError``."""
        self._held.acked(call_id, offset)
        self._changes.notify()

    def beaten(self, now_s: float) -> None:
        """Forget, now that a heartbeat was answered, offered calls that were not taken up for long."""
        self.release(self._held.expired(now_s))

    def _cancel(self, call_id: str) -> None:
        if (call := self._calls.pop(call_id, None)) is not None and call.task is not None:
            call.task.cancel()

    # -- from the weights ---------------------------------------------------------------------------------------

    def serve(self, engine: Engine, version: int) -> None:
        """Decode with ``engine``, whose weights are ``version``'s."""
        self._engine, self._version = engine, version
        self._changes.notify()

    def fail_all(self, reason: str) -> None:
        """End all calls as failed; their tokens are held as before."""
        for call_id, call in list(self._calls.items()):
            self._cancel(call_id)
            self._end(call, StreamEnding(failure=reason))

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Stop all calls, and continue them afterwards after the tokens that they have.

        Raises ``EngineTimeout`` when the engine does not hand them over.
        """
        try:
            await self.stop()
            yield
        finally:
            self._num_stops -= 1
            self._changes.notify()

    async def stop(self) -> None:
        """Stop all calls, which do not end by that, for good. Raises ``EngineTimeout``."""
        self._num_stops += 1
        calls = [call for call in self._calls.values() if call.request_id is not None]
        for call in calls:
            call.is_interrupted = True
        await self._ask_to_stop(calls)
        async with self._deadline(len(calls)):
            await self._changes.until(lambda: not any(c.is_interrupted and c.request_id is not None for c in calls))

    async def _ask_to_stop(self, calls: Collection[OpenCall]) -> None:
        if self._engine is not None and (ids := [call.request_id for call in calls if call.request_id is not None]):
            async with self._deadline(len(ids)):
                await self._engine.abort(ids)

    def _deadline(self, num_calls: int) -> AbstractAsyncContextManager[None]:
        limit_s = self._stop_timeout_s
        return within(limit_s, f"{self._engine!r} did not stop {num_calls} calls within {limit_s:g} s")

    # -- one call -----------------------------------------------------------------------------------------------

    async def _run(self, call: OpenCall) -> None:
        try:
            ending = await self._decode(call)
        except RolloverError as e:
            ending = StreamEnding(failure=redacted_text(str(e))[:_MAX_REASON])
            self.health.failed(str(e), self._clock.now_s())
        if self._calls.get(call.stream.call_id) is call:
            del self._calls[call.stream.call_id]
            self._end(call, ending)
        self._changes.notify()

    def _end(self, call: OpenCall, ending: StreamEnding) -> None:
        self._held.ended(call.stream, ending)
        self._notify()

    async def _decode(self, call: OpenCall) -> StreamEnding:
        """Decode a call to its end, with as many generation calls as that takes."""
        try:
            request = call.request()
        except (ValueError, EngineError) as e:
            return StreamEnding(failure=f"the call cannot be read: {e}")
        ids = list(request.response_ids)
        while True:
            if (failure := await self._until_it_may_run(call)) is not None:
                return StreamEnding(failure=failure)
            reason = FinishReason.ABORT if call.is_aborted else None
            if len(ids) > len(request.response_ids):
                reason = reason or reached_end(request.params, ids)
            if reason is None:
                reason = await self._generate(call, request, ids)
            if reason is not FinishReason.ABORT or call.is_aborted:
                return StreamEnding(reason=reason, version=max(0, self._version))
            if not call.is_interrupted:
                raise EngineError(f"the engine stopped a call after {len(ids)} tokens without being asked to")

    async def _generate(self, call: OpenCall, request: GenerateRequest, ids: list[int]) -> FinishReason:
        """Continue to decode after ``ids``, which grows, until the engine ends the generation call."""
        assert self._engine is not None
        request_id = f"{call.stream.call_id}~{next(self._numbers)}."
        request = replace(request, request_id=request_id, response_ids=tuple(ids))
        call.request_id, call.is_interrupted, call.begun_s = request_id, False, self._clock.now_s()
        try:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    self._take(call, chunk)
                    ids += chunk.token_ids
                    check_end(request_id, request, chunk.finish_reason, len(ids), ids[-1] if ids else None)
                    if chunk.finish_reason is not None:
                        return chunk.finish_reason
            raise EngineError(f"the engine ended a call after {len(ids)} tokens without saying why")
        except CallDisplaced:  # stopped for the sake of another
            call.is_interrupted = True
            return FinishReason.ABORT
        finally:
            self._ended_call_s += self._clock.now_s() - call.begun_s
            call.request_id = None
            self._changes.notify()

    def _take(self, call: OpenCall, chunk: Chunk) -> None:
        if self._calls.get(call.stream.call_id) is not call:
            return
        self._held.decoded(call.stream, chunk)
        if chunk.token_ids:
            self.num_decoded += len(chunk.token_ids)
            self.health.decoded()
            self._notify()
        if self._held.is_full and not self._is_making_room:
            self._is_making_room = True
            self._spawn(self._stand_still())

    async def _stand_still(self) -> None:
        """Stop all calls until there is room for their tokens again."""
        try:
            async with self.stopped():
                await self._changes.until(lambda: not self._held.is_full)
        except EngineError as e:
            self.health.failed(str(e), self._clock.now_s())
        finally:
            self._is_making_room = False

    async def _until_it_may_run(self, call: OpenCall) -> str | None:
        """Wait for the weights that a call asks for, and for room. Return why it cannot run, when it cannot."""
        least = call.stream.assign.least_version
        try:
            async with asyncio.timeout(self._version_timeout_s):
                await self._changes.until(
                    lambda: call.is_aborted or (self._version >= least and self._engine is not None)
                )
        except TimeoutError:
            serves = self._version if self._engine is not None else "none"
            return f"waited {self._version_timeout_s:g} s for weights version {least}, but this worker serves {serves}"
        await self._changes.until(
            lambda: call.is_aborted or (self._num_stops == 0 and not self._held.is_full and self._engine is not None)
        )
        return None
