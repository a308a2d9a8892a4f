"""Members that are kept in order get the same calls as by the plain rule, which looks at all of them."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollover.swarm.coordinator.machine.deadlines import Deadline
from rollover.swarm.coordinator.machine.dispatch import Work, choose, drain_s, finish_s, typical_speed
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.coordinator.machine.ranking import Ranking
from rollover.swarm.wire.messages import Ready

HEAD = 3
DEADLINES = st.builds(
    Deadline,
    due_version=st.just(HEAD + 2),
    left_s=st.sampled_from([0.0, math.inf]) | st.floats(0, 1e3),
    start_version=st.just(HEAD),
    per_version_s=st.just(0.0) | st.floats(0, 1e3),
)
SPEEDS = st.sampled_from([None, 1.0, 3.0, 3.0, 7.0, math.nextafter(7.0, 8.0), 50.0]) | st.floats(0.1, 100.0)


def ready(max_running: int) -> Ready:
    return Ready(max_running=max_running, max_context_tokens=64, seeded=True, number_format="float32")


class Members(RuleBasedStateMachine):
    """Members come, go, change and get calls; every so often a call is placed, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = Ranking(checks=False)
        self.members: dict[str, SwarmMember] = {}

    names = st.sampled_from([f"m{i}" for i in range(7)])

    @rule(
        name=names,
        version=st.integers(1, HEAD),
        speed=SPEEDS,
        room=st.integers(1, 6),
        prepare_s=st.none() | st.floats(0, 100),
    )
    def joins(self, name: str, version: int, speed: float | None, room: int, prepare_s: float | None) -> None:
        member = SwarmMember(name, is_connected=True, ready=ready(room), version=version)
        member.call_tokens_per_s, member.prepare_s = speed, prepare_s
        if name in self.members:
            member.calls = self.members[name].calls
        self.members[name] = member
        self.ranking.changed(member)

    @rule(name=names, num=st.integers(0, 6))
    def has_calls(self, name: str, num: int) -> None:
        if name in self.members:
            self.members[name].calls = {str(i) for i in range(num)}
            self.ranking.changed(self.members[name])

    @rule(name=names, is_over=st.booleans())
    def rests(self, name: str, is_over: bool) -> None:
        """A call has failed at it: it rests, and then has one call at a time."""
        if name in self.members:
            self.members[name].failed_a_call("out of memory", 0.0)
            self.members[name].is_resting = not is_over
            self.ranking.changed(self.members[name])

    @rule(name=names)
    def decodes(self, name: str) -> None:
        if name in self.members:
            self.members[name].decoded_tokens(1)
            self.ranking.changed(self.members[name])

    @rule(name=names)
    def goes(self, name: str) -> None:
        if name in self.members:
            self.members[name].is_connected = False
            self.ranking.changed(self.members[name])

    @rule(
        least=st.integers(0, HEAD),
        tokens=st.sampled_from([1.0, 1e-9]) | st.floats(1, 1e4),
        mean=st.floats(1, 1e4),
        horizon_s=st.sampled_from([0.0, math.inf]) | st.floats(0, 1e3),
        deadline=st.none() | DEADLINES,
        elapsed_s=st.floats(0, 200),
    )
    def a_call_is_placed(
        self, least: int, tokens: float, mean: float, horizon_s: float, deadline: Deadline | None, elapsed_s: float
    ) -> None:
        work = Work(
            least_version=least,
            remaining_tokens=tokens,
            mean_remaining_tokens=mean,
            horizon_s=horizon_s,
            deadline=deadline,
        )
        able = [m for m in self.members.values() if m.serves(checked=False) is not None]
        candidates = [m.candidate(HEAD, elapsed_s) for m in able]
        chosen = self.ranking.choose(work, HEAD, elapsed_s)
        assert chosen == choose(candidates, work)
        able_now = [c for c in candidates if c.version >= least or c.ready_s < math.inf]
        with_room = [
            (finish_s(c, work, typical_speed(able_now)), c.num_running / c.max_running, c.name)
            for c in able_now
            if c.room > 0 and c.version >= least
        ]
        finish, _, name = min(with_room, default=(math.inf, 0.0, ""))
        assert self.ranking.fastest(work, HEAD, elapsed_s) == ((finish, name) if with_room else None)
        assert self.ranking.drain_s(tokens) == drain_s(candidates, tokens)
        if chosen is not None:
            self.members[chosen].calls = self.members[chosen].calls | {"new"}
            self.ranking.changed(self.members[chosen])

    @invariant()
    def it_knows_how_much_they_hold_together(self) -> None:
        able = [m for m in self.members.values() if m.serves(checked=False) is not None]
        assert self.ranking.max_running == sum(m.ready.max_running for m in able if m.ready is not None)
        for least in range(HEAD + 2):
            fit = [m for m in able if m.version is not None and m.version >= least]
            assert self.ranking.has_room(least) == any(m.candidate(HEAD, 0.0).room > 0 for m in fit)


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@st.composite
def members(draw: st.DrawFn) -> list[SwarmMember]:
    """Members that may get calls, some of them busy, at rest, or about to have newer weights."""
    made = []
    for i in range(draw(st.integers(1, 6))):
        room, version = draw(st.integers(1, 3)), draw(st.integers(1, HEAD))
        member = SwarmMember(f"m{i}", is_connected=True, ready=ready(room), version=version)
        member.calls = {str(n) for n in range(draw(st.integers(0, room)))}
        member.call_tokens_per_s = draw(st.sampled_from([None, 1.0, 4.0, 16.0, 64.0]))
        member.prepare_s = draw(st.sampled_from([None, 1.0, 20.0]))
        if draw(st.integers(0, 4)) == 0:
            member.failed_a_call("out of memory", 0.0)
            member.is_resting = draw(st.booleans())
        made.append(member)
    return made


@given(
    crowd=members(),
    least=st.integers(1, HEAD),
    horizon_s=st.sampled_from([0.0, 5.0, 50.0, math.inf]),
    deadline=st.none()
    | st.builds(
        Deadline,
        due_version=st.just(HEAD + 2),
        left_s=st.sampled_from([0.0, 3.0, 10.0, 30.0, 150.0, math.inf]),
        start_version=st.just(HEAD),
        per_version_s=st.sampled_from([0.0, 5.0, 20.0]),
    ),
    elapsed_s=st.sampled_from([0.0, 2.0, 30.0]),
)
@settings(max_examples=1000, deadline=None)
def test_of_any_crowd_the_same_member_is_chosen_as_by_the_plain_rule(
    crowd: list[SwarmMember], least: int, horizon_s: float, deadline: Deadline | None, elapsed_s: float
) -> None:
    ranking = Ranking(checks=False)
    for member in crowd:
        ranking.changed(member)
    work = Work(
        least_version=least,
        remaining_tokens=100.0,
        mean_remaining_tokens=50.0,
        horizon_s=horizon_s,
        deadline=deadline,
    )
    candidates = [member.candidate(HEAD, elapsed_s) for member in crowd]
    assert ranking.choose(work, HEAD, elapsed_s) == choose(candidates, work)
    assert ranking.drain_s(100.0) == drain_s(candidates, 100.0)


def test_a_call_among_a_thousand_members_looks_at_few_of_them() -> None:
    ranking = Ranking(checks=False)
    looked_at = []

    class Watched(SwarmMember):
        def candidate(self, head_version: int, elapsed_s: float) -> object:  # type: ignore[override]
            looked_at.append(self.name)
            return super().candidate(head_version, elapsed_s)

    for i in range(1000):
        member = Watched(f"m{i:04d}", is_connected=True, ready=ready(4), version=1)
        member.call_tokens_per_s = 1.0 + i % 50
        ranking.changed(member)
    assert ranking.max_running == 4000
    looked_at.clear()
    work = Work(least_version=1, remaining_tokens=100.0, mean_remaining_tokens=50.0, horizon_s=math.inf)
    assert ranking.choose(work, 1, 0.0) == "m0049" and looked_at == []


def test_members_of_unknown_speed_are_compared_anew_only_when_one_is_not_awaited_any_more() -> None:
    ranking, looked_at = Ranking(checks=False), list[float]()

    class Watched(SwarmMember):
        def candidate(self, head_version: int, elapsed_s: float) -> object:  # type: ignore[override]
            looked_at.append(elapsed_s)
            return super().candidate(head_version, elapsed_s)

    for i, (version, speed, prepare_s) in enumerate([(2, None, None), (2, 3.0, None), (1, 8.0, 10.0), (1, 1.0, 20.0)]):
        member = Watched(f"m{i}", is_connected=True, ready=ready(4), version=version, prepare_s=prepare_s)
        member.call_tokens_per_s = speed
        ranking.changed(member)
    assert ranking.max_running == 16
    looked_at.clear()
    # Waited for until 21 s: the fastest, and until 41 s: the slowest. The median of the known speeds is 3, 3, and 3.
    work = Work(least_version=2, remaining_tokens=100.0, mean_remaining_tokens=50.0, horizon_s=math.inf)
    assert [ranking.choose(work, 2, at_s) for at_s in (1.0, 5.0, 21.0)] == ["m0"] * 3
    assert looked_at == [1.0] * 4
    assert [ranking.choose(work, 2, at_s) for at_s in (21.5, 30.0, 41.0)] == ["m0"] * 3
    assert looked_at == [1.0] * 4 + [21.5] * 4
    assert ranking.choose(work, 2, 2.0) == "m0", "another publication, say"
    assert looked_at[8:] == [2.0] * 4
