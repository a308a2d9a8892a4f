"""The log-prob checks of a swarm's members: one for each version that a member confirms, before it gets calls.

A check is some calls of one token each. They wait for the calls that the member decodes already, and meanwhile no call
takes a place that gets free there. A member that has passed under earlier weights is therefore asked for a quarter of
them, and for the rest only if these leave a doubt. A check that is under way is not begun again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from rollover.clock import wait_for_any
from rollover.engine.background import cancel
from rollover.engine.base import Capabilities, Chunk, Engine, GenerateRequest
from rollover.engine.logprob_check import LogprobCheck
from rollover.errors import EngineError, EngineMismatch
from rollover.swarm.coordinator.machine.effects import SentAway
from rollover.swarm.coordinator.shell import Shell

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 300.0
"""Seconds that a member may take to answer a check, whose few tokens wait for the calls that it is already decoding."""
AGAIN_S = 30.0
"""Time after which a member that has not answered is asked again."""


class DirectedEngine(Engine, Protocol):
    """An engine whose caller may say which member decodes a call."""

    def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]: ...


class OneMember:
    """The swarm as an engine with one member."""

    def __init__(self, swarm: DirectedEngine, name: str) -> None:
        self._swarm, self._name = swarm, name
        self.stats, self.abort = swarm.stats, swarm.abort

    def __repr__(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._swarm.capabilities

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._swarm.generate(request, only=self._name)

    async def close(self) -> None:
        """Do nothing, since nothing was opened."""


class MemberChecks:
    """Implements ``CheckedMembers``: runs the checks that the coordinator asks for and reports their results to it.

    A member that does not answer is asked again, and its ``last_error`` says so; it gets no call meanwhile.

    Args:
        swarm: decodes the few tokens of a check.
    """

    def __init__(self, swarm: DirectedEngine, shell: Shell) -> None:
        self._swarm, self._shell, self._coordinator = swarm, shell, shell.coordinator
        shell.begin_check = self.begin
        self._check: LogprobCheck | None = None
        self._running: dict[str, _Running] = {}
        self._drawn: dict[str, tuple[int, int] | None] = {}
        """The lease and the version under which a member's sampling check was last begun."""

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """Give a member calls under a version only once it has passed ``check``, from now on."""
        self._check = check

    async def check_logprobs(self, *, strict: bool = False) -> dict[str, EngineError]:
        """Check the members that wait for it, now that there is something to compare them with.

        Members are checked when they confirm a version, each in its own time, and are sent away then if they fail: this
        does not wait for them and finds nothing by itself.
        """
        for name, member in self._coordinator.members.items():
            if member.version is not None and member.checked_version != member.version:
                self.begin(name, member.version)
        return {}

    def distrust(self, name: str, reason: str) -> None:
        """Send a member away for good. If no other is there, the run waits for one, as when none has joined."""
        for effect in self._coordinator.distrust(name, reason):
            if isinstance(effect, SentAway):
                self._shell.block(effect)
            else:
                self._shell.perform([effect])

    def begin(self, name: str, version: int) -> None:
        """Check a member under the version that it serves now.

        A check of that version which is under way continues, or is made again at once if it has failed. A check of
        another version is given up.
        """
        if self._check is None:
            return  # ``check_logprobs`` begins it once there is one
        if (running := self._running.pop(name, None)) is not None and not running.task.done():
            if running.version == version:
                self._running[name] = running
                running.again.set()
                return
            running.task.cancel()
        again = asyncio.Event()
        task = asyncio.create_task(self._run(self._check, name, version, again))
        self._running[name] = _Running(version, task, again)

    async def close(self) -> None:
        await cancel(running.task for running in self._running.values())

    async def _run(self, check: LogprobCheck, name: str, version: int, again: asyncio.Event) -> None:
        member, reported = self._coordinator.members[name], ""
        for attempt in itertools.count(1):
            again.clear()
            # If the many draws began again with each version, or each time that the connection is lost, they would
            # starve the member: so they begin once a lease and once a version.
            lease, drawn = member.lease, self._drawn.get(name)
            draws = drawn is None or (lease != drawn[0] and version != drawn[1])
            self._drawn[name] = (lease, version) if draws else drawn
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    is_known = member.checked_version is not None
                    await check(OneMember(self._swarm, name), version, is_known=is_known, draws=draws)
            except EngineMismatch as e:
                del self._drawn[name]  # once it is readmitted, it has to draw before anything else
                self._shell.perform(self._coordinator.distrust(name, str(e)))
                return
            except (EngineError, TimeoutError) as e:  # it was lost or is late, or nothing is known to compare it with
                problem = str(e) or f"{name} has not answered within {CHECK_TIMEOUT_S:g} s"
                if member.lease == lease:
                    self._drawn[name] = drawn
            else:
                self._shell.perform(self._coordinator.checked(name, version))
                return
            if member.version != version:
                return  # it is gone, or serves other weights by now: these are checked when it confirms them
            member.last_error = f"log-prob check of version {version}, attempt {attempt}: {problem}"
            if problem != reported:
                logger.warning("%s gets no calls: %s", name, member.last_error)
            reported = problem
            await wait_for_any(self._shell.clock, AGAIN_S, again)


@dataclass(frozen=True, slots=True)
class _Running:
    """The check of a member under a version; ``again`` is set to have a failed check made again."""

    version: int
    task: asyncio.Task[None]
    again: asyncio.Event
