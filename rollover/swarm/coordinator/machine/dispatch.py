"""The choice of a member for a call, by how long each is expected to take.

Let a call have ``r`` tokens left, as far as past lengths tell, and a member decode ``v`` tokens per second for each of
its ``n`` calls. With room it finishes the call after ``r / v``; without room after ``w + r / v``, where ``w`` is the
time until one of its calls ends: with ``m`` tokens left for each on average, ``m / (n v)``. A member that is still
fetching the weights that a call asks for is counted with the time that this will take.

A member is *in time* if it finishes within a limit, which is the longer of two times: until a training step waits for
the response, which may depend on the version that the member serves, and until all members together would be done with
the work that is due no later. The call goes to the fastest member with room among those that are in time. If none is,
it waits for a member that is busy or fetching weights, provided that one would finish sooner than any with room, and
otherwise goes to the fastest with room. So no call is refused by all members, slow members work while that holds up no
other, long remainders go to fast members, and with equal members the rule deals evenly.
``benchmarks/swarm_dispatch.py`` shows what that gains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rollover.swarm.coordinator.machine.deadlines import Deadline

NUM_PROBES = 4
"""Calls that a member gets before its speed is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member as the rule sees it.

    Example: ``Candidate(name="laptop", version=7, num_running=3, max_running=16, call_tokens_per_s=21.0)``
    """

    name: str
    version: int
    num_running: int
    max_running: int
    call_tokens_per_s: float | None
    """Tokens per second for each of its calls; ``None`` while nothing is measured."""
    ready_s: float = math.inf
    """Time until it serves newer weights, which it is fetching; infinite when it is not."""

    @property
    def room(self) -> int:
        """Return the number of calls that it can take now."""
        limit = self.max_running if self.call_tokens_per_s is not None else min(self.max_running, NUM_PROBES)
        return limit - self.num_running


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call to be placed.

    Example: ``Work(least_version=6, remaining_tokens=412.0, mean_remaining_tokens=300.0)``
    """

    least_version: int
    """Members that serve an older version do not get it."""
    remaining_tokens: float
    """Tokens that it is expected to decode."""
    mean_remaining_tokens: float
    """Tokens that a running call has left on average."""
    horizon_s: float = 0.0
    """Time in which all members together would be done with the work that is due no later; infinite where a response is
    never waited for."""
    deadline: Deadline | None = None
    """Time at which a training step waits for the response, where that is known."""

    def limit_s(self, version: int) -> float:
        """Return the time within which a member that serves ``version`` should finish it."""
        return max(self.horizon_s, self.deadline.under(version)) if self.deadline is not None else self.horizon_s


def choose(candidates: Iterable[Candidate], work: Work) -> str | None:
    """Return the name of the member that gets the call; ``None`` when it should wait or no member may have it."""
    able = [c for c in candidates if c.version >= work.least_version or c.ready_s < math.inf]
    typical = typical_speed(able)
    with_room = [
        (finish_s(c, work, typical), c.num_running / c.max_running, c.name, work.limit_s(c.version))
        for c in able
        if c.room > 0 and c.version >= work.least_version
    ]
    if not with_room:
        return None
    if in_time := [found for found in with_room if found[0] <= found[3]]:
        return min(in_time)[2]
    best = min(with_room)
    earliest_s = min(finish_s(c, work, typical) for c in able if c.max_running > 0)
    return best[2] if best[0] <= earliest_s else None


def finish_s(member: Candidate, work: Work, typical_tokens_per_s: float) -> float:
    """Return the expected time until ``member`` has finished the call."""
    speed = typical_tokens_per_s if member.call_tokens_per_s is None else member.call_tokens_per_s
    if speed <= 0:
        return math.inf
    wait_s = 0.0 if member.version >= work.least_version else member.ready_s
    if member.room <= 0:
        wait_s = max(wait_s, work.mean_remaining_tokens / (max(1, member.num_running) * speed))
    return wait_s + work.remaining_tokens / speed


def drain_s(candidates: Iterable[Candidate], num_tokens: float) -> float:
    """Return the time in which all members together would decode ``num_tokens``; infinite while no speed is known."""
    speed = math.fsum((c.call_tokens_per_s or 0.0) * c.max_running for c in candidates)
    return num_tokens / speed if speed else math.inf


def typical_speed(candidates: Iterable[Candidate]) -> float:
    """Return the speed that is assumed for a member whose own is not known: the median of the others."""
    speeds = sorted(c.call_tokens_per_s for c in candidates if c.call_tokens_per_s)
    return speeds[len(speeds) // 2] if speeds else 1.0
