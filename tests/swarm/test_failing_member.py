"""A member at which calls fail is set aside, and its failures do not count as failures of its calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from rollover.swarm.coordinator.machine import assignments
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Changed, Deliver, Effect, Fail
from rollover.swarm.wire.messages import Adopt, Assign, CallFailed, Leaving
from tests.swarm.kit import LENGTH, TTL_S, ModelWorker, assert_crowd_is_current, request, response
from tests.swarm.test_coordinator import beat, coordinator, decoded, decodes, holding, join, sent
from tests.swarm.test_moves import given, member

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
    assert any(isinstance(e, Changed) and e.is_warning and OUT_OF_MEMORY in e.what for e in effects)
    assert hub.members["broken"].last_error == f"broken: {OUT_OF_MEMORY}"
    assert failed(fail(hub, broken, "g1.0#0.", 1.0)) == [("g1.0#0.", True)]
    assert given(hub.opened(request("g0.0", 1)), broken, good) is good
    assert_crowd_is_current(hub)


def test_a_bounded_number_of_failed_samples_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "NUM_REMEMBERED", 2)
    hub = coordinator()
    broken = member(hub, "broken", 100.0, room=8)
    for number in range(3):
        given(hub.opened(request(f"g{number}.0")), broken)
    for number in range(3):
        fail(hub, broken, f"g{number}.0#0.", 1.0)
    assert [*hub._assignments._failed] == ["g1.0.", "g2.0."]


def test_a_failing_member_gets_one_call_at_a_time_until_it_decodes() -> None:
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
    decodes(hub, broken, assigned[0].call_id, LENGTH - 1, now_s)
    assert hub.members["broken"].num_failures == 0
    assert len(sent(hub.received(broken.lease, beat(999), now_s), Assign)) == 1, "there is room again for all that wait"
    assert_crowd_is_current(hub)


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
def test_an_impossible_end_fails_its_member(num_tokens: int, reason: str, stops: tuple[int, ...], said: str) -> None:
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
    delivered = [e.chunk for e in effects if isinstance(e, Deliver)]
    assert [(p.token_ids, p.finish_reason) for p in delivered] == (
        [(response("g0.0.", 0, num_tokens), None)] if num_tokens else []
    )
    assert failed(effects) == [("g0.0#0.", True)]
    assert said in hub.members["liar"].last_error
    assert given(hub.opened(request("g0.0", 1, num_done=num_tokens)), liar, good) is good
    assert_crowd_is_current(hub)


def test_the_calls_of_a_member_that_leaves_are_displaced() -> None:
    hub = coordinator()
    leaver, good = member(hub, "leaver", 100.0, room=8), member(hub, "good", 1.0, room=2)
    assert given(hub.opened(request("g0.0")), leaver, good) is leaver
    effects = hub.received(leaver.lease, Leaving(reason="stopped by its user"), 1.0)
    assert failed(effects) == [("g0.0#0.", True)] and hub.max_running == 2
    assert not any(isinstance(e, Changed) and e.is_warning for e in effects) and not hub.members["leaver"].num_failures
    assert given(hub.opened(request("g0.0", 1)), leaver, good) is good


def test_only_a_sample_that_is_lost_twice_without_a_token_is_at_fault() -> None:
    hub, found = coordinator(), list[bool]()
    worker = member(hub, "alone", 100.0)
    for number, num_decoded in enumerate((0, 0, 3, 0)):  # each time, its process dies and is started again
        assert given(hub.opened(request("g0.0", number)), worker) is worker
        decodes(hub, worker, f"g0.0#{number}.", num_decoded)
        worker = ModelWorker("alone")
        found += [is_displaced for _, is_displaced in failed(join(hub, worker))]
    assert found == [True, False, True, False]


def test_an_adopted_call_that_ends_at_its_earlier_limit_continues_elsewhere() -> None:
    hub, worker = coordinator(), holding((0, 12))
    join(hub, worker)
    asked = request("g0.0", 9, num_done=12)
    asked = replace(asked, params=replace(asked.params, max_new_tokens=LENGTH + 9))
    worker.got(sent(hub.opened(asked), Adopt)[0])
    worker.decode("g0.0#9.", LENGTH)
    effects = hub.received(worker.lease, worker.piece(worker.calls["g0.0#9."], 12, LENGTH, 0), 1.0)
    assert [e.chunk.finish_reason for e in effects if isinstance(e, Deliver)] == [None]
    assert failed(effects) == [("g0.0#9.", True)] and not hub.members["a"].num_failures


@pytest.mark.parametrize("claimed", [0, 7, 30, 10**12])
def test_a_member_can_claim_no_more_prefill_than_there_was_to_do(claimed: int) -> None:
    hub = coordinator()
    worker = member(hub, "a", 1.0, room=2)
    assert given(hub.opened(request("g0.0", num_done=30)), worker) is worker
    first, second = decoded(worker, "g0.0#0.", 4), decoded(worker, "g0.0#0.", 2)
    said = [structs.replace(piece, num_prefilled_tokens=claimed) for piece in (*first, *second)]
    pieces = [e.chunk for message in said for e in hub.received(worker.lease, message, 1.0) if isinstance(e, Deliver)]
    assert [p.num_prefilled_tokens for p in pieces] == [min(claimed, 30), 0]


def fails_all(hub: Coordinator, worker: ModelWorker, samples: list[str], until_s: int) -> list[tuple[float, bool]]:
    """Let a member fail every call, at once, while its failed calls are opened again. Returns the time of each failure,
    and whether it was displaced."""
    found, numbers = list[tuple[float, bool]](), dict.fromkeys(samples, 0)
    effects = [e for sample in samples for e in hub.opened(request(sample))]
    for half_s in range(2 * until_s):
        now_s = half_s / 2
        effects += hub.received(worker.lease, beat(half_s + 2), now_s)
        while effects:
            assigned, effects = sent(effects, Assign), []
            for assign in assigned:
                worker.got(assign)
                for call_id, is_displaced in failed(fail(hub, worker, assign.call_id, now_s)):
                    found.append((now_s, is_displaced))
                    sample = call_id.partition("#")[0]
                    numbers[sample] += 1
                    effects += hub.opened(request(sample, numbers[sample]))
    return found


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_worker_that_fails_all_calls_is_paused_while_others_are_away(num_samples: int) -> None:
    """The leases of the others have lapsed: the swarm waits for them, as it does without any worker."""
    hub = coordinator()
    good, broken = member(hub, "good", 1.0, room=8), member(hub, "broken", 100.0, room=1)
    hub.expire(0.0)
    hub.received(broken.lease, beat(1), TTL_S + 1.0)
    hub.expire(TTL_S + 1.0)
    assert not hub.members["good"].lease
    found = fails_all(hub, broken, [f"g{number}.0" for number in range(num_samples)], until_s=300)
    assert not [at_s for at_s, is_displaced in found if not is_displaced]
    assert [b - a for (a, _), (b, _) in pairwise(found)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert hub.members["broken"].last_error == f"broken: {OUT_OF_MEMORY}"
    assert len(sent(join(hub, good, 301.0), Assign)) == num_samples, "they continue where they can"


def test_a_lone_worker_that_fails_every_call_is_paused_too() -> None:
    hub = coordinator()
    found = fails_all(hub, member(hub, "alone", 100.0, room=2), ["g0.0", "g1.0"], until_s=60)
    assert not [at_s for at_s, is_displaced in found if not is_displaced]
    assert [at_s for at_s, _ in found] == [0, 0, 1, 3, 7, 15, 31]


def test_a_sample_that_fails_alone_at_the_only_worker_fails_for_good() -> None:
    """Else a prompt that no engine takes would keep its batch waiting for ever."""
    hub = coordinator()
    found = fails_all(hub, member(hub, "alone", 100.0), ["g0.0"], until_s=8)
    assert found == [(0.0, True), (1.0, False), (3.0, False), (7.0, False)]


def test_a_sample_that_fails_twice_at_a_decoding_member_is_at_fault() -> None:
    hub = coordinator()
    worker = member(hub, "alone", 100.0)
    for sample in ("g0.0", "g1.0"):
        assert given(hub.opened(request(sample)), worker) is worker
    assert failed(fail(hub, worker, "g0.0#0.", 1.0)) == [("g0.0#0.", True)]
    decodes(hub, worker, "g1.0#0.", 1)
    assert not hub.members["alone"].num_failures
    assert given(hub.opened(request("g0.0", 1)), worker) is worker
    assert failed(fail(hub, worker, "g0.0#1.", 2.0)) == [("g0.0#1.", False)]


def test_the_tokens_of_a_log_prob_check_are_no_recovery() -> None:
    hub = coordinator()
    worker = member(hub, "broken", 100.0)
    assert given(hub.opened(request("g0.0")), worker) is worker
    fail(hub, worker, "g0.0#0.", 1.0)
    assert given(hub.opened(request("check"), only="broken"), worker) is worker
    decodes(hub, worker, "check#0.", LENGTH)
    assert hub.members["broken"].num_failures == 1 and hub.members["broken"].is_set_aside
