"""The health of a pool's members: which of them get calls. Pure: no engine, no clock, no asyncio.

A member is ``UP`` (gets calls), ``SUSPECT`` (a call has just failed: gets none until it is probed) or ``DOWN`` (tried
again at ``retry_s``, each time after twice the time; never, when it is expelled).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


@dataclass(slots=True)
class Member:
    """One engine of a pool.

    Example: a member with 16 calls and room for 64 has the share 0.25.
    """

    name: str
    capacity: int
    """Calls it decodes at the same time."""
    load: int = 0
    health: Health = Health.DOWN
    reason: str = "it has not been tried yet"
    """Why it is not up."""
    retry_s: float = 0.0
    num_failures: int = 0
    """Failures since it was last up."""
    num_late_probes: int = 0
    """Late probes in a row, while it is up."""
    is_expelled: bool = False
    """Down for good."""

    @property
    def share(self) -> float:
        """Calls per capacity."""
        return self.load / self.capacity


class Membership:
    """Members by index, in the order in which they were given."""

    def __init__(
        self,
        names: Sequence[str],
        capacities: Sequence[int],
        *,
        retry_after_s: float,
        max_retry_after_s: float,
    ) -> None:
        self.members = [Member(n, c) for n, c in zip(names, capacities, strict=True)]
        self._retry_after_s = retry_after_s
        self._max_retry_after_s = max_retry_after_s

    @property
    def up(self) -> list[int]:
        """Members that get calls."""
        return [i for i, member in enumerate(self.members) if member.health is Health.UP]

    @property
    def in_service(self) -> list[int]:
        """Members that may have calls: up or suspect."""
        return [i for i, member in enumerate(self.members) if member.health is not Health.DOWN]

    def is_down(self, index: int) -> bool:
        return self.members[index].health is Health.DOWN

    def suspect(self, index: int, reason: str) -> None:
        """A call failed on a member that was up."""
        member = self.members[index]
        if member.health is Health.UP:
            member.health, member.reason = Health.SUSPECT, reason

    def late(self, index: int, reason: str, now_s: float) -> bool:
        """A probe of a member failed. True when that takes it out: when it is suspect, or late twice in a
        row."""
        member = self.members[index]
        member.num_late_probes += 1
        if member.health is Health.UP and member.num_late_probes < 2:
            return False
        self.take_out(index, reason, now_s)
        return True

    def take_out(self, index: int, reason: str, now_s: float) -> None:
        member = self.members[index]
        if member.is_expelled:
            return
        member.health, member.reason = Health.DOWN, reason
        wait_s = min(self._retry_after_s * 2.0 ** min(member.num_failures, 63), self._max_retry_after_s)
        member.num_failures += 1
        member.retry_s = now_s + wait_s

    def expel(self, index: int, reason: str) -> None:
        member = self.members[index]
        member.health, member.reason, member.is_expelled = Health.DOWN, reason, True

    def admit(self, index: int, capacity: int) -> None:
        """The member is well and its weights are current."""
        member = self.members[index]
        assert not member.is_expelled, f"{member.name} is out for good"
        member.health, member.reason, member.capacity = Health.UP, "", capacity
        member.num_failures = member.num_late_probes = 0

    def why_none(self) -> str:
        """Explain for each member that is not up why."""
        return "; ".join(f"{m.name}: {m.reason}" for m in self.members if m.health is not Health.UP)
