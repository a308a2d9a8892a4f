"""The periodic work of a swarm: the ends of leases, revoked tokens, readmitted workers, the status.

Invariants: work that fails because a disk is full or a file cannot be read is reported once, tried again, and delays no
other work; a mistake in the code ends the run, never this work alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rollover.engine.background import BackgroundTasks
from rollover.errors import RolloverError, refusal
from rollover.swarm.coordinator.shell import Shell
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.coordinator.status.snapshot import swarm_status

logger = logging.getLogger(__name__)

_TOKENS_S = 0.25
"""Seconds within which the worker of a revoked token is sent away."""
_STATUS_S = 2.0
"""Seconds between two writings of the status, and longest time between two looks at leases."""


class Upkeep:
    """Looks after a swarm until it is closed.

    Args:
        board: shows people the state of the swarm.
        url: returns the address that workers are to join.
        valid_tokens: returns the hashes of the tokens that are valid now, by worker; without it, all are.
    """

    def __init__(
        self,
        shell: Shell,
        *,
        board: StatusBoard,
        url: Callable[[], str],
        valid_tokens: Callable[[], Mapping[str, str]] | None,
    ) -> None:
        self._shell, self._coordinator, self._clock = shell, shell.coordinator, shell.clock
        self._board, self._url, self._valid_tokens = board, url, valid_tokens
        self._logins: dict[int, str | None] = {}
        """The hash of the token with which each lease began."""
        self._tasks = BackgroundTasks()

    def start(self, lease_s: float) -> None:
        """Begin the upkeep; each piece of work has a task of its own."""
        self._tasks.start(self._repeat(self._look_at_leases, min(_STATUS_S, lease_s / 4)))
        self._tasks.start(self._repeat(self.write_status, _STATUS_S))
        self._tasks.start(self._repeat(self._send_revoked_away, _TOKENS_S))
        self._tasks.start(self._repeat(self._readmit, _TOKENS_S))

    async def close(self) -> None:
        await self._tasks.cancel()

    def write_status(self) -> None:
        self._board.write(swarm_status(self._coordinator, self._url()))

    def _look_at_leases(self) -> None:
        self._shell.perform(self._coordinator.expire(self._clock.now_s()))
        self._shell.perform(self._coordinator.move_calls(self._clock.now_s()))
        self._shell.changed()  # time alone may change who should get a call

    def _send_revoked_away(self) -> None:
        if self._valid_tokens is None:
            return
        valid, before, self._logins = self._valid_tokens(), self._logins, {}
        for name, member in list(self._coordinator.members.items()):
            if member.lease:
                login = self._logins[member.lease] = before.get(member.lease, valid.get(name))
                if login is None or login != valid.get(name):  # the name may have a new token already
                    self._shell.perform(self._coordinator.revoked(name))

    def _readmit(self) -> None:
        for name in self._shell.blocklist.readmitted() if self._shell.blocklist is not None else ():
            self._shell.perform(self._coordinator.readmitted(name))

    async def _repeat(self, work: Callable[[], None], every_s: float) -> None:
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
                self._shell.crash(e)
                return
            await self._clock.sleep(every_s)
