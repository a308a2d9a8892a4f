"""The work of a swarm that time alone asks for: the ends of leases, revoked tokens, readmitted workers, the status.

What it keeps true: work that the machine does not let be done now, because a disk is full or a file cannot be read, is
reported once and tried again, and keeps no other work waiting; a mistake in the code ends the run, never this work
alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable

from rollover.clock import Clock
from rollover.errors import RolloverError, refusal
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect
from rollover.swarm.coordinator.trust.outcasts import Outcasts

logger = logging.getLogger(__name__)

_TOKENS_S = 0.25
"""Seconds within which the worker of a revoked token is sent away."""
_STATUS_S = 2.0
"""Seconds between two writings of the status, and longest time between two looks at leases."""


class Upkeep:
    """Looks after a swarm until it is closed.

    Args:
        perform: carries out effects.
        proceed: called whenever leases have been looked at, for work that may be possible by now.
        write_status: shows the state of the swarm.
        crashed: called with an error that is a mistake in the code; the work that it broke is not repeated.
        valid_names: returns the workers whose token is valid now; without it, all are.

    Example: ``upkeep.start(lease_s=15.0)`` looks at leases every two seconds, and at tokens four times a second.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        *,
        perform: Callable[[Iterable[Effect]], None],
        proceed: Callable[[], None],
        write_status: Callable[[], None],
        crashed: Callable[[Exception], None],
        valid_names: Callable[[], Container[str]] | None = None,
        outcasts: Outcasts | None = None,
    ) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._perform, self._proceed, self._write_status, self._crashed = perform, proceed, write_status, crashed
        self._valid_names, self._outcasts = valid_names, outcasts
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, lease_s: float) -> None:
        """Begin the upkeep; each piece of work has a task of its own."""
        self._repeat(self._look_at_leases, min(_STATUS_S, lease_s / 4))
        self._repeat(self._write_status, _STATUS_S)
        self._repeat(self._send_revoked_away, _TOKENS_S)
        self._repeat(self._readmit_pardoned, _TOKENS_S)

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look_at_leases(self) -> None:
        self._perform(self._coordinator.expire(self._clock.now_s()))
        self._perform(self._coordinator.relieve(self._clock.now_s()))
        self._proceed()

    def _send_revoked_away(self) -> None:
        members = self._coordinator.members
        valid = self._valid_names() if self._valid_names is not None else members
        for name, member in list(members.items()):
            if member.lease and name not in valid:
                self._perform(self._coordinator.revoked(name))

    def _readmit_pardoned(self) -> None:
        for name in self._outcasts.pardoned() if self._outcasts is not None else ():
            self._perform(self._coordinator.pardoned(name))

    def _repeat(self, work: Callable[[], None], every_s: float) -> None:
        self._tasks.append(asyncio.create_task(self._again_and_again(work, every_s)))

    async def _again_and_again(self, work: Callable[[], None], every_s: float) -> None:
        problem = ""
        while True:
            before, problem = problem, ""
            try:
                work()
            except (RolloverError, OSError) as e:
                problem = refusal(e) if isinstance(e, OSError) else str(e)
                if problem != before:
                    logger.warning("%s (tried again every %g s)", problem, every_s)
            except Exception as e:
                logger.exception("the swarm cannot be looked after any more, and the run ends")
                self._crashed(e)
                return
            await self._clock.sleep(every_s)
