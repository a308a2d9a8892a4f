"""The placing rule: the fastest member with room that is in time gets a call; else it waits if that is sooner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.swarm.coordinator.machine.placing.forecast import Deadline
from rollover.swarm.coordinator.machine.placing.rule import NUM_PROBES, CallFacts, Crowd, MemberFacts, choose, pause_s

Members = dict[str, MemberFacts]
NEWEST = 3


def member(
    speed: float | None = 10.0, running: int = 0, room: int = 8, version: int = 0, **changes: Any
) -> MemberFacts:
    return MemberFacts(version=version, num_running=running, max_running=room, tokens_per_s=speed, **changes)


def call(tokens: float = 100.0, **changes: Any) -> CallFacts:
    return CallFacts(**{"least_version": 0, "tokens_left": tokens, "mean_tokens_left": 50.0, **changes})


def crowd_of(members: Members) -> Crowd:
    crowd = Crowd()
    for name, facts in members.items():
        crowd.put(name, facts)
    return crowd


def chosen(members: Members, asked: CallFacts, *, age_s: float = 0.0) -> str | None:
    newest = max((m.version for m in members.values()), default=0)
    return choose(crowd_of(members), asked, newest=newest, age_s=age_s)


def due(left_s: float, *, start: int = 0, per_version_s: float = 0.0) -> Deadline:
    return Deadline(due_version=9, left_s=left_s, start_version=start, per_version_s=per_version_s)


def test_a_call_waits_for_a_busy_member_that_will_finish_it_sooner() -> None:
    """The server begins after 50 / (8 x 50) s, and then needs 2 s; the phone needs 100 s."""
    members = {"phone": member(1.0), "server": member(50.0, running=8)}
    assert chosen(members, call()) is None
    assert chosen(members, call(horizon_s=100.0)) == "phone", "there is work for longer than it needs"
    assert chosen(members, call(horizon_s=99.9)) is None
    assert chosen(members, call(horizon_s=math.inf)) == "phone"
    assert chosen(members, call(mean_tokens_left=1e5)) == "phone", "the server is busy for 250 s"


def test_a_group_starts_at_a_member_whose_weights_leave_it_the_time() -> None:
    members = {"old": member(20.0, version=6), "new": member(4.0, version=7)}
    first = call(least_version=6, deadline=due(30.0, start=7, per_version_s=20.0))
    assert chosen(members, first) == "old", "5 s of 10"
    first = call(least_version=6, deadline=due(30.0, start=7, per_version_s=26.0))
    assert chosen(members, first) == "new", "25 s of 30; under the old weights 4 s are left"
    assert chosen(members, call(least_version=6, deadline=due(30.0))) == "old", "a started group has its version"
    assert chosen({"old": members["old"]}, first) == "old", "no other member is there"


def test_a_member_of_unknown_speed_is_tried_with_a_few_calls() -> None:
    known = member(10.0, running=8)
    members = [{"fresh": member(None, running=n), "known": known} for n in (0, NUM_PROBES - 1, NUM_PROBES)]
    assert [chosen(each, call(horizon_s=math.inf)) for each in members] == ["fresh", "fresh", None]


SPEEDS = st.sampled_from([None, 1.0, 4.0, 16.0, 64.0]) | st.floats(0.1, 100.0)
FACTS = st.builds(
    MemberFacts,
    version=st.integers(0, NEWEST),
    num_running=st.integers(0, 4),
    max_running=st.integers(0, 4),
    tokens_per_s=SPEEDS,
    prepare_s=st.sampled_from([None, 1.0, 20.0]),
)
CALLS = st.builds(
    CallFacts,
    least_version=st.integers(0, NEWEST),
    tokens_left=st.just(100.0) | st.floats(1, 1e4),
    mean_tokens_left=st.just(50.0),
    horizon_s=st.sampled_from([0.0, 5.0, 50.0, math.inf]),
    deadline=st.none()
    | st.builds(
        due,
        st.sampled_from([0.0, 3.0, 30.0, math.inf]),
        start=st.just(NEWEST),
        per_version_s=st.sampled_from([0.0, 5.0]),
    ),
    waited_s=st.sampled_from([0.0, 10.0]),
)


def has_room(m: MemberFacts, asked: CallFacts) -> bool:
    return m.version >= asked.least_version and m.num_running < m.places


def plainly(members: Members, asked: CallFacts, age_s: float) -> set[str | None]:
    """Apply the rule to one member after another. Returns the members that it could choose."""

    def ready_s(m: MemberFacts) -> float:
        if m.version >= asked.least_version:
            return 0.0
        awaited = m.version < NEWEST and m.prepare_s is not None and age_s <= 2 * m.prepare_s + 1
        return max(0.0, m.prepare_s - age_s) if awaited and m.prepare_s is not None else math.inf

    def speed(m: MemberFacts) -> float:
        return m.tokens_per_s or typical

    def ends_s(m: MemberFacts) -> float:
        turn_s = 0.0 if m.num_running < m.places else asked.mean_tokens_left / (max(1, m.num_running) * speed(m))
        return max(ready_s(m), turn_s) + asked.tokens_left / speed(m)

    def firsts(names: Iterable[str]) -> set[str | None]:
        ranked = {n: (ends_s(members[n]), members[n].num_running / members[n].places) for n in names}
        return {n for n, key in ranked.items() if key == min(ranked.values())}

    known = sorted(m.tokens_per_s for m in members.values() if m.tokens_per_s)
    typical = known[len(known) // 2] if known else 1.0
    free = {n: m for n, m in members.items() if has_room(m, asked)}
    if not free:
        return {None}
    if in_time := [n for n, m in free.items() if ends_s(m) <= asked.limit_s(m.version)]:
        return firsts(in_time)
    best_s = min(map(ends_s, free.values()))
    is_sooner = any(ends_s(m) < best_s for m in members.values() if m.max_running > 0)
    return {None} if is_sooner and asked.waited_s < best_s else firsts(free)


@given(
    st.dictionaries(st.sampled_from("abcdef"), FACTS | st.none(), max_size=6),
    st.lists(st.tuples(st.sampled_from("abcdef"), FACTS | st.none()), max_size=6),
    CALLS,
    st.sampled_from([0.0, 2.0, 30.0]),
)
@settings(max_examples=500, deadline=None)
def test_of_any_crowd_the_rule_chooses_as_by_looking_at_each_member(
    before: dict[str, MemberFacts | None], changes: list[tuple[str, MemberFacts | None]], asked: CallFacts, age_s: float
) -> None:
    crowd, facts = Crowd(), dict[str, MemberFacts | None]()
    for name, each in [*before.items(), *changes]:
        crowd.put(name, each)
        crowd.typical(), crowd.drain_s(1.0)
        facts[name] = each
    members = {name: each for name, each in facts.items() if each is not None}
    assert choose(crowd, asked, newest=NEWEST, age_s=age_s) in plainly(members, asked, age_s)
    assert crowd.has_room(asked.least_version) == any(has_room(m, asked) for m in members.values())
    speed = sum(m.max_running * m.tokens_per_s for m in members.values() if m.tokens_per_s)
    assert crowd.drain_s(100.0) == pytest.approx(100.0 / speed if speed else math.inf)


def test_a_member_is_set_aside_for_twice_as_long_each_time() -> None:
    assert [pause_s(n) for n in (0, 1, 2, 5, 6, 10**6)] == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0]
