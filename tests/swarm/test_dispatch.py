"""Which member gets a call: the fastest with room that is in time; else the call waits where that is sooner."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.coordinator.machine.deadlines import Deadline
from rollover.swarm.coordinator.machine.dispatch import NUM_PROBES, Candidate, Work, choose, finish_s, typical_speed
from rollover.swarm.coordinator.machine.remaining import WINDOW, RemainingTokens


def member(name: str, speed: float | None = 10.0, running: int = 0, room: int = 8, version: int = 0) -> Candidate:
    return Candidate(name=name, version=version, num_running=running, max_running=room, call_tokens_per_s=speed)


def work(tokens: float = 100.0, **changes: Any) -> Work:
    return Work(**{"least_version": 0, "remaining_tokens": tokens, "mean_remaining_tokens": 50.0, **changes})


def test_the_fastest_with_room_gets_it() -> None:
    assert choose([member("slow", 1.0), member("fast", 50.0)], work()) == "fast"


def test_equal_members_are_dealt_to_evenly() -> None:
    assert choose([member("a", running=3), member("b", running=2), member("c", running=3)], work()) == "b"


def test_a_call_waits_for_a_fast_member_that_will_finish_it_before_a_slow_one_with_room() -> None:
    phone, server = member("phone", 1.0), member("server", 50.0, running=8)
    assert finish_s(server, work(), 1.0) == 50 / (8 * 50) + 100 / 50
    assert choose([phone, server], work()) is None
    assert choose([phone, server], work(horizon_s=100.0)) == "phone", "there is work for longer than it needs"
    assert choose([phone, server], work(horizon_s=99.9)) is None
    assert choose([phone, server], work(horizon_s=math.inf)) == "phone"


def due(left_s: float, *, start: int = 0, per_version_s: float = 0.0) -> Deadline:
    return Deadline(due_version=9, left_s=left_s, start_version=start, per_version_s=per_version_s)


def test_a_member_that_will_not_finish_before_a_deadline_gets_what_has_a_later_one_or_none() -> None:
    phone, server = member("phone", 1.0), member("server", 50.0, running=8)
    assert choose([phone, server], work(deadline=due(99.9))) is None
    assert choose([phone, server], work(deadline=due(100.0))) == "phone"
    assert choose([phone, server], work(30.0, deadline=due(99.9))) == "phone", "short work"
    assert choose([phone, server], work(horizon_s=math.inf)) == "phone", "nobody waits for it"


def test_what_nobody_can_have_in_time_goes_to_whoever_has_it_first() -> None:
    phone, tablet, server = member("phone", 1.0), member("tablet", 4.0), member("server", 50.0, running=8)
    late = work(deadline=due(1.0))
    assert choose([phone, tablet], late) == "tablet"
    assert choose([phone, tablet, server], late) is None, "the server has it in 2.1 s, the tablet in 25 s"
    overloaded = member("server", 50.0, running=1, room=1)
    assert choose([phone, tablet, overloaded], work(deadline=due(1.0), mean_remaining_tokens=2e3)) == "tablet"


def test_a_deadline_that_all_members_together_would_miss_is_that_of_the_work_itself() -> None:
    """Where everything is due at once, slow members help."""
    phone, server = member("phone", 1.0), member("server", 50.0, running=8)
    assert choose([phone, server], work(deadline=due(0.0), horizon_s=100.0)) == "phone"
    assert choose([phone, server], work(deadline=due(0.0), horizon_s=99.9)) is None


def test_a_group_starts_at_a_member_whose_weights_leave_it_the_time() -> None:
    old, new = member("old", 20.0, version=6), member("new", 4.0, version=7)
    first = work(least_version=6, deadline=due(30.0, start=7, per_version_s=20.0))
    assert choose([old, new], first) == "old", "5 s of 10"
    first = work(least_version=6, deadline=due(30.0, start=7, per_version_s=26.0))
    assert choose([old, new], first) == "new", "25 s of 30; under the old weights 4 s are left"
    started = work(least_version=6, deadline=due(30.0))
    assert choose([old, new], started) == "old", "its version is fixed"
    assert choose([old], first) == "old", "nobody else is there"


def test_a_slow_member_gets_it_when_the_fast_ones_are_busy_for_longer() -> None:
    crowded = member("crowded", 2.0, running=1, room=1)
    assert choose([member("phone", 1.9), crowded], work(mean_remaining_tokens=500.0)) == "phone"


def test_older_weights_than_the_call_accepts_get_nothing() -> None:
    members = [member("old", 50.0, version=3), member("new", 1.0, version=4)]
    assert choose(members, work(least_version=4)) == "new"
    assert choose(members[:1], work(least_version=4)) is None
    assert choose([], work()) is None


def test_a_slow_member_that_has_the_weights_first_does_not_get_what_a_fast_one_will_finish_before() -> None:
    phone = member("phone", 1.0, version=4)
    server = Candidate(name="server", version=3, num_running=0, max_running=8, call_tokens_per_s=50.0, ready_s=30.0)
    assert choose([phone, server], work(least_version=4)) is None, "30 s of fetching and 2 s of decoding"
    assert choose([phone, server], work(10.0, least_version=4)) == "phone", "10 s at once"


def test_a_member_of_unknown_speed_is_tried_with_a_few_calls() -> None:
    fresh = [member("fresh", None, running=n) for n in (0, NUM_PROBES - 1, NUM_PROBES)]
    known = member("known", 10.0, running=8)
    assert [choose([each, known], work(horizon_s=math.inf)) for each in fresh] == ["fresh", "fresh", None]


@given(
    st.lists(
        st.builds(
            member,
            st.text("abc", min_size=1, max_size=3),
            st.none() | st.floats(0.1, 100),
            st.integers(0, 8),
            st.just(8),
            st.integers(0, 2),
        ),
        max_size=6,
        unique_by=lambda m: m.name,
    ),
    st.floats(1, 1e4),
    st.integers(0, 2),
    st.floats(0, 1e3),
    st.none()
    | st.builds(
        Deadline,
        due_version=st.just(9),
        left_s=st.floats(0, 1e3),
        start_version=st.just(2),
        per_version_s=st.floats(0, 500),
    ),
)
def test_whoever_gets_it_can_take_it_and_is_in_time_where_anybody_is(
    members: list[Candidate], tokens: float, least: int, horizon_s: float, deadline: Deadline | None
) -> None:
    asked = work(tokens, least_version=least, horizon_s=horizon_s, deadline=deadline)
    chosen = choose(members, asked)
    able = {m.name: m for m in members if m.version >= least}
    free = {name: m for name, m in able.items() if m.room > 0}
    takes_s = {name: finish_s(m, asked, typical_speed(able.values())) for name, m in able.items()}
    in_time = {name for name, m in free.items() if takes_s[name] <= asked.limit_s(m.version)}
    if in_time:
        assert chosen in in_time and takes_s[chosen] == min(takes_s[name] for name in in_time)
    elif free and min(takes_s[name] for name in free) <= min(takes_s.values()):
        assert chosen is not None and takes_s[chosen] == min(takes_s.values()), "nothing is refused by everybody"
    else:
        assert chosen is None
    if free:
        assert choose(members, replace(asked, horizon_s=math.inf)) is not None


def test_what_is_left_is_the_mean_of_the_longer_ones() -> None:
    lengths = RemainingTokens()
    assert lengths.expected(0, 100) == 50.0, "nothing is known: half of what the limit leaves"
    for length in (10, 20, 300):
        lengths.ended(length)
    assert lengths.expected(0, 512) == 110.0
    assert lengths.expected(15, 512) == 145.0
    assert lengths.expected(15, 100) == 85.0, "no more than the limit leaves"
    assert lengths.expected(300, 512) == 106.0


def test_old_lengths_are_forgotten() -> None:
    lengths = RemainingTokens()
    for length in [1000] * WINDOW + [10] * WINDOW:
        lengths.ended(length)
    assert lengths.expected(0, 2000) == 10.0
