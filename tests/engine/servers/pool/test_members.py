"""The laws of dispatch and of a member's health, without a call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.pool.members import AFFINITY_SLACK, Dispatch, Member, Members
from tests.engine.servers.pool.kit import Flaky


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


def pool(*capacities: int, clock: HandClock | None = None) -> Members:
    engines = [Flaky(f"e{i}", max_running=capacity) for i, capacity in enumerate(capacities)]
    members = Members(engines, clock or HandClock(), ServerConfig(launch=True, rejoin_max_interval_s=60.0))
    for member in members.all:
        members.admit(member)
    return members


def test_siblings_stay_together_until_that_unbalances() -> None:
    members = pool(8, 8)
    dispatch, (one, two) = Dispatch(members), members.all
    placed = [dispatch.assign("p") for _ in range(8)]
    assert placed[:3] == [one, one, one]
    assert abs(one.share - two.share) <= AFFINITY_SLACK + 1 / 8


@pytest.mark.parametrize(("failures", "wait_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (7, 60.0), (2000, 60.0)])
def test_the_time_between_attempts_doubles_up_to_a_bound(failures: int, wait_s: float) -> None:
    (member,) = pool(1).all
    for _ in range(failures):
        member.take_out("gone")
    assert member.retry_s == 100.0 + wait_s


def test_one_late_probe_is_forgiven_unless_a_call_had_failed() -> None:
    members = pool(1, 1)
    one, two = members.all
    one.late("slow")
    assert one.is_up
    one.late("slow")
    assert one.is_down
    two.suspect("a call failed")
    two.late("slow")
    assert two.is_down
    assert members.why_none() == "e0: slow; e1: slow"


class Machine(RuleBasedStateMachine):
    """Any order of events: loads are what was assigned and not released, calls go to members that are up with room."""

    @initialize(capacities=st.lists(st.integers(1, 6), min_size=1, max_size=4))
    def start(self, capacities: list[int]) -> None:
        self.clock = HandClock()
        self.members = pool(*capacities, clock=self.clock)
        self.dispatch = Dispatch(self.members)
        self.open: list[Member] = []

    def member(self, data: Any) -> Member:
        return data.draw(st.sampled_from(self.members.all))

    @rule(key=st.sampled_from("abc"))
    def assign(self, key: str) -> None:
        free = [member for member in self.members.up if member.num_calls < member.capacity]
        member = self.dispatch.assign(key)
        assert (member is None) == (not free)
        if member is not None:
            assert member in free
            self.open.append(member)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.dispatch.release(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @rule(data=st.data())
    def suspect(self, data: Any) -> None:
        member = self.member(data)
        was_down = member.is_down
        member.suspect("a call failed")
        assert member.is_down == was_down
        assert not member.is_up

    @rule(data=st.data())
    def late(self, data: Any) -> None:
        member = self.member(data)
        was_up = member.is_up
        member.late("late")
        assert member.is_down or was_up

    @rule(data=st.data())
    def take_out(self, data: Any) -> None:
        member = self.member(data)
        self.clock.time_s += 1.0
        member.take_out("gone")
        assert member.is_down and member.lost.is_set()
        assert self.clock.time_s + 1.0 <= member.retry_s <= self.clock.time_s + 60.0

    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        member = self.member(data)
        self.members.admit(member)
        assert member in self.members.up and not member.lost.is_set()

    @invariant()
    def loads_are_the_open_calls(self) -> None:
        if hasattr(self, "members"):
            assert [m.num_calls for m in self.members.all] == [self.open.count(m) for m in self.members.all]


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMembers = Machine.TestCase
