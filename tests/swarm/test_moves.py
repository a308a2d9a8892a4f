"""Calls that a slow member holds go on at faster ones, once these have nothing else to do."""

from __future__ import annotations

import pytest

from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Deliver, Effect, Fail, Send
from rollover.swarm.wire.messages import Assign, Release
from tests.swarm.kit import LENGTH, ModelWorker, assert_crowd_is_current, head, request, response
from tests.swarm.test_coordinator import TTL_S, beat, coordinator, decoded, decodes, join, sent


def member(hub: Coordinator, name: str, tokens_per_s: float, *, room: int = 4) -> ModelWorker:
    """A member whose speed is known."""
    worker = ModelWorker(name, room=room)
    join(hub, worker)
    hub.received(worker.lease, beat(mean_running=1.0, tokens_per_s=tokens_per_s), 0.0)
    return worker


def given(effects: list[Effect], *workers: ModelWorker) -> ModelWorker:
    """Hand the one assignment among the effects to its worker, which is returned."""
    (send,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Assign)]
    (worker,) = [w for w in workers if w.lease == send.lease]
    worker.got(send.message)
    return worker


def test_an_idle_fast_member_takes_over_the_call_of_a_slow_one() -> None:
    hub = coordinator()
    fast, slow = member(hub, "fast", 100.0, room=1), member(hub, "slow", 1.0)
    assert given(hub.opened(request("g0.0")), fast, slow) is fast
    assert given(hub.opened(request("g1.0")), fast, slow) is slow
    decodes(hub, slow, "g1.0#0.", 3)
    assert hub.move_calls(2.0) == [], "there is no room at the fast one"
    decodes(hub, fast, "g0.0#0.", LENGTH, 3.0)
    effects = hub.move_calls(4.0)
    (failed,) = [e for e in effects if isinstance(e, Fail)]
    assert failed.call_id == "g1.0#0." and "slow would have taken another" in failed.reason
    assert Send(slow.lease, Release(call_ids=("g1.0#0.",))) in effects and len(effects) == 2
    (late,) = decoded(slow, "g1.0#0.", 4)
    assert hub.received(slow.lease, late, 5.0) == [], "what it still says is of no use to anybody"
    assert given(hub.opened(request("g1.0", 1, num_done=3)), fast, slow) is fast
    (out,) = [e for e in decodes(hub, fast, "g1.0#1.", LENGTH, 6.0) if isinstance(e, Deliver)]
    assert out.chunk.token_ids == response("g1.0.", 3)
    assert hub.counters["moved_calls"] == 1 and not hub.members["slow"].distrust
    assert_crowd_is_current(hub)


def test_the_longest_calls_move_first_and_only_as_many_as_fit() -> None:
    hub = coordinator()
    fast = member(hub, "fast", 100.0, room=2)
    slow = [member(hub, f"slow{i}", speed) for i, speed in enumerate((1.0, 0.5, 0.25, 0.125))]
    busy = [given(hub.opened(request(f"b{i}")), fast, *slow) for i in range(2)]
    assert busy == [fast, fast]
    holders = {f"g{i}.0#0.": given(hub.opened(request(f"g{i}.0")), *slow) for i in range(16)}
    for i in range(2):
        decodes(hub, fast, f"b{i}#0.", LENGTH)
    moved = [e.call_id for e in hub.move_calls(2.0) if isinstance(e, Fail)]
    assert len(moved) == 2 and {holders[call_id].name for call_id in moved} == {"slow3"}


@pytest.mark.parametrize("why", ["worth it", "little to gain", "disconnected", "aborted"])
def test_a_call_is_moved_only_where_that_is_worth_it(why: str) -> None:
    hub = coordinator()
    fast, slow = member(hub, "fast", 100.0, room=1), member(hub, "slow", 30.0 if why == "little to gain" else 1.0)
    assert given(hub.opened(request("b0")), fast, slow) is fast
    assert given(hub.opened(request("g0.0")), fast, slow) is slow
    decodes(hub, fast, "b0#0.", LENGTH)
    if why == "disconnected":
        hub.disconnected(slow.lease, 1.0)
    if why == "aborted":
        hub.aborted(["g0.0#0."])
    moved = [e.call_id for e in hub.move_calls(2.0) if isinstance(e, Fail)]
    assert moved == (["g0.0#0."] if why == "worth it" else [])


def test_a_call_is_not_moved_to_a_member_whose_weights_it_does_not_accept() -> None:
    hub = coordinator()
    fast, slow = member(hub, "fast", 100.0), member(hub, "slow", 1.0)
    hub.published(head(1), 0.0)
    hub.received(slow.lease, slow.change(head(1)), 0.0)
    assert given(hub.opened(request("g0.0", least_version=1)), fast, slow) is slow
    assert hub.move_calls(1.0) == []
    hub.received(fast.lease, fast.change(head(1)), 2.0)
    assert [e.call_id for e in hub.move_calls(3.0) if isinstance(e, Fail)] == ["g0.0#0."]


def test_a_member_that_decodes_nothing_loses_its_calls_after_a_lease() -> None:
    hub = coordinator()
    mute, other = member(hub, "mute", 1000.0, room=1), member(hub, "other", 50.0)
    assert given(hub.opened(request("g0.0")), mute, other) is mute
    assert hub.move_calls(1.0) == [] and hub.move_calls(TTL_S - 1.0) == []
    decodes(hub, mute, "g0.0#0.", 1, TTL_S)
    assert hub.move_calls(TTL_S + 1.0) == [], "a token has come"
    assert hub.move_calls(2 * TTL_S - 1.0) == []
    (failed,) = [e for e in hub.move_calls(2 * TTL_S) if isinstance(e, Fail)]
    assert failed.call_id == "g0.0#0."
    assert hub.members["mute"].call_tokens_per_s == pytest.approx(1 / TTL_S)
    assert given(hub.opened(request("g0.0", 1, num_done=1)), mute, other) is other, "it is known to be slow now"
    assert_crowd_is_current(hub)


def test_waiting_for_a_member_that_decodes_nothing_is_bounded() -> None:
    hub = coordinator(exact=True)
    mute, other = member(hub, "mute", 1000.0, room=1), member(hub, "other", 50.0)
    assert given(hub.opened(request("g0.0")), mute, other) is mute
    assert hub.opened(request("g1.0")) == [], "mute would be done with both before the other is with one"
    assert sent(hub.received(mute.lease, beat(2, mean_running=1.0, tokens_per_s=1000.0), 0.3), Assign) == []
    assert given(hub.received(other.lease, beat(2), 0.5), mute, other) is other, "that would have taken it 0.4 s"
    assert hub.move_calls(1.0) == []
    assert [e.call_id for e in hub.move_calls(TTL_S + 1.0) if isinstance(e, Fail)] == ["g0.0#0."]
    assert_crowd_is_current(hub)


def test_the_calls_of_a_check_stay_where_they_are() -> None:
    hub = coordinator()
    fast, slow = member(hub, "fast", 100.0), member(hub, "slow", 1.0)
    assert given(hub.opened(request("check"), only="slow"), fast, slow) is slow
    assert hub.move_calls(1.0) == []


def test_a_call_that_stood_still_moves_as_soon_as_there_is_room() -> None:
    hub = coordinator()
    mute, other = member(hub, "mute", 1000.0, room=1), member(hub, "other", 50.0, room=1)
    assert given(hub.opened(request("g0.0")), mute, other) is mute
    assert given(hub.opened(request("g1.0")), mute, other) is other
    for seconds in range(100):
        assert hub.move_calls(float(seconds)) == []
    decodes(hub, other, "g1.0#0.", LENGTH, 100.0)
    assert [e.call_id for e in hub.move_calls(101.0) if isinstance(e, Fail)] == ["g0.0#0."]


def test_the_time_without_a_connection_is_no_silence() -> None:
    hub = coordinator()
    away, other = member(hub, "away", 1000.0, room=1), member(hub, "other", 50.0)
    assert given(hub.opened(request("g0.0")), away, other) is away
    hub.disconnected(away.lease, 1.0)
    join(hub, away, TTL_S)
    assert hub.move_calls(TTL_S + 1.0) == []
    assert [e.call_id for e in hub.move_calls(2 * TTL_S) if isinstance(e, Fail)] == ["g0.0#0."]
