"""A member at which calls fail holds nobody up, as long as another does better; what fails everywhere is said."""

from __future__ import annotations

from rollover.swarm.coordinator.machine.blame import NUM_REMEMBERED, Blame
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Changed, Effect, Fail
from rollover.swarm.wire.messages import Assign, CallFailed
from tests.swarm.kit import LENGTH, ModelWorker, assert_ranked, request
from tests.swarm.test_coordinator import beat, coordinator, decoded, join, sent
from tests.swarm.test_relief import given, member

OUT_OF_MEMORY = "the engine is out of memory"


def fail(hub: Coordinator, worker: ModelWorker, call_id: str, now_s: float) -> list[Effect]:
    worker.calls.pop(call_id)
    return hub.received(worker.lease, CallFailed(call_id=call_id, reason=OUT_OF_MEMORY), now_s)


def failed(effects: list[Effect]) -> list[tuple[str, bool]]:
    return [(e.call_id, e.is_displaced) for e in effects if isinstance(e, Fail)]


def test_what_fails_at_one_member_is_displaced_and_goes_to_others() -> None:
    hub = coordinator()
    broken, good = member(hub, "broken", 100.0, room=8), member(hub, "good", 1.0, room=2)
    for number in range(3):
        assert given(hub.opened(request(f"g{number}.0")), broken, good) is broken
    effects = fail(hub, broken, "g0.0#0.", 1.0)
    assert failed(effects) == [("g0.0#0.", True)]
    assert any(isinstance(e, Changed) and OUT_OF_MEMORY in e.what for e in effects)
    assert hub.members["broken"].last_error == f"broken: {OUT_OF_MEMORY}"
    assert failed(fail(hub, broken, "g1.0#0.", 1.0)) == [("g1.0#0.", True)]
    assert given(hub.opened(request("g0.0", 1)), broken, good) is good
    assert_ranked(hub)


def test_samples_that_failed_and_never_came_back_are_remembered_up_to_a_number() -> None:
    blame = Blame()
    for number in range(NUM_REMEMBERED + 10):
        assert blame.is_members(f"g{number}.0.", "broken")
    assert len(blame) == NUM_REMEMBERED
    newest = f"g{NUM_REMEMBERED + 9}.0."
    assert blame.is_members(newest, "broken") and not blame.is_members(newest, "good")
    assert not blame.is_members("g10.0.", "good"), "the oldest that is remembered"
    blame.forget(newest)
    assert blame.is_members(newest, "good") and len(blame) == NUM_REMEMBERED


def test_it_rests_for_twice_as_long_each_time_and_gets_one_call_at_a_time_until_it_decodes() -> None:
    hub = coordinator()
    broken, good = member(hub, "broken", 100.0, room=8), member(hub, "good", 1.0, room=1)
    assert given(hub.opened(request("g0.0")), broken, good) is broken
    fail(hub, broken, "g0.0#0.", 10.0)
    assert given(hub.opened(request("g1.0")), broken, good) is good
    for number in range(2, 6):
        assert sent(hub.opened(request(f"g{number}.0")), Assign) == []
    now_s, waited = 10.0, []
    for trial in range(3):
        began_s, assigned = now_s, []
        while not assigned:
            now_s += 0.5
            assigned = sent(hub.received(broken.lease, beat(int(now_s * 2)), now_s), Assign)
        waited.append(now_s - began_s)
        assert len(assigned) == 1, "one on trial"
        broken.got(assigned[0])
        if trial < 2:
            fail(hub, broken, assigned[0].call_id, now_s)
    assert waited == [1.0, 2.0, 4.0]
    (piece,) = decoded(broken, assigned[0].call_id, LENGTH - 1)
    hub.received(broken.lease, piece, now_s)
    assert hub.members["broken"].num_failures == 0
    assert len(sent(hub.received(broken.lease, beat(999), now_s), Assign)) == 1, "there is room again for all that wait"
    assert_ranked(hub)


def test_what_fails_at_a_second_member_too_is_a_failed_attempt() -> None:
    hub = coordinator()
    first, second = member(hub, "first", 100.0), member(hub, "second", 10.0)
    third = member(hub, "third", 1.0)
    assert given(hub.opened(request("g0.0")), first, second, third) is first
    assert failed(fail(hub, first, "g0.0#0.", 1.0)) == [("g0.0#0.", True)]
    assert given(hub.opened(request("g0.0", 1)), first, second, third) is second
    assert failed(fail(hub, second, "g0.0#1.", 1.0)) == [("g0.0#1.", False)]


def test_the_only_member_is_not_spared_so_that_the_run_says_what_is_wrong() -> None:
    hub, alone = coordinator(), ModelWorker("alone", room=4)
    join(hub, alone)
    for number in range(4):
        (assign,) = sent(hub.opened(request("g0.0", number)), Assign)
        alone.got(assign)
        assert failed(fail(hub, alone, assign.call_id, 1.0)) == [(assign.call_id, False)]
    assert not hub.members["alone"].is_resting
