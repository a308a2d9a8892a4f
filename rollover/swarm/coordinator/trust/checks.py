"""The log-prob checks of a swarm's members: one for each version that a member confirms, before it gets calls.

A check is some calls of one token each. They wait for the calls that the member decodes already, and while they do, no
place that gets free there is taken by a call; so a member that has passed under earlier weights is asked for a quarter
of them, and for the rest only where these leave a doubt, and a check that is under way is not begun again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollover.clock import Clock, wait_for_any
from rollover.engine.logprob_check import LogprobCheck
from rollover.errors import EngineError, EngineMismatch
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect
from rollover.swarm.coordinator.trust.directed import DirectedEngine, OneMember

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 300.0
"""Seconds that a member may take to answer a check, whose few tokens wait for those that it is already decoding."""
AGAIN_S = 30.0
"""Time after which a member that has not answered is asked again."""


class MemberChecks:
    """Runs the checks that the coordinator asks for and tells it how they ended.

    A member that does not answer is asked again, and its ``last_error`` says so; it gets no call meanwhile.

    Args:
        swarm: decodes the few tokens of a check.
        perform: carries out effects.

    Example: ``checks.begin("laptop", 7)`` ends with ``coordinator.checked("laptop", 7)`` or with its ``distrust``.
    """

    def __init__(
        self,
        swarm: DirectedEngine,
        coordinator: Coordinator,
        perform: Callable[[Iterable[Effect]], None],
        clock: Clock,
    ) -> None:
        self._swarm, self._coordinator, self._perform, self._clock = swarm, coordinator, perform, clock
        self._check: LogprobCheck | None = None
        self._running: dict[str, _Running] = {}

    def check_with(self, check: LogprobCheck) -> None:
        """Give a member calls under a version only once it has passed ``check``, from now on."""
        self._check = check

    def begin(self, name: str, version: int) -> None:
        """Check a member under the version that it serves now.

        A check of that version which is under way continues, or is made again at once where it has failed; one of
        another version is given up.
        """
        if self._check is None:
            return  # there will be one: ``begin_all`` is called then
        if (running := self._running.pop(name, None)) is not None and not running.task.done():
            if running.version == version:
                self._running[name] = running
                running.again.set()
                return
            running.task.cancel()
        again = asyncio.Event()
        task = asyncio.create_task(self._run(self._check, name, version, again))
        self._running[name] = _Running(version, task, again)

    def begin_all(self) -> None:
        """Check the members that wait for it."""
        for name, member in self._coordinator.members.items():
            if member.version is not None and member.checked_version != member.version:
                self.begin(name, member.version)

    async def close(self) -> None:
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, check: LogprobCheck, name: str, version: int, again: asyncio.Event) -> None:
        member, said = self._coordinator.members[name], ""
        for attempt in itertools.count(1):
            again.clear()
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    is_known = member.checked_version is not None
                    await check(OneMember(self._swarm, name), version, is_known=is_known)
            except EngineMismatch as e:
                self._perform(self._coordinator.distrust(name, str(e)))
                return
            except EngineError as e:  # it was lost, or nothing is known yet to compare it with
                problem = str(e)
            except TimeoutError:
                problem = f"{name} has not answered within {CHECK_TIMEOUT_S:g} s"
            else:
                self._perform(self._coordinator.checked(name, version))
                return
            if member.version != version:
                return  # it is gone, or serves other weights by now: these are checked when it says so
            member.last_error = f"log-prob check of version {version}, attempt {attempt}: {problem}"
            if problem != said:
                logger.warning("%s gets no calls: %s", name, member.last_error)
            said = problem
            await wait_for_any(self._clock, AGAIN_S, again)


@dataclass(frozen=True, slots=True)
class _Running:
    """The check of a member under a version; ``again`` has one that has failed made again."""

    version: int
    task: asyncio.Task[None]
    again: asyncio.Event
