"""Following the head: the newest publication is fetched while the engine serves, then taken.

====================  ==========================================  ==============================================
task                  waits for                                   is unblocked by
====================  ==========================================  ==============================================
``HeadFollower.run``  a head that is not served                   ``aim`` with another head; a new epoch
... the fetch         the fetcher                                 its own deadlines; a new epoch
... the switch        the engine                                  ``update_timeout_s``
... after a failure   time                                        time, which doubles; another head
====================  ==========================================  ==============================================

Invariants: at most one switch is in flight, and the newest head comes after it, however many there were; a failed fetch
or load changes nothing; within an epoch, versions do not go back; what no further try would change ends the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from rollover.clock import Clock
from rollover.engine.background import cancel
from rollover.errors import RolloverError, refusal
from rollover.privacy import redacted_text
from rollover.swarm.publication.fetch import WeightFetcher
from rollover.swarm.publication.manifest import PublicationRefused
from rollover.swarm.wire.messages import Head, NotServing, Welcome
from rollover.swarm.worker.host import EngineBroken, EngineHost
from rollover.swarm.worker.waiting import BackOff, Changes

_MAX_REASON = 1000
MAX_REFUSED = 3
"""Publications in a row that this worker fetches and does not take, at which it leaves: a relay on the way may be
damaged for a moment."""


class HeadFollower:
    """Keeps the engine at the newest publication.

    Args:
        report: called with what could not be served.
        fetch_timeout_s: deadline of a fetch.
    """

    def __init__(
        self,
        host: EngineHost,
        clock: Clock,
        random: Random,
        *,
        report: Callable[[NotServing], None],
        fetch_timeout_s: float,
        back_off: BackOff | None = None,
    ) -> None:
        self._host, self._clock, self._random, self._report = host, clock, random, report
        self._fetch_timeout_s = fetch_timeout_s
        self._back_off = back_off or BackOff(first_s=1.0, most_s=60.0)
        self._changes = Changes()
        self._head: Head | None = None
        self._fetcher: WeightFetcher | None = None
        self._urls: tuple[str, ...] = ()
        self._run_epoch = 0
        self._beginnings = 0
        """Counts what ``begin`` began."""
        self._named: set[Head] = set()

    def begin(self, welcome: Welcome, fetcher: WeightFetcher, urls: tuple[str, ...]) -> None:
        """Follow the heads of another run or epoch, wherever they stand."""
        self._head, self._run_epoch = welcome.head, welcome.run_epoch
        self._fetcher, self._urls = fetcher, urls
        self._named = {welcome.head}
        self._beginnings += 1
        self._changes.notify()

    def has_named(self, head: Head) -> bool:
        """Return whether the coordinator has published ``head`` in this epoch: only then may it hear of it."""
        return head in self._named

    def aim(self, head: Head) -> None:
        """Record a head, unless it is older than another head of its epoch."""
        assert self._head is not None
        if head.version > self._head.version:
            self._head = head
            self._named.add(head)
            self._changes.notify()
        elif head.version == self._head.version and head not in self._named:
            self._named.add(head)
            reason = f"version {head.version} is said to be {head.manifest}, but was {self._head.manifest} before"
            self._report(NotServing(version=head.version, reason=reason))

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            EngineBroken: the engine cannot be used any more.
            PublicationRefused: what the publisher offers is not for this worker.
        """
        num_failures = num_refused = 0
        while True:
            await self._changes.until(lambda: self._head is not None and self._head != self._host.serves)
            head, beginning = self._head, self._beginnings
            assert head is not None
            try:
                await self._follow(head, beginning)
                num_failures = num_refused = 0
            except EngineBroken:
                raise
            except (RolloverError, OSError) as e:
                num_failures += 1
                num_refused = num_refused + 1 if isinstance(e, PublicationRefused) else 0
                if num_refused == MAX_REFUSED:
                    raise
                reason = refusal(e) if isinstance(e, OSError) and e.errno is not None else str(e)
                self._report(NotServing(version=head.version, reason=redacted_text(reason)[:_MAX_REASON]))
                await self._wait(self._back_off.wait_s(num_failures, self._random), head, beginning)

    async def _follow(self, head: Head, beginning: int) -> None:
        """Fetch and take one publication; or stop fetching, when the run begins another epoch."""
        assert self._fetcher is not None
        fetching = asyncio.create_task(
            self._fetcher.fetch(head, self._urls, run_epoch=self._run_epoch, deadline_s=self._fetch_timeout_s)
        )
        if not await _first(fetching, self._changes.until(lambda: self._beginnings != beginning)):
            return
        await self._host.take(fetching.result())

    async def _wait(self, seconds: float, head: Head, beginning: int) -> None:
        """Wait before the next attempt; another head, or another epoch, is tried at once."""
        sleeping = asyncio.create_task(self._clock.sleep(seconds))
        await _first(sleeping, self._changes.until(lambda: (self._head, self._beginnings) != (head, beginning)))


async def _first(task: asyncio.Task[Any], other: Coroutine[Any, Any, None]) -> bool:
    """Wait for one of the two, and end the other; return whether ``task`` is done."""
    competitor = asyncio.create_task(other)
    try:
        await asyncio.wait((task, competitor), return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        await cancel((task, competitor))
