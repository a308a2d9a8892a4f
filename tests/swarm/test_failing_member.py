"""A member at which calls fail holds nobody up, as long as another does better; what fails everywhere is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from rollover.swarm.coordinator.machine.blame import NUM_REMEMBERED, Blame
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Changed, Deliver, Effect, Fail
from rollover.swarm.wire.messages import Assign, CallFailed
from tests.swarm.kit import LENGTH, ModelWorker, assert_ranked, request, response
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


@pytest.mark.parametrize(
    ("num_tokens", "reason", "stops", "said"),
    [
        (0, "length", (), f"ended g0.0#0. for its length after 0 tokens, but {LENGTH} were requested"),
        (3, "length", (), f"ended g0.0#0. for its length after 3 tokens, but {LENGTH} were requested"),
        (0, "stop", (), "says that g0.0#0. reached a stop token, but sent no token"),
        (3, "stop", (100_000,), "but its stop tokens are [100000]"),
        (3, "abort", (), "stopped g0.0#0. after 3 tokens without being asked to"),
    ],
)
def test_an_end_that_cannot_have_come_is_a_failure_of_the_member_that_claims_it(
    num_tokens: int, reason: str, stops: tuple[int, ...], said: str
) -> None:
    """The response keeps its tokens and continues elsewhere; no such answer can end the run while another worker does
    better."""
    hub = coordinator()
    liar, good = member(hub, "liar", 100.0, room=8), member(hub, "good", 1.0, room=2)
    asked = request("g0.0")
    asked = replace(asked, params=replace(asked.params, stop_token_ids=stops))
    assert given(hub.opened(asked), liar, good) is liar
    liar.decode("g0.0#0.", num_tokens)
    claim = liar.piece(liar.calls["g0.0#0."], 0, num_tokens, 0, reason)
    effects = hub.received(liar.lease, claim, 1.0)
    delivered = [e.piece for e in effects if isinstance(e, Deliver)]
    assert [(p.token_ids, p.finish_reason) for p in delivered] == (
        [(response("g0.0.", 0, num_tokens), None)] if num_tokens else []
    )
    assert failed(effects) == [("g0.0#0.", True)]
    assert said in hub.members["liar"].last_error
    assert given(hub.opened(request("g0.0", 1, num_done=num_tokens)), liar, good) is good
    assert_ranked(hub)


@pytest.mark.parametrize("claimed", [-5, 0, 7, 30, 10**12])
def test_a_member_can_claim_no_more_prefill_than_there_was_to_do(claimed: int) -> None:
    hub = coordinator()
    worker = member(hub, "a", 1.0, room=2)
    assert given(hub.opened(request("g0.0", num_done=30)), worker) is worker
    first, second = decoded(worker, "g0.0#0.", 4), decoded(worker, "g0.0#0.", 2)
    said = [structs.replace(piece, num_prefilled_tokens=claimed) for piece in (*first, *second)]
    pieces = [e.piece for message in said for e in hub.received(worker.lease, message, 1.0) if isinstance(e, Deliver)]
    assert [p.num_prefilled_tokens for p in pieces] == [min(max(claimed, 0), 30), 0]


def test_the_only_member_is_not_spared_so_that_the_run_says_what_is_wrong() -> None:
    hub, alone = coordinator(), ModelWorker("alone", room=4)
    join(hub, alone)
    for number in range(4):
        (assign,) = sent(hub.opened(request("g0.0", number)), Assign)
        alone.got(assign)
        assert failed(fail(hub, alone, assign.call_id, 1.0)) == [(assign.call_id, False)]
    assert not hub.members["alone"].is_resting
