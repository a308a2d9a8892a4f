"""One session of a worker: from its ``Welcome`` to the end of the connection.

====================  ==============================  ============================================================
task                  waits for                       is unblocked by
====================  ==============================  ============================================================
receive               a message of the coordinator    a message; the end of the lease
send                  something to send               ``wake``
... the connection    the coordinator, to read        the end of the lease
heartbeats            the next third of the lease     time
... the engine        the engine's loop               its own deadline
lease                 the end of the lease            an answered heartbeat puts it off
====================  ==============================  ============================================================

Invariants: messages are sent once and in order, or the connection ends; the engine is described, and a version
announced, before a token of it is sent; a coordinator that does not answer for a lease is taken for gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from rollover.clock import Clock
from rollover.engine.background import cancel
from rollover.errors import EngineError
from rollover.swarm.wire import messages
from rollover.swarm.worker.calls import WorkerCalls
from rollover.swarm.worker.connection import CoordinatorConnection, Disconnected
from rollover.swarm.worker.held import HeldCalls
from rollover.swarm.worker.host import EngineHost
from rollover.swarm.worker.waiting import Changes

_LAST_WORDS_S = 2.0
"""Seconds within which what came before the end of a connection is read."""


class LeaseWatch:
    """A lease of ``ttl_s``, begun by a ``Hello`` that was sent at ``sent_s`` and answered.

    It counts from the moment at which the answered heartbeat was *sent*. The coordinator counts from the moment at
    which it arrived, so the worker's lease never ends after the coordinator's, and no clocks are compared.

    Example: with ``ttl_s=15`` and heartbeats sent at 5 and 10, of which the first was answered, it ends at 20.
    """

    def __init__(self, ttl_s: float, sent_s: float) -> None:
        self._ttl_s = ttl_s
        self._answered_s = sent_s
        self._unanswered: dict[int, float] = {}
        """Time at which each heartbeat was sent that is not answered yet, by number."""

    @property
    def interval_s(self) -> float:
        return self._ttl_s / 3

    @property
    def ends_s(self) -> float:
        return self._answered_s + self._ttl_s

    def sent(self, number: int, now_s: float) -> None:
        self._unanswered[number] = now_s

    def answered(self, number: int) -> bool:
        """Record an answer. Return whether a heartbeat waited for it."""
        if (sent_s := self._unanswered.pop(number, None)) is None:
            return False
        self._answered_s = sent_s
        return True


class WorkerSession:
    """Carries messages between a connection and the worker's parts.

    Args:
        spawn: starts a task that may outlive the session.
        probe: returns when the engine has shown that it lives.
        aim: called with every head.
    """

    def __init__(
        self,
        connection: CoordinatorConnection,
        lease: LeaseWatch,
        *,
        held: HeldCalls,
        calls: WorkerCalls,
        host: EngineHost,
        clock: Clock,
        spawn: Callable[..., asyncio.Task[Any]],
        probe: Callable[[], Awaitable[None]],
        aim: Callable[[messages.Head], None],
    ) -> None:
        self._connection, self._lease, self._clock = connection, lease, clock
        self._held, self._calls, self._host = held, calls, host
        self._spawn, self._probe, self._aim = spawn, probe, aim
        self._queue: deque[messages.FromWorker] = deque()
        """Messages that go before all tokens; few, since each tells of an event."""
        self._wake = asyncio.Event()
        self._drained = Changes()
        self._is_sending = False
        self._ready: messages.Ready | None = None
        self._num_heartbeats = 0
        self._decoded_before, self._call_s_before = calls.num_decoded, calls.call_s
        self._beaten_s = clock.now_s()
        self.has_been_answered = False
        """A heartbeat was answered: the worker is a member indeed."""
        self.has_handed_over = False
        """The worker leaves, and all that the coordinator takes of what it had decoded is sent."""

    def post(self, message: messages.FromWorker) -> None:
        """Send a message before all tokens."""
        self._queue.append(message)
        self.wake()

    def wake(self) -> None:
        """Look for something to send."""
        self._wake.set()

    def post_ready(self) -> None:
        """Tell what the engine can do, when that is not known yet, or has changed."""
        ready = self._host.ready()
        if ready is not None and ready != self._ready:
            self._ready = ready
            self.post(ready)

    async def run(self, leaving: Coroutine[Any, Any, str], leave_timeout_s: float) -> None:
        """Serve until the connection ends, or until ``leaving`` returns why the worker leaves."""
        parts = (self._receive(), self._send(), self._beat(), self._watch(), self._leave(leaving, leave_timeout_s))
        receiving, sending, *_ = tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending in done:  # the connection has ended: perhaps its last message says why, and was not read yet
                read, _ = await asyncio.wait((receiving,), timeout=_LAST_WORDS_S)
                done |= read
        finally:
            await cancel(tasks)
        for task in tasks:
            if task in done:
                task.result()

    # -- the parts ----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._connection.receive()
            try:
                self._handle(message)
            except messages.ProtocolError as e:
                raise Disconnected(f"the coordinator violates the protocol: {e}") from e

    def _handle(self, message: messages.FromCoordinator) -> None:
        match message:
            case messages.Assign():
                self._calls.assign(message)
            case messages.Adopt():
                if (failed := self._calls.adopt(message)) is not None:
                    self.post(failed)
            case messages.Abort():
                self._spawn(self._calls.abort(message.call_ids))
            case messages.Ack():
                self._calls.acked(message.call_id, message.offset)
                if message.is_over:
                    self._calls.release((message.call_id,))
            case messages.Release():
                self._calls.release(message.call_ids)
            case messages.Head():
                self._aim(message)
            case messages.Beat():
                if self._lease.answered(message.number):
                    self.has_been_answered = True
                    self._calls.beaten(self._clock.now_s())
                self._aim(message.head)
            case _:
                raise messages.ProtocolError(f"it sent a {type(message).__name__} in the middle of a session")

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._is_sending = True
            while (message := self._next()) is not None:
                if isinstance(message, messages.Heartbeat):
                    self._lease.sent(message.number, self._clock.now_s())
                await self._connection.send(message)
            self._is_sending = False
            self._drained.notify()

    def _next(self) -> messages.FromWorker | None:
        if self._queue:
            return self._queue.popleft()
        if self._ready is None or self._host.holds_tokens_back:
            return None
        return self._held.next_message()

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._lease.interval_s)
            await self._probe()
            self.post_ready()
            self.post(self._heartbeat())

    def _heartbeat(self) -> messages.Heartbeat:
        now_s, decoded, call_s = self._clock.now_s(), self._calls.num_decoded, self._calls.call_s
        elapsed_s = max(1e-9, now_s - self._beaten_s)
        speed, mean_running = (decoded - self._decoded_before) / elapsed_s, (call_s - self._call_s_before) / elapsed_s
        self._beaten_s, self._decoded_before, self._call_s_before = now_s, decoded, call_s
        self._num_heartbeats += 1
        return messages.Heartbeat(
            number=self._num_heartbeats,
            num_running=self._calls.num_running,
            tokens_per_s=speed,
            mean_running=mean_running,
            num_held=self._held.num_tokens,
            is_full=self._held.is_full,
        )

    async def _watch(self) -> None:
        while (left_s := self._lease.ends_s - self._clock.now_s()) > 0:
            await self._clock.sleep(left_s)
        raise Disconnected("the coordinator has not answered for the length of a lease")

    async def _leave(self, leaving: Coroutine[Any, Any, str], timeout_s: float) -> None:
        """Stop all calls, hand over what they have, and say goodbye, by which they end."""
        reason = await leaving
        with suppress(EngineError):  # what it does not hand over continues elsewhere from what it has sent
            await self._calls.stop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_sent()
                self.has_handed_over = True
                self.post(messages.Leaving(reason=reason))
                await self._until_sent()
        except TimeoutError:
            raise Disconnected(f"the coordinator did not take what was handed over within {timeout_s:g} s") from None

    async def _until_sent(self) -> None:
        await self._drained.until(lambda: not (self._queue or self._is_sending or self._wake.is_set()))
