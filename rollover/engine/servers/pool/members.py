"""The members of a pool: engines, who of them is in service, and who waits for that to change.

A member is ``UP`` (gets calls), ``SUSPECT`` (a call has just failed: gets none until it is probed) or ``DOWN`` (tried
again at ``retry_s``, each time after twice the time; never, when it is expelled).

Invariants: a member that has been taken out is not waited for, and any other for no longer than a deadline; a
change of a member's health reaches all who wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any, Protocol

from rollover.clock import Clock, wait_for_any
from rollover.engine.background import cancel, in_time
from rollover.engine.base import Engine, Sleeps
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.weights.transfer import GroupMember
from rollover.errors import EngineError, EnginesAway, EngineTimeout
from rollover.weights.base import WeightTarget

logger = logging.getLogger(__name__)

AFFINITY_SLACK = 0.25
"""Share of its capacity by which a member may be fuller than the emptiest one and still get its sibling."""
_MAX_KEYS = 8192
_MAX_STOPPED_CALLS = 5
"""Calls in a row that a member may end before their end without being asked to."""
_FIRST_RETRY_S = 1.0
"""Until a member that was taken out is tried for the first time."""


class PoolEngine(Engine, WeightTarget, Protocol):
    """An engine that may fail and come back."""

    @property
    def sleeper(self) -> Sleeps | None:
        """Return what gives its memory back; ``None`` if nothing can."""
        ...

    @property
    def group(self) -> GroupMember | None:
        """Return what receives weights in a group with other members; ``None`` if it reads folders."""
        ...

    async def probe(self, *, decode: bool = False) -> None:
        """Raise ``EngineError`` unless it is well, has its weights and, with ``decode``, samples a token."""
        ...

    async def revive(self) -> None:
        """Start it again if that is in our power. Raises ``EngineError``."""
        ...


class Health(Enum):
    """The health of a member; only a member that is up is given new calls."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Member:
    """One engine of a pool, out of service until it is admitted.

    Args:
        max_retry_s: longest time between two attempts to bring it back.
    """

    def __init__(self, engine: PoolEngine, clock: Clock, *, max_retry_s: float) -> None:
        self.engine = engine
        self.name = repr(engine)
        self.capacity = engine.capabilities.max_running
        """Calls it decodes at the same time."""
        self.num_calls = 0
        """Calls that it has."""
        self.health = Health.DOWN
        self.reason = "it has not been tried yet"
        """The reason why it is not up."""
        self.retry_s = 0.0
        self.is_expelled = False
        """Down for good."""
        self.returned = asyncio.Event()
        """Cleared while it is brought back: started again, given weights and checked."""
        self.returned.set()
        self._was_awaited = False
        """The trainer's turn has waited for its return since it was last up."""
        self.lost = asyncio.Event()
        """Set while it is down: its open calls end."""
        self.look = asyncio.Event()
        """Set to have it probed now."""
        self._clock = clock
        self._max_retry_s = max_retry_s
        self._num_failures = 0
        """Failures since it was last up; if it was stopping calls, since one ended as it should."""
        self._num_stopped_calls = 0
        """Calls in a row that it ended without being asked to."""
        self._num_late_probes = 0
        """Late probes in a row, while it is up."""

    @property
    def share(self) -> float:
        return self.num_calls / self.capacity

    @property
    def is_up(self) -> bool:
        return self.health is Health.UP

    @property
    def is_down(self) -> bool:
        return self.health is Health.DOWN

    def admit(self) -> None:
        """Admit it to calls: it is well and its weights are current."""
        assert not self.is_expelled, f"{self.name} is out permanently"
        self.health, self.reason, self.capacity = Health.UP, "", self.engine.capabilities.max_running
        self._num_late_probes, self._was_awaited = 0, False
        if self._num_stopped_calls < _MAX_STOPPED_CALLS:
            self._num_failures = 0
        self.lost.clear()

    async def until_returned(self) -> None:
        """Wait for a return that is under way, once until it is up again: a start that hangs would cost each turn."""
        if not (self._was_awaited or self.returned.is_set()):
            self._was_awaited = True
            logger.warning("the trainer's turn waits once for the return of %s (engine.launch_timeout_s)", self.name)
            await self.returned.wait()

    def suspect(self, reason: str) -> None:
        """Treat it as suspect, since a call has failed: it gets no more before the next probe, which is made now."""
        if self.is_up:
            self.health, self.reason = Health.SUSPECT, reason
        self.look.set()

    def call_ended(self, *, unasked: bool) -> None:
        """Count a call that ended as it should, or was aborted ``unasked``. A member that only does the latter is taken
        out like a failing one, each time for longer, however well its probes go."""
        if not unasked:
            self._num_stopped_calls = 0
            self._num_failures *= self.is_down
            return
        self._num_stopped_calls += 1
        if self._num_stopped_calls >= _MAX_STOPPED_CALLS and not self.is_down:
            self.take_out(f"it has ended {self._num_stopped_calls} calls in a row without being asked to")

    def late(self, reason: str) -> None:
        """Count a failed probe, which takes it out when it is suspect, or late twice in a row."""
        if self.is_down:
            return
        self._num_late_probes += 1
        if not self.is_up or self._num_late_probes >= 2:
            self.take_out(reason)

    def take_out(self, reason: str) -> None:
        """Take it out: it gets no calls until it comes back. One that is out already is left out for longer."""
        if self.is_expelled:
            return
        self.retry_s = self._clock.now_s() + min(_FIRST_RETRY_S * 2.0 ** min(self._num_failures, 63), self._max_retry_s)
        self._num_failures += 1
        was_down = self.is_down
        self.health, self.reason = Health.DOWN, reason
        if not was_down:
            self._left()

    def expel(self, reason: str) -> None:
        self.health, self.reason, self.is_expelled = Health.DOWN, reason, True
        self._left()

    def _left(self) -> None:
        logger.warning("%s is taken out: %s", self.name, self.reason)
        self.lost.set()
        self.look.set()


Act = Callable[[Member], Coroutine[Any, Any, None]]


class Members:
    """All members of a pool, in the order in which their engines were given."""

    def __init__(self, engines: Sequence[PoolEngine], clock: Clock, config: ServerConfig) -> None:
        assert engines, "a pool needs a member"
        self.clock = clock
        self.all = [Member(engine, clock, max_retry_s=config.rejoin_max_interval_s) for engine in engines]
        self._admitted = asyncio.Event()
        self._all_down_timeout_s = config.all_down_timeout_s
        self._start_timeout_s = config.start_timeout_s
        self._out_since_s: float | None = None
        """Time at which calls began to wait because no member was up."""
        self.waiting: dict[asyncio.Event, None] = {}
        """Calls that wait for room, in order; each looks again when its event is set."""

    @property
    def up(self) -> list[Member]:
        """Return the members that receive calls."""
        return [member for member in self.all if member.is_up]

    @property
    def in_service(self) -> list[Member]:
        """Return the members that may have calls: up or suspect."""
        return [member for member in self.all if not member.is_down]

    def why_none(self) -> str:
        """Explain for each member that is not up why."""
        return "; ".join(f"{member.name}: {member.reason}" for member in self.all if not member.is_up)

    def admit(self, member: Member) -> None:
        """Let calls go to a member from now on."""
        member.admit()
        self._admitted.set()
        self.look_for_room()
        if self._out_since_s is not None:
            waited_s, self._out_since_s = self.clock.now_s() - self._out_since_s, None
            logger.warning("%s is up after %.0f s without any engine", member.name, waited_s)

    def look_for_room(self) -> None:
        """Have the first call that waits look again; if no member is up, all, since each waits for one by itself."""
        for turn in islice(self.waiting, 1 if self.up else None):
            turn.set()

    def take_out(self, failed: Mapping[Member, EngineError]) -> None:
        """Take out the members that failed and are not out yet."""
        for member, error in failed.items():
            if not member.is_down:
                member.take_out(str(error))

    async def until_one_is_up(self, unless: asyncio.Event) -> None:
        """Return when a member is up or ``unless`` is set. Raises ``EnginesAway`` after ``all_down_timeout_s``; while a
        member is brought back, only once its first start would have failed too."""
        began_s, limit_s, key = self.clock.now_s(), self._all_down_timeout_s, "all_down_timeout_s"
        while not (self.up or unless.is_set()):
            if not all(member.returned.is_set() for member in self.all) and self._start_timeout_s > limit_s:
                limit_s, key = self._start_timeout_s, "launch_timeout_s"
            left_s = began_s + limit_s - self.clock.now_s()
            if left_s <= 0:
                raise EnginesAway(f"no engine has been up for {limit_s:g} s (engine.{key}): {self.why_none()}")
            if self._out_since_s is None and not self.in_service:
                self._out_since_s = self.clock.now_s()
                longer = f", or {self._start_timeout_s:g} s if one is started again (engine.launch_timeout_s)"
                logger.warning(
                    "no engine is up: waiting up to %g s for one (engine.all_down_timeout_s)%s",
                    self._all_down_timeout_s,
                    longer if self._start_timeout_s > self._all_down_timeout_s else "",
                )
            self._admitted.clear()
            await wait_for_any(self.clock, left_s, self._admitted, unless)

    async def each(
        self, members: Collection[Member], act: Act, limit_s: float | None = None, what: str = ""
    ) -> dict[Member, EngineError]:
        """Do ``act`` on members at once. Returns the failures by member.

        A member that is taken out, or takes longer than ``limit_s`` for ``what``, is no longer waited for. When
        cancelled, it takes out the members that were not done.
        """
        failures = await asyncio.gather(*(self._one(member, act, limit_s, what) for member in members))
        return {member: e for member, e in zip(members, failures, strict=True) if e is not None}

    async def _one(self, member: Member, act: Act, limit_s: float | None, what: str) -> EngineError | None:
        lost = asyncio.create_task(member.lost.wait())
        work = act(member)
        done = asyncio.create_task(work if limit_s is None else in_time(work, limit_s, member.name, what))
        try:
            await asyncio.wait([done, lost], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return EngineTimeout(member.reason or f"{member.name} was taken out, and is back")
            done.result()
        except EngineError as e:
            return e
        except asyncio.CancelledError:
            if limit_s is not None and not done.done():
                self.take_out({member: EngineError(f"{member.name} was left in the middle: it did not {what} yet")})
            raise
        finally:
            await cancel((lost, done))
        return None


class Dispatch:
    """Assigns calls to the member with most room, or to the member of their siblings."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._homes: OrderedDict[str, Member] = OrderedDict()
        """The member to which the last call of a prompt went."""

    def assign(self, prompt_key: str) -> Member | None:
        """Choose the member that gets a call of this prompt, and count the call; ``None`` when none has room."""
        if not (free := [member for member in self._members.up if member.num_calls < member.capacity]):
            return None
        chosen = min(free, key=lambda member: member.share)
        home = self._homes.get(prompt_key)
        if home in free and home.share <= chosen.share + AFFINITY_SLACK:
            chosen = home
        self._homes[prompt_key] = chosen
        self._homes.move_to_end(prompt_key)
        if len(self._homes) > _MAX_KEYS:
            self._homes.popitem(last=False)
        chosen.num_calls += 1
        return chosen

    def release(self, member: Member) -> None:
        """End a call that was assigned to the member."""
        member.num_calls -= 1
        assert member.num_calls >= 0, f"{member.name} has fewer calls than none"
        self._members.look_for_room()
