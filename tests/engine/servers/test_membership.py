"""The laws of dispatch and membership, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollover.engine.servers.dispatch import AFFINITY_SLACK, Dispatch
from rollover.engine.servers.membership import Health, Membership


def pool(*capacities: int) -> Membership:
    state = Membership([f"e{i}" for i in range(len(capacities))], capacities, retry_after_s=1.0, max_retry_after_s=60.0)
    for i, capacity in enumerate(capacities):
        state.admit(i, capacity)
    return state


def test_calls_of_different_prompts_fill_members_in_proportion_to_their_room() -> None:
    state = pool(8, 4, 4)
    dispatch = Dispatch(state)
    for i in range(16):
        dispatch.assign(f"p{i}")
    assert [m.load for m in state.members] == [8, 4, 4]


def test_siblings_stay_together_until_that_unbalances() -> None:
    state = pool(8, 8)
    dispatch = Dispatch(state)
    placed = [dispatch.assign("p") for _ in range(8)]
    assert placed[:3] == [0, 0, 0]
    assert abs(state.members[0].share - state.members[1].share) <= AFFINITY_SLACK + 1 / 8


def test_a_sibling_goes_elsewhere_when_its_home_is_down() -> None:
    state = pool(8, 8)
    dispatch = Dispatch(state)
    assert dispatch.assign("p") == 0
    state.take_out(0, "gone", now_s=0.0)
    assert dispatch.assign("p") == 1


@pytest.mark.parametrize(("failures", "wait_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (7, 60.0), (2000, 60.0)])
def test_the_time_between_attempts_doubles_up_to_a_bound(failures: int, wait_s: float) -> None:
    state = pool(1)
    for _ in range(failures):
        state.take_out(0, "gone", now_s=100.0)
    assert state.members[0].retry_s == 100.0 + wait_s


def test_one_late_probe_is_forgiven_unless_a_call_had_failed() -> None:
    state = pool(1, 1)
    assert not state.late(0, "slow", 0.0)
    assert state.late(0, "slow", 0.0)
    state.suspect(1, "a call failed")
    assert state.late(1, "slow", 0.0)
    assert state.why_none() == "e0: slow; e1: slow"


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60))
def test_no_member_is_overfull_while_another_has_room(capacities: list[int], num_calls: int) -> None:
    state = pool(*capacities)
    dispatch = Dispatch(state)
    for i in range(min(num_calls, sum(capacities))):
        dispatch.assign(f"p{i % 3}")
        assert all(m.load <= m.capacity for m in state.members)


class Machine(RuleBasedStateMachine):
    """Any order of events: loads are what was assigned and not released, calls go to members that are up."""

    @initialize(capacities=st.lists(st.integers(1, 6), min_size=1, max_size=4))
    def start(self, capacities: list[int]) -> None:
        self.state = pool(*capacities)
        self.dispatch = Dispatch(self.state)
        self.open: list[int] = []
        self.now_s = 0.0

    def index(self, data: Any) -> int:
        return int(data.draw(st.integers(0, len(self.state.members) - 1)))

    @rule(key=st.sampled_from("abc"))
    def assign(self, key: str) -> None:
        up = [m.name for m in self.state.members if m.health is Health.UP]
        index = self.dispatch.assign(key)
        assert (index is None) == (not up)
        if index is not None:
            assert self.state.members[index].name in up
            self.open.append(index)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.dispatch.release(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @rule(data=st.data())
    def suspect(self, data: Any) -> None:
        index = self.index(data)
        was_down = self.state.is_down(index)
        self.state.suspect(index, "a call failed")
        assert self.state.is_down(index) == was_down
        assert self.state.members[index].health is not Health.UP

    @rule(data=st.data())
    def late(self, data: Any) -> None:
        index = self.index(data)
        out = self.state.late(index, "late", self.now_s)
        assert self.state.is_down(index) >= out

    @rule(data=st.data())
    def take_out(self, data: Any) -> None:
        index = self.index(data)
        self.now_s += 1.0
        self.state.take_out(index, "gone", self.now_s)
        member = self.state.members[index]
        assert self.now_s + 1.0 <= member.retry_s <= self.now_s + 60.0

    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        index = self.index(data)
        self.state.admit(index, self.state.members[index].capacity)
        assert index in self.state.up

    @invariant()
    def loads_are_the_open_calls(self) -> None:
        if hasattr(self, "state"):
            assert [m.load for m in self.state.members] == [self.open.count(i) for i in range(len(self.state.members))]


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMembership = Machine.TestCase
