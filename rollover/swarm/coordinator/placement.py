"""The members of a swarm as places for calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollover.swarm.coordinator.shell import Shell

_PROMISE_S = 60.0
"""Seconds for which a place is kept for an announced call."""


class SwarmPlacement:
    """Implements ``CallPlacement``.

    Args:
        max_running: most calls that all members decode at the same time.
    """

    def __init__(self, shell: Shell, *, max_running: int) -> None:
        self._shell, self._coordinator, self._max_running = shell, shell.coordinator, max_running
        self.has_ended = False
        """The run is over, not only this process of it."""

    def room(self) -> int:
        return min(self._max_running, self._coordinator.max_running)

    def takes_one(
        self, least_version: int, max_new_tokens: int, *, num_waiting: int = 0, max_staleness: int | None = None
    ) -> bool:
        if self._shell.failure is not None:
            raise self._shell.failure
        return not self._shell.outlets.stands_still and self._coordinator.takes_one(
            least_version, max_new_tokens, num_waiting=num_waiting, max_staleness=max_staleness
        )

    def reserve(
        self,
        sample_key: str,
        least_version: int,
        max_new_tokens: int,
        *,
        num_waiting: int = 0,
        max_staleness: int | None = None,
    ) -> int | None:
        if self._shell.outlets.stands_still:
            return None
        return self._coordinator.reserve(
            sample_key,
            least_version,
            max_new_tokens,
            num_waiting=num_waiting,
            max_staleness=max_staleness,
            until_s=self._shell.clock.now_s() + _PROMISE_S,
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        self._shell.on_change.append(listener)

    def on_distrust(self, listener: Callable[[str], None]) -> None:
        """See ``CallPlacement.on_distrust``. The members that ``MemberChecks.distrust`` sends away are left out, since
        its caller knows them. The members that an earlier process has sent away are reported: it may have been killed
        before it did the rest."""
        self._shell.on_distrust.append(listener)
        for name in self._shell.blocklist.listed() if self._shell.blocklist is not None else ():
            listener(name)

    def run_ended(self) -> None:
        self.has_ended = True
        for member in self._coordinator.members.values():
            member.num_held = 0  # what they hold is of no use any more

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None:
        for sample_key, num_tokens in tokens:
            self._shell.perform(self._coordinator.journaled(sample_key, num_tokens))
