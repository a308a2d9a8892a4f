"""Has a few per cent of all responses decoded again by another member, and sends away who has lied.

::

    a call ends ──drawn by lot──▶ waiting ──a member of the same version is free──▶ decoded again ──▶ the same
                                     │                                                   │
                                     └── no member serves the version any more: missed   └──▶ dispute ──▶ verdict

A dispute is decided by a third member of the same version, or by the trainer before its next step, whichever is first.
While one of them may still decide, it stays open; else it is undecided, and no member is sent away.

What it keeps true: a member decodes one stretch again at a time, and only while no call waits for a member or after
the stretch has waited for ``PATIENCE_S``; nothing waits for a re-execution; no token of one is trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import takewhile

from rollover.clock import Clock
from rollover.engine.base import GenerateRequest
from rollover.engine.reexecution import Comparison, Dispute, Lot, Slack, Stretch, Verdict
from rollover.errors import EngineError
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Deliver, Effect
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.coordinator.trust.directed import DirectedEngine
from rollover.swarm.coordinator.trust.recorder import Recorder
from rollover.swarm.coordinator.trust.second_opinion import SecondOpinion

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds a stretch waits for members with room before it is given to one that has none; a tenth of the time
between two publications where that is less."""
MISSED_S = 300.0
"""Maximum seconds that it waits in total."""
TRAINER_S = 3600.0
"""Seconds for which a dispute waits for the trainer."""
DEADLINE_S = 600.0
"""Seconds that a member may take to decode one again."""
MAX_WAITING = 256
"""Stretches that wait; the oldest is missed for one more."""


@dataclass(slots=True)
class ReexecutionCounters:
    """The outcomes of the re-executions.

    Example: of ``num_drawn`` 40 stretches, 37 were the same, 2 were missed, and 1 was disputed and decided.
    """

    num_drawn: int = 0
    num_same: int = 0
    num_missed: int = 0
    """They could not be decoded again: no other member served their version, or it was lost."""
    num_disputed: int = 0
    num_undecided: int = 0
    """Disputes that could not be decided."""
    num_tokens: int = 0
    """Decoded for all that: the cost."""

    def named(self) -> dict[str, int]:
        """Return the counts under the names that users see."""
        return {f"reexecuted_{name.removeprefix('num_')}": count for name, count in asdict(self).items()}


@dataclass(slots=True)
class _Waiting:
    stretch: Stretch
    since_s: float
    failed: set[str]
    """Members that could not decode it again."""


@dataclass(slots=True)
class _OpenDispute:
    """A dispute that is undecided."""

    dispute: Dispute
    since_s: float
    asked: set[str]
    """Members that have no opinion, or are not asked."""
    trainer_was_asked: bool = False


class Reexecutions:
    """The re-executions of a swarm.

    Args:
        swarm: decodes calls with the member that is named.
        perform: carries out effects.
        share: of the samples that are decoded again.
        tolerance: mean difference of log-probs, in nats, that rounding explains. It is the run's: what a member says of
            its own number format earns it nothing.

    Example: with ``share`` 0.02 a member whose tokens are not those of its noise is found within 228 samples with a
    probability of 99 %.
    """

    def __init__(
        self,
        swarm: DirectedEngine,
        coordinator: Coordinator,
        perform: Callable[[Iterable[Effect]], None],
        clock: Clock,
        *,
        share: float,
        tolerance: float,
    ) -> None:
        self._swarm, self._coordinator, self._perform, self._clock = swarm, coordinator, perform, clock
        self.slack = Slack(logprobs=tolerance)
        self._recorder = Recorder(Lot(share))
        self._waiting: deque[_Waiting] = deque()
        self._open: list[_OpenDispute] = []
        self._busy: dict[str, asyncio.Task[None]] = {}
        """By member."""
        self._is_closed = False
        self._patience_s, self._version, self._version_s = PATIENCE_S, coordinator.head.version, clock.now_s()
        self.counters = ReexecutionCounters()

    # -- what the engine tells ----------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Return the number of stretches that wait or are decoded again, and of disputes."""
        return len(self._waiting) + len(self._busy) + len(self._open)

    def opened(self, request: GenerateRequest) -> None:
        """Record that a call has begun."""
        self._recorder.opened(request)

    def delivered(self, effect: Deliver) -> None:
        """Record that tokens have come out."""
        member = self._coordinator.members.get(effect.member)
        is_seeded = member is not None and member.declared is not None and member.declared.seeded
        self._recorder.delivered(effect, is_seeded=is_seeded)
        if effect.piece.finish_reason is not None:
            self.ended(effect.call_id)

    def ended(self, call_id: str) -> None:
        """Queue the recorded stretches of a call that has ended or failed, to be decoded again."""
        for stretch in (stretches := self._recorder.ended(call_id)):
            self.counters.num_drawn += 1
            self._waiting.append(_Waiting(stretch, self._clock.now_s(), {stretch.engine}))
        while len(self._waiting) > MAX_WAITING:
            self._missed(self._waiting.popleft())
        if stretches:
            asyncio.get_running_loop().call_soon(self.proceed)

    def proceed(self) -> None:
        """Begin what can be begun now."""
        if self._is_closed:
            return
        now_s = self._clock.now_s()
        self._watch_versions(now_s)
        if not self._waiting and not self._open:
            return
        able = cache(self._able)
        trusted = {name for name, member in self._coordinator.members.items() if not member.distrust}
        self._waiting = deque(waiting for waiting in self._waiting if waiting.stretch.engine in trusted)
        self._open = [each for each in self._open if {each.dispute.stretch.engine, each.dispute.second} <= trusted]
        for opened in list(self._open):
            is_hopeless = self._is_hopeless(opened.dispute.stretch.version, opened.asked, opened.since_s, now_s)
            if is_hopeless and (opened.trainer_was_asked or now_s - opened.since_s > TRAINER_S):
                self._undecided(opened)
            elif (name := self._chosen(able, opened.dispute.stretch, opened.asked, opened.since_s, now_s)) is not None:
                self._start(name, partial(self._third_opinion, name, opened))
        for waiting in list(self._waiting):
            stretch = waiting.stretch
            if self._is_hopeless(stretch.version, waiting.failed, waiting.since_s, now_s):
                self._waiting.remove(waiting)
                self._missed(waiting)
            elif (name := self._chosen(able, stretch, waiting.failed, waiting.since_s, now_s)) is not None:
                self._waiting.remove(waiting)
                self._start(name, partial(self._decoded_again, name, waiting))

    def disputes(self, version: int) -> list[Dispute]:
        """See ``DisputedMembers.disputes``."""
        new = [each for each in self._open if not each.trainer_was_asked and each.dispute.stretch.version <= version]
        for each in new:
            each.trainer_was_asked = True
        return [each.dispute for each in new]

    def decide(self, dispute: Dispute, verdict: Verdict, *, by: str = "the trainer") -> None:
        """Send away who has lied. ``NEITHER`` is the trainer's alone: rounding explains both."""
        if (opened := next((each for each in self._open if each.dispute is dispute), None)) is None:
            return  # another has decided it already
        if verdict is Verdict.NEITHER:
            self._undecided(opened)
            return
        self._open.remove(opened)
        liars = {
            Verdict.FIRST: (dispute.stretch.engine,),
            Verdict.SECOND: (dispute.second,),
            Verdict.BOTH: (dispute.stretch.engine, dispute.second),
        }[verdict]
        for name in liars:
            reason = (
                f"it does not sample what its seeds and weights produce: {dispute.about}; {by} decided against {name}"
            )
            self._perform(self._coordinator.distrust(name, reason))

    async def close(self) -> None:
        self._is_closed = True
        for task in self._busy.values():
            task.cancel()
        await asyncio.gather(*self._busy.values(), return_exceptions=True)

    # -- who is asked -------------------------------------------------------------------------------------------

    def _chosen(
        self,
        able: Callable[[int], Sequence[SwarmMember]],
        stretch: Stretch,
        without: Collection[str],
        since_s: float,
        now_s: float,
    ) -> str | None:
        """Return the member that is to decode a stretch again now: one that has room, while no call waits for it; after
        a while any."""
        is_patient = now_s - since_s < self._patience_s
        if is_patient and self._coordinator.num_waiting:
            return None
        members: Iterable[SwarmMember] = able(stretch.version)
        if is_patient:
            members = takewhile(lambda member: _room(member) > 0, members)
        return next((m.name for m in members if m.name not in self._busy and m.name not in without), None)

    def _watch_versions(self, now_s: float) -> None:
        if (version := self._coordinator.head.version) != self._version:
            self._version, self._version_s, lasted_s = version, now_s, now_s - self._version_s
            self._patience_s = min(PATIENCE_S, lasted_s / 10)

    def _able(self, version: int) -> list[SwarmMember]:
        """Return the members that could decode a stretch of this version again, those with most room first."""
        checked = self._coordinator.checks
        able = (
            member
            for member in self._coordinator.members.values()
            if member.serves(checked=checked) == version and member.ready is not None and member.ready.seeded
        )
        return sorted(able, key=lambda m: (_room(m), m.call_tokens_per_s or 0.0, m.name), reverse=True)

    def _is_hopeless(self, version: int, without: Collection[str], since_s: float, now_s: float) -> bool:
        """Return whether no other member will ever decode what this version makes."""
        if now_s - since_s > MISSED_S:
            return True
        is_there_another = False
        for member in self._coordinator.members.values():
            if member.is_connected and member.name not in without:
                if member.version is None or member.version <= version:
                    return False
                is_there_another = True
        return is_there_another

    def _start(self, name: str, work: Callable[[], Coroutine[object, object, None]]) -> None:
        async def guarded() -> None:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await work()
            finally:
                del self._busy[name]
                asyncio.get_running_loop().call_soon(self.proceed)

        self._busy[name] = asyncio.create_task(guarded())

    # -- what they say ------------------------------------------------------------------------------------------

    def _opinion(self, name: str, stretch: Stretch) -> SecondOpinion:
        return SecondOpinion(self._swarm, name, stretch, self.slack)

    async def _decoded_again(self, name: str, waiting: _Waiting) -> None:
        opinion = self._opinion(name, waiting.stretch)
        comparison: Comparison | None = None
        try:
            comparison = await opinion.comparison()
        except (EngineError, TimeoutError) as e:
            logger.info("%s did not decode again what %s has sampled: %s", name, waiting.stretch.engine, e)
        finally:
            self.counters.num_tokens += opinion.num_tokens
        if comparison is None or not comparison.answers:
            waiting.failed.add(name)
            self._waiting.appendleft(waiting)
            return
        if comparison.doubt is None:
            self.counters.num_same += 1
            self._coordinator.members[waiting.stretch.engine].num_verified += len(comparison.answers)
            return
        self.counters.num_disputed += 1
        dispute = Dispute(stretch=waiting.stretch, second=name, comparison=comparison, slack=opinion.slack)
        logger.warning("%s", dispute.about)
        self._open.append(_OpenDispute(dispute, self._clock.now_s(), {waiting.stretch.engine, name}))

    async def _third_opinion(self, name: str, opened: _OpenDispute) -> None:
        opened.asked.add(name)
        opinion = self._opinion(name, opened.dispute.stretch)
        try:
            found = await opinion.verdict(opened.dispute)
        except (EngineError, TimeoutError) as e:
            logger.info("%s could not decide: %s", name, e)
            return
        finally:
            self.counters.num_tokens += opinion.num_tokens
        if found in (Verdict.FIRST, Verdict.SECOND):  # one that agrees with neither may be wrong itself
            self.decide(opened.dispute, found, by=name)

    def _missed(self, waiting: _Waiting) -> None:
        self.counters.num_missed += 1
        self._coordinator.members[waiting.stretch.engine].num_missed += 1

    def _undecided(self, opened: _OpenDispute) -> None:
        self._open.remove(opened)
        self.counters.num_undecided += 1
        logger.warning("it cannot be decided who is right: %s", opened.dispute.about)


def _room(member: SwarmMember) -> int:
    return 0 if member.ready is None else member.ready.max_running - member.num_running
