"""A worker of a swarm: an engine behind a connection that it opens itself, and opens again whenever it ends.

::

    coordinator ◀──WebSocket── session ──Assign, Abort, Ack──▶ calls ──▶ engine
                                  ▲                              │
                                  └───────── held tokens ◀───────┘
    publisher ──blobs──▶ fetcher ──▶ follower ──new weights──▶ host ──▶ engine

Invariants: nothing is lost but by being killed: what was decoded is held until it is acknowledged, through any
outage, and offered when the worker is back; an error that time does not fix ends it with one message.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

from rollover.clock import Clock
from rollover.engine.background import cancel
from rollover.errors import RolloverError
from rollover.swarm.publication.fetch import WeightFetcher
from rollover.swarm.publication.fetched import FetchedWeights
from rollover.swarm.publication.manifest import PublicationRefused
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import PROTOCOL, Head, Hello, NotServing, Serving, Welcome
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.calls import WorkerCalls
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.connection import (
    Disconnected,
    OlderEpoch,
    Refused,
    RunEnded,
    begins_epoch,
    greet,
    open_connection,
)
from rollover.swarm.worker.held import HeldCalls, ServedHeads
from rollover.swarm.worker.host import EngineBroken, EngineHost, OpenEngine
from rollover.swarm.worker.session import LeaseWatch, WorkerSession
from rollover.swarm.worker.updates import HeadFollower
from rollover.swarm.worker.waiting import BackOff

OpenFetcher = Callable[[str], WeightFetcher]
"""Makes what fetches the publications of the run of that id."""
_STATUS_EVERY_S = 60.0
_MAX_OLDER = 10
"""Answers of an older epoch of the run, one after the other, at which the worker leaves."""


class SwarmWorker:
    """Serves one coordinator until it is stopped or refused.

    Args:
        open_on: opens the engine on a model folder.
        open_fetcher: makes the fetcher for an epoch of a run.
        say: shows a line to the user.
        work: a folder of the worker's own.
        software: its name and version, for the coordinator.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        token: WorkerToken,
        config: WorkerConfig,
        *,
        open_on: OpenEngine,
        open_fetcher: OpenFetcher,
        clock: Clock,
        random: Random,
        say: Callable[[str], None],
        work: Path,
        software: str = "rollover",
        tls: ssl.SSLContext | None = None,
        back_off: BackOff | None = None,
        fetch_back_off: BackOff | None = None,
    ) -> None:
        self._address, self._token, self._config, self._tls = address, token, config, tls
        self._open_fetcher, self._clock, self._random, self._say = open_fetcher, clock, random, say
        self._back_off = back_off or BackOff()
        self._software = software
        self._held = HeldCalls(config.max_held_tokens)
        self._tasks: asyncio.TaskGroup | None = None
        self._calls = WorkerCalls(
            self._held, clock, spawn=self._spawn, notify=self._wake, version_timeout_s=config.version_timeout_s
        )
        self._host = EngineHost(
            config, self._calls, clock, open_on=open_on, name=token.name, work=work, announce=self._announce
        )
        self._follower = HeadFollower(
            self._host,
            clock,
            random,
            report=self._report_failure,
            fetch_timeout_s=config.fetch_timeout_s,
            back_off=fetch_back_off,
        )
        self._session: WorkerSession | None = None
        self._welcome: Welcome | None = None
        """The last that was accepted."""
        self._served = ServedHeads(self._held)
        self._stopping = asyncio.Event()
        self._reason = ""
        self._error: EngineBroken | PublicationRefused | None = None
        self._was_member = False
        """The last connection had a heartbeat answered."""
        self._has_handed_over = False
        self._fetcher: WeightFetcher | None = None
        self._last_said = ""

    def stop(self, reason: str) -> None:
        """Ask the worker to leave: calls are stopped and handed over. Called on its event loop."""
        self._reason = self._reason or reason
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped, or until the run has ended.

        Raises:
            Refused: the coordinator refuses this worker.
            EngineBroken: the engine cannot be used any more.
            PublicationRefused: the weights that are offered are not for this worker.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                others = [self._spawn(self._or_fail(self._follower.run)), self._spawn(self._tell())]
                await self._stay_connected()
                for task in others:
                    task.cancel()
                self._calls.release([stream.call_id for stream in self._held])
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1 and isinstance(error := group.exceptions[0], RolloverError):
                raise error from None
            raise
        finally:
            await self._host.close()
            if self._fetcher is not None:
                await self._fetcher.close()
        if self._error is not None:
            raise self._error

    # -- connections --------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        num_failures = num_older = 0
        since_s = self._clock.now_s()
        while not self._stopping.is_set():
            await self._unless_stopped(self._probe())
            try:
                await self._unless_stopped(self._connect())
                num_failures = num_older = 0
            except RunEnded as e:
                self._say(f"left the swarm: {e}")
                return
            except Disconnected as e:
                now_s = self._clock.now_s()
                num_failures, since_s = (1, now_s) if self._was_member else (num_failures + 1, since_s)
                num_older = num_older + 1 if isinstance(e, OlderEpoch) else 0
                if num_older == _MAX_OLDER:
                    remedy = "if the run was set back, start this worker with another folder (--cache)"
                    raise Refused(f"{e}; {remedy}") from e
                if self._stopping.is_set():
                    break
                if now_s - since_s >= self._config.away_timeout_s:
                    raise Refused(
                        f"{e}; gave up after {now_s - since_s:,.0f} s without a connection (--away_timeout_s): if the"
                        " run goes on, start this worker again with the same command"
                    ) from e
                self._say_once(f"{e}; trying again")
                await self._unless_stopped(self._clock.sleep(self._back_off.wait_s(num_failures, self._random)))
        lost = self._held.num_unsent if self._has_handed_over else self._held.num_tokens
        self._say(f"left the swarm{f'; {lost:,} tokens could not be handed over' if lost else ''}")

    async def _unless_stopped(self, work: Any) -> None:
        """Do ``work``; end it if the worker is stopped before it is a member."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._session is None:
                task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.result()
        finally:
            await cancel((task, stopped))

    async def _connect(self) -> None:
        """Open a connection and serve until it ends."""
        self._was_member = False
        timeout_s = self._config.connect_timeout_s
        async with open_connection(
            self._address, self._token, self._tls, timeout_s=timeout_s, has_been_member=self._welcome is not None
        ) as connection:
            hello_s, hello = self._clock.now_s(), self._hello()
            welcome = await greet(connection, hello, self._address, timeout_s)
            self._accept(welcome, hello)
            session = self._session = WorkerSession(
                connection,
                LeaseWatch(welcome.ttl_s, hello_s),
                held=self._held,
                calls=self._calls,
                host=self._host,
                clock=self._clock,
                spawn=self._spawn,
                probe=self._probe,
                aim=self._follower.aim,
            )
            self._begin(session, hello, welcome)
            try:
                await session.run(self._leaving(), self._config.leave_timeout_s)
            finally:
                self._was_member, self._has_handed_over = session.has_been_answered, session.has_handed_over
                self._session = None

    def _hello(self) -> Hello:
        last = self._welcome
        return Hello(
            protocols=(PROTOCOL,),
            software=self._software,
            run_id=last.run_id if last is not None else "",
            run_epoch=last.run_epoch if last is not None else 0,
            served=self._served.needed(),
            held=self._held.listed(),
        )

    def _accept(self, welcome: Welcome, hello: Hello) -> None:
        """Take part in the epoch of the last welcome, or in a later one."""
        begins = begins_epoch(self._welcome, welcome, self._address)
        if begins and (self._host.is_switching or hello.served != self._served.needed()):
            raise Disconnected(
                f"{self._address} has begun another epoch while weights of the last one were being loaded"
            )
        self._fetcher = self._fetcher or self._open_fetcher(welcome.run_id)
        if not begins and self._welcome is not None and self._welcome.blob_urls == welcome.blob_urls:
            self._follower.aim(welcome.head)
        else:
            self._follower.begin(welcome, self._fetcher, (*welcome.blob_urls, self._address.blob_url))
        self._welcome = welcome
        self._held.connected(self._clock.now_s())

    def _begin(self, session: WorkerSession, hello: Hello, welcome: Welcome) -> None:
        """Tell the coordinator what this worker can do already."""
        session.post_ready()
        serves = self._host.serves
        news = [head for head in self._served.needed() if head not in hello.served or head == serves]
        for head in filter(self._follower.has_named, news):
            session.post(Serving(version=head.version, manifest=head.manifest))
        self._say_once(
            f"connected to {self._address} as {welcome.member!r}: run {welcome.run_id}, epoch {welcome.run_epoch},"
            f" version {welcome.head.version}"
        )

    async def _leaving(self) -> str:
        await self._stopping.wait()
        if isinstance(self._error, EngineBroken):
            self._calls.fail_all(str(self._error))
        return self._reason

    # -- what the parts report ----------------------------------------------------------------------------------

    def _announce(self, fetched: FetchedWeights, pause_s: float) -> None:
        head = Head(version=fetched.version, manifest=fetched.digest)
        self._served.add(head)
        if self._session is not None and self._follower.has_named(head):
            self._session.post_ready()
            self._session.post(
                Serving(
                    version=head.version,
                    manifest=head.manifest,
                    prepare_s=fetched.prepare_s,
                    pause_s=pause_s,
                    wire_bytes=fetched.wire_bytes,
                )
            )
        self._say(
            f"serving version {head.version} ({fetched.wire_bytes / 1e6:.1f} MB in {fetched.prepare_s:.1f} s,"
            f" paused for {pause_s:.2f} s)"
        )

    def _report_failure(self, failure: NotServing) -> None:
        if self._session is not None:
            self._session.post(failure)
        self._say(f"version {failure.version} is not served: {failure.reason}")

    async def _probe(self) -> None:
        await self._or_fail(self._host.probe)

    async def _or_fail(self, work: Callable[[], Awaitable[None]]) -> None:
        """Leave for good when the engine cannot be used any more, or there are no weights for it."""
        try:
            await work()
        except (EngineBroken, PublicationRefused) as e:
            self._error = self._error or e
            self.stop(str(e))

    async def _tell(self) -> None:
        """Report every minute how the worker is doing."""
        decoded = 0
        while True:
            await self._clock.sleep(_STATUS_EVERY_S)
            speed, decoded = (self._calls.num_decoded - decoded) / _STATUS_EVERY_S, self._calls.num_decoded
            serves = f"version {self._host.serves.version}" if self._host.serves is not None else "no weights yet"
            state = "connected" if self._session is not None else "not connected"
            self._say(
                f"{state}, {serves}: {self._calls.num_running} of {len(self._calls)} calls running, {speed:.0f}"
                f" tokens/s, {self._held.num_tokens:,} tokens to be acknowledged"
            )

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        assert self._tasks is not None
        return self._tasks.create_task(work)

    def _wake(self) -> None:
        if self._session is not None:
            self._session.wake()

    def _say_once(self, line: str) -> None:
        if line != self._last_said:
            self._say(line)
        self._last_said = line
