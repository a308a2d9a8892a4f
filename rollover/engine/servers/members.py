"""The engines of a pool, who of them is in service, and who waits for that to change.

What it keeps true: nobody waits for a member that has been taken out, nor longer than a deadline for one that has not;
a change of ``Membership`` reaches all who wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from rollover.clock import Clock
from rollover.engine.base import Engine
from rollover.engine.servers.background import in_time, wait_for_any
from rollover.engine.servers.dispatch import Dispatch
from rollover.engine.servers.membership import Health, Membership
from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import WeightTarget

logger = logging.getLogger(__name__)


class PoolMember(Engine, WeightTarget, Protocol):
    """An engine that may fail and come back.

    Example: a ``ServerEngine``.
    """

    async def probe(self, *, decode: bool = False) -> None:
        """Raise ``EngineError`` unless it is well, has its weights and, with ``decode``, samples a token."""
        ...

    async def revive(self) -> None:
        """Start it again where that is in our power. Raises ``EngineError``."""
        ...


class Members:
    """Engines by index, in the order in which they were given.

    Args:
        all_down_timeout_s: how long to wait for a member to come up when none is.
    """

    def __init__(
        self,
        engines: Sequence[PoolMember],
        clock: Clock,
        *,
        retry_after_s: float,
        max_retry_after_s: float,
        all_down_timeout_s: float,
    ) -> None:
        assert engines, "a pool needs a member"
        self.engines = list(engines)
        self.clock = clock
        self.state = Membership(
            [repr(e) for e in engines],
            [e.capabilities.max_running for e in engines],
            retry_after_s=retry_after_s,
            max_retry_after_s=max_retry_after_s,
        )
        self.dispatch = Dispatch(self.state)
        self.lost = [asyncio.Event() for _ in engines]
        """Set while a member is down: its open calls end."""
        self.look = [asyncio.Event() for _ in engines]
        """Set to have a member probed now."""
        self._admitted = asyncio.Event()
        self._all_down_timeout_s = all_down_timeout_s
        self._out_since_s: float | None = None
        """When somebody began to wait because no member was up."""

    def name(self, index: int) -> str:
        return self.state.members[index].name

    # -- changes ---------------------------------------------------------------------------------------------

    def admit(self, index: int) -> None:
        """From now on calls may go to a member."""
        self.lost[index].clear()
        self.state.admit(index, self.engines[index].capabilities.max_running)
        self._admitted.set()
        if self._out_since_s is not None:
            waited_s, self._out_since_s = self.clock.now_s() - self._out_since_s, None
            logger.warning("%s is up after %.0f s without any engine", self.name(index), waited_s)

    def suspect(self, index: int, reason: str) -> None:
        """A call has failed: send no more calls before the next probe, which is made now."""
        self.state.suspect(index, reason)
        self.look[index].set()

    def late(self, index: int, reason: str) -> None:
        """A probe has failed."""
        if not self.state.is_down(index) and self.state.late(index, reason, self.clock.now_s()):
            self._left(index)

    def take_out(self, failed: Mapping[int, EngineError]) -> None:
        """Send no calls to the members that failed, until they come back."""
        for index, error in failed.items():
            if not self.state.is_down(index):
                self.state.take_out(index, str(error), self.clock.now_s())
                self._left(index)

    def put_off(self, index: int, error: EngineError) -> None:
        """Leave a member out for longer."""
        self.state.take_out(index, str(error), self.clock.now_s())

    def expel(self, index: int, reason: str) -> None:
        """Take a member out for good."""
        self.state.expel(index, reason)
        self._left(index)

    def look_at_all(self) -> None:
        """Probe all members now."""
        for look in self.look:
            look.set()

    def is_suspect(self, index: int) -> bool:
        return self.state.members[index].health is Health.SUSPECT

    def _left(self, index: int) -> None:
        logger.warning("%s is taken out: %s", self.name(index), self.state.members[index].reason)
        self.lost[index].set()
        self.look[index].set()

    # -- waiting ---------------------------------------------------------------------------------------------

    async def until_one_is_up(self, unless: asyncio.Event) -> None:
        """Return when a member is up or ``unless`` is set. Raises ``EngineError`` after ``all_down_timeout_s``."""
        deadline_s = self.clock.now_s() + self._all_down_timeout_s
        while not (self.state.up or unless.is_set()):
            left_s = deadline_s - self.clock.now_s()
            if left_s <= 0:
                raise EngineError(
                    f"no engine has been up for {self._all_down_timeout_s:g} s (engine.all_down_timeout_s):"
                    f" {self.state.why_none()}"
                )
            if self._out_since_s is None and not self.state.in_service:
                self._out_since_s = self.clock.now_s()
                logger.warning(
                    "no engine is up: waiting up to %g s for one (engine.all_down_timeout_s)", self._all_down_timeout_s
                )
            self._admitted.clear()
            await wait_for_any(self.clock, left_s, self._admitted, unless)

    async def each(
        self,
        indices: Collection[int],
        act: Callable[[int], Coroutine[Any, Any, None]],
        limit_s: float | None = None,
        what: str = "",
    ) -> dict[int, EngineError]:
        """Do ``act`` on members at once. Returns how it failed where it did.

        Nobody waits for a member that is taken out, nor for one that takes longer than ``limit_s`` for ``what``. When
        cancelled, it takes out those that were not done.
        """
        failures = await asyncio.gather(*(self._one(index, act, limit_s, what) for index in indices))
        return {index: e for index, e in zip(indices, failures, strict=True) if e is not None}

    async def _one(
        self, index: int, act: Callable[[int], Coroutine[Any, Any, None]], limit_s: float | None, what: str
    ) -> EngineError | None:
        name = self.name(index)
        lost = asyncio.create_task(self.lost[index].wait())
        done = asyncio.create_task(in_time(act(index), limit_s, name, what))
        try:
            await asyncio.wait([done, lost], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return EngineTimeout(f"{name} was taken out")
            done.result()
        except EngineError as e:
            return e
        except asyncio.CancelledError:
            if limit_s is not None and not done.done():
                self.take_out({index: EngineError(f"{name} was left in the middle: it did not {what} yet")})
            raise
        finally:
            lost.cancel()
            done.cancel()
            await asyncio.gather(lost, done, return_exceptions=True)
        return None
