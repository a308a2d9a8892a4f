"""The coordinator's laws, against model workers: each call once, tokens once and in order, versions as confirmed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from rollover.engine.base import FirstCall
from rollover.swarm.coordinator.machine.calls.call import SwarmCall, checked_chunk
from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Changed, CheckLogprobs, Deliver, Effect, Fail, Send, ServesAnew
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Adopt,
    Assign,
    CallFailed,
    Decoded,
    FromWorker,
    Goodbye,
    Head,
    Heartbeat,
    HeldCall,
    Hello,
    Leaving,
    NotServing,
    ProtocolError,
    Ready,
    Release,
    Serving,
    Welcome,
    pack_ids,
    pack_logprobs,
)
from rollover.token_bytes import join_bytes
from rollover.types import FinishReason
from tests.swarm.kit import (
    KEYS,
    LENGTH,
    SECRET,
    TTL_S,
    VOCAB,
    ModelCall,
    ModelWorker,
    coordinator,
    head,
    request,
    response,
)


def join(hub: Coordinator, worker: ModelWorker, now_s: float = 0.0) -> list[Effect]:
    """Connect a worker and let it be ready. Returns the effects behind its welcome."""
    rest = hub.connected(worker.name, worker.hello(), now_s)
    (welcome,) = sent(rest, Welcome)
    for message in worker.got(welcome):
        rest += hub.received(worker.lease, message, now_s)
    return rest


def with_a_member(room: int = 4) -> tuple[Coordinator, ModelWorker]:
    """Return a coordinator and its only member, which is ready."""
    hub, worker = coordinator(), ModelWorker("a", room=room)
    join(hub, worker)
    return hub, worker


def with_a_call(room: int = 4) -> tuple[Coordinator, ModelWorker]:
    """Return a coordinator whose only member has the call ``g0.0#0.``."""
    hub, worker = with_a_member(room)
    worker.got(sent(hub.opened(request("g0.0")), Assign)[0])
    return hub, worker


def sent(effects: list[Effect], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def beat(number: int = 1, **fields: Any) -> Heartbeat:
    idle: dict[str, Any] = {"num_running": 0, "tokens_per_s": 0.0, "mean_running": 0.0, "num_held": 0}
    return Heartbeat(number=number, **idle | fields)


def tokens(effects: list[Effect]) -> tuple[int, ...]:
    """Return the tokens that are delivered."""
    return tuple(token for e in effects if isinstance(e, Deliver) for token in e.chunk.token_ids)


def decoded(worker: ModelWorker, call_id: str, num_tokens: int) -> list[Decoded]:
    worker.decode(call_id, num_tokens)
    return worker.send(call_id)


def decodes(hub: Coordinator, worker: ModelWorker, call_id: str, num_tokens: int, now_s: float = 1.0) -> list[Effect]:
    """Let a worker decode some tokens of a call, which arrive."""
    return [e for piece in decoded(worker, call_id, num_tokens) for e in hub.received(worker.lease, piece, now_s)]


def test_in_pull_mode_nothing_is_assigned_to_a_member_with_older_weights() -> None:
    hub, worker = coordinator(exact=True), ModelWorker("a")
    join(hub, worker)
    hub.published(head(1), 0.0)
    assert hub.reserve("g0.0.", FirstCall(0, LENGTH), until_s=9.0) is None
    assert hub.opened(request("g0.0")) == []
    assert sent(hub.received(worker.lease, worker.change(head(1)), 1.0), Assign)[0].least_version == 1


def test_a_promise_names_the_version_that_the_member_serves_and_is_kept() -> None:
    hub, slow, fast = coordinator(), ModelWorker("slow", room=1), ModelWorker("fast", room=1)
    join(hub, slow)
    join(hub, fast)
    hub.published(head(1), 0.0)
    hub.received(fast.lease, fast.change(head(1)), 0.0)
    versions = [hub.reserve(f"g{i}.0.", FirstCall(0, LENGTH), until_s=60.0) for i in range(3)]
    assert sorted(versions[:2], key=str) == [0, 1] and versions[2] is None, "each has room for one"
    to = {v: e.lease for i, v in enumerate(versions[:2]) for e in hub.opened(request(f"g{i}.0")) if isinstance(e, Send)}
    assert to == {0: slow.lease, 1: fast.lease}


def test_a_promise_that_nobody_takes_up_lapses() -> None:
    hub, worker = coordinator(), ModelWorker("a", room=1)
    join(hub, worker)
    assert hub.reserve("g0.0.", FirstCall(0, LENGTH), until_s=5.0) == 0
    assert hub.reserve("g1.0.", FirstCall(0, LENGTH), until_s=5.0) is None
    hub.expire(6.0)
    assert hub.reserve("g1.0.", FirstCall(0, LENGTH), until_s=9.0) == 0


def test_silence_beyond_the_lease_fails_calls_and_fences_messages() -> None:
    hub, worker = with_a_call()
    assert hub.expire(TTL_S) == []
    effects = hub.expire(TTL_S + 0.1)
    assert [(e.call_id, e.is_displaced) for e in effects if isinstance(e, Fail)] == [("g0.0#0.", True)]
    assert sent(effects, Goodbye)[0].is_final is False
    assert hub.received(worker.lease, decoded(worker, "g0.0#0.", 5)[0], 20.0) == []
    assert hub.counters["fenced"] == 1 and hub.counters["expired_leases"] == 1 and hub.counters["late_tokens"] == 5


def test_a_heartbeat_keeps_the_lease_and_measures_speed() -> None:
    hub, worker = with_a_member()
    hub.received(worker.lease, beat(mean_running=4.0, tokens_per_s=100.0, num_held=7), 10.0)
    assert hub.expire(10.0 + TTL_S) == [] and hub.members["a"].lease
    assert hub.members["a"].call_tokens_per_s == 25.0 and hub.members["a"].num_held == 7


def test_speed_is_measured_per_call_over_the_time_with_calls() -> None:
    hub, worker = with_a_member()
    # 20 tokens per second and call: eight calls for a quarter of the time, of which one is left; then nothing; then two
    # that have just begun, with next to nothing decoded.
    for number, (running, mean, speed) in enumerate([(1, 2.0, 40.0), (0, 0.0, 0.0), (2, 0.02, 0.0)], start=1):
        beaten = beat(number, num_running=running, mean_running=mean, tokens_per_s=speed)
        hub.received(worker.lease, beaten, float(number))
        assert hub.members["a"].call_tokens_per_s == pytest.approx(20.0, rel=0.02)
    for number in range(4, 24):  # it has become twice as fast
        hub.received(worker.lease, beat(number, mean_running=3.0, tokens_per_s=120.0), float(number))
    assert hub.members["a"].call_tokens_per_s == pytest.approx(40.0, rel=0.01)


@pytest.mark.parametrize("lapses", [True, False])
def test_offers_after_a_lost_lease_are_accepted_and_counted_as_late(lapses: bool) -> None:
    hub, worker = with_a_call()
    decoded(worker, "g0.0#0.", LENGTH)  # which is lost on the way
    if lapses:
        (failed,) = [e for e in hub.expire(TTL_S + 1) if isinstance(e, Fail)]
        assert failed.call_id == "g0.0#0."
    else:
        hub.cut(["g0.0#0."])
    join(hub, worker, TTL_S + 2)
    assert hub.counters["late_accepted"] == 0, "nobody has asked for it yet"
    adopt = [e for e in hub.opened(request("g0.0", 1)) if isinstance(e, Send)]
    for effect in adopt:
        worker.got(effect.message)
    out = [e for m in worker.send("g0.0#1.") for e in hub.received(worker.lease, m, TTL_S + 3)]
    assert tokens(out) == response("g0.0.")
    assert (hub.counters["adopted_calls"], hub.counters["late_accepted"]) == (1, int(lapses))


def holding(*spans: tuple[int, int]) -> ModelWorker:
    """Return a worker that holds several calls of ``g0.0``, each between two positions, from a coordinator that was
    killed: the last acknowledgement of one was lost before it was given the sample again."""
    worker = ModelWorker("a", run_id="run", run_epoch=1, served={0: head(0)})
    for number, (start, end) in enumerate(spans):
        versions = dict.fromkeys(range(start, end), 0)
        call_id = f"g0.0#{number}."
        told = KEYS.sealed("a", "g0.0.")
        worker.calls[call_id] = ModelCall(call_id, told, start, end, start, end, 0, versions, is_over=True)
    return worker


@pytest.mark.parametrize("waits", [False, True], ids=["opened later", "waiting"])
@pytest.mark.parametrize(
    ("spans", "num_done", "adopted"),
    [
        pytest.param([(0, 12), (12, 30)], 12, 1, id="both would do"),
        pytest.param([(12, 30), (0, 12)], 12, 0, id="in the other order"),
        pytest.param([(0, 12), (12, 30)], 5, 0, id="the longer one begins too late"),
        pytest.param([(0, LENGTH), (12, 30)], 12, 0, id="one is whole"),
        pytest.param([(0, 12), (20, 30)], 15, None, id="neither will do"),
    ],
)
def test_of_several_calls_of_a_sample_the_furthest_is_resumed(
    spans: list[tuple[int, int]], num_done: int, adopted: int | None, waits: bool
) -> None:
    hub, worker = coordinator(), holding(*spans)
    effects = hub.opened(request("g0.0", 9, num_done=num_done)) if waits else []
    effects += join(hub, worker)
    effects += [] if waits else hub.opened(request("g0.0", 9, num_done=num_done))
    assert [a.held for a in sent(effects, Adopt)] == ([] if adopted is None else [f"g0.0#{adopted}."])
    assert len(sent(effects, Assign)) == (adopted is None)
    for effect in effects:
        if isinstance(effect, Send) and not isinstance(effect.message, Welcome):
            worker.got(effect.message)
    assert worker.calls.keys() == {"g0.0#9."} and hub.members["a"].held == {}
    out = decodes(hub, worker, "g0.0#9.", LENGTH)
    assert tokens(out) == response("g0.0.", num_done)
    assert hub.num_running == 0


def test_offers_of_a_sample_that_another_member_finishes_are_released() -> None:
    hub, other, worker = coordinator(), ModelWorker("b"), holding((0, 12), (12, 30))
    join(hub, other)
    other.got(sent(hub.opened(request("g0.0", 9)), Assign)[0])
    join(hub, worker)
    effects = decodes(hub, other, "g0.0#9.", LENGTH)
    assert [e.chunk.finish_reason for e in effects if isinstance(e, Deliver)] == [FinishReason.LENGTH]
    assert [(e.lease, e.message) for e in effects if isinstance(e, Send)] == [
        (worker.lease, Release(call_ids=(f"g0.0#{number}.",))) for number in range(2)
    ]


def test_an_offer_is_no_answer_to_a_call_that_is_not_journaled() -> None:
    """Such as that of an evaluation: an earlier process may have asked another prompt, or older weights, by this key."""
    hub, worker = coordinator(), holding((0, 12))
    join(hub, worker)
    effects = hub.opened(request("g0.0", 9, journaled=False))
    assert sent(effects, Release) == [Release(call_ids=("g0.0#0.",))]
    assert len(sent(effects, Assign)) == 1 and not sent(effects, Adopt)


CLAIMS = {
    "the name of a sample": "g0.0.",
    "what another member was told": KEYS.sealed("b", "g0.0."),
    "a seal of another sample": KEYS.sealed("a", "g1.0.").replace("g1", "g0"),
    "what another run tells": SampleKeys(b"another run").sealed("a", "g0.0."),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("waits", [False, True], ids=["opened later", "waiting"])
def test_a_member_obtains_no_sample_by_saying_that_it_holds_one(claim: str, waits: bool) -> None:
    hub, liar = coordinator(checks=True), ModelWorker("a", run_id="run", run_epoch=1, served={0: head(0)})
    if waits:
        hub.opened(request("g0.0"))
    held = HeldCall(call_id="guessed", sample_key=CLAIMS[claim], start=0, end=LENGTH, is_running=True)
    effects = hub.connected("a", structs.replace(liar.hello(), held=(held,)), 0.0)
    effects += [] if waits else hub.opened(request("g0.0"))
    assert sent(effects, Release) == [Release(call_ids=("guessed",))]
    assert not sent(effects, Adopt) and not sent(effects, Assign)
    assert (hub.num_waiting, hub.members["a"].calls, hub.members["a"].held) == (1, set(), {})


def test_a_member_resumes_no_call_that_was_made_to_look_at_it() -> None:
    hub, worker = coordinator(checks=True), ModelWorker("a")
    join(hub, worker)
    (assign,) = sent(hub.opened(request("check"), only="a"), Assign)
    assert assign.sample_key == "check." and KEYS.opened("a", assign.sample_key) is None
    hub.checked("a", 0)
    (assign,) = sent(hub.opened(request("g0.0")), Assign)
    assert KEYS.opened("a", assign.sample_key) == "g0.0."


@pytest.mark.parametrize("end", [LENGTH + 1, 2**31])
def test_a_call_that_is_longer_than_the_response_may_be_is_not_resumed(end: int) -> None:
    hub, worker = coordinator(), holding((0, LENGTH))
    hello = worker.hello()
    (held,) = hello.held
    hub.connected("a", structs.replace(hello, held=(structs.replace(held, end=end),)), 0.0)
    effects = hub.opened(request("g0.0", 9, num_done=4))
    assert not sent(effects, Adopt) and sent(effects, Release) == [Release(call_ids=("g0.0#0.",))]


def restarted(epoch: int, *, at: int, earlier: Iterable[tuple[int, Head]] = ()) -> Coordinator:
    """Return the coordinator of a run that was started again from a checkpoint."""
    run = RunIdentity(run_id="run", run_epoch=epoch, vocab_size=VOCAB, max_context_tokens=64)
    nothing, settings = Head(version=0, manifest=""), {"exact": False, "checks": False}
    hub = Coordinator(run, nothing, ttl_s=TTL_S, **settings, earlier=earlier, secret=SECRET)
    hub.published(head(at, epoch), 0.0)
    return hub


def of_epoch(epoch: int, *versions: int) -> list[tuple[int, Head]]:
    return [(epoch, head(version, epoch)) for version in versions]


def decoding_at(version: int) -> ModelWorker:
    """Return a worker that has decoded 30 tokens of ``g0.0`` in epoch 1 under a version."""
    first, worker = coordinator(), ModelWorker("a")
    if version:
        first.published(head(version), 0.0)
    join(first, worker)
    worker.got(sent(first.opened(request("g0.0")), Assign)[0])
    decoded(worker, "g0.0#0.", 30)
    return worker


@pytest.mark.parametrize(
    ("earlier", "epoch", "restart_at", "head_now", "kept"),
    [
        pytest.param(of_epoch(1, 2, 3), 2, 3, 3, True, id="resumed where it was"),
        pytest.param(of_epoch(1, 2, 3), 2, 3, 5, True, id="and has gone on"),
        pytest.param(of_epoch(1, 2, 3), 2, 2, 2, False, id="gone back"),
        pytest.param(of_epoch(1, 2, 3), 2, 2, 7, False, id="gone back, and its number is reached again"),
        pytest.param([*of_epoch(1, 2, 3), *of_epoch(2, 3, 4)], 3, 4, 4, True, id="a start was missed"),
        pytest.param([*of_epoch(1, 2, 3), *of_epoch(2, 2, 3)], 3, 3, 3, False, id="a start that went back was missed"),
        pytest.param(of_epoch(1, 2), 2, 3, 3, False, id="not on record"),
        pytest.param([], 2, 3, 3, False, id="nothing on record"),
    ],
)
def test_tokens_of_an_earlier_start_need_weights_that_the_run_has_kept(
    earlier: list[tuple[int, Head]], epoch: int, restart_at: int, head_now: int, kept: bool
) -> None:
    """The worker has served version 3 in epoch 1; a run that resumed from version 2 has made another version 3 since."""
    worker = decoding_at(3)
    later = restarted(epoch, at=restart_at, earlier=earlier)
    for version in range(restart_at + 1, head_now + 1):
        later.published(head(version, epoch), 0.0)
    effects = later.connected("a", worker.hello(), 0.0)
    assert sent(effects, Release) == ([] if kept else [Release(call_ids=("g0.0#0.",))])
    assert later.members["a"].served == ({3: head(3).manifest} if kept else {})
    assert bool(later.members["a"].held) is kept and not later.members["a"].distrust
    for effect in sent(effects, Release):
        worker.got(effect)
    worker.version, worker.served = head_now, {head_now: head(head_now, epoch)}
    for message in worker.start(sent(effects, Welcome)[0]):
        later.received(worker.lease, message, 0.0)
    opened = later.opened(request("g0.0", 1, num_done=12))
    assert (len(sent(opened, Adopt)), len(sent(opened, Assign))) == ((1, 0) if kept else (0, 1))


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_a_version_number_reached_again_confirms_no_earlier_version(is_confirmed: bool) -> None:
    """Epoch 1 was at version 7, the run resumed from version 5, and the worker says truly that it has served 7."""
    hub, worker = restarted(2, at=5, earlier=of_epoch(1, 5, 6, 7)), ModelWorker("a")
    worker.run_id, worker.run_epoch, worker.version = "run", 1, 7
    worker.served = {version: head(version) for version in (5, 6, 7)}
    (welcome,) = sent(hub.connected("a", worker.hello(), 0.0), Welcome)
    assert hub.members["a"].served == {5: head(5).manifest}
    worker.version, worker.served = 5, {5: head(5, 2)}
    for message in worker.got(welcome):
        hub.received(worker.lease, message, 0.0)
    for version in (6, 7):
        hub.published(head(version, 2), 0.0)
    worker.got(sent(hub.opened(request("g0.0")), Assign)[0])
    news = worker.change(head(7, 2))
    (piece,) = decoded(worker, "g0.0#0.", 10)
    assert piece.version == 7
    if is_confirmed:
        assert ServesAnew("a", news) in hub.received(worker.lease, news, 1.0)
    effects = hub.received(worker.lease, piece, 1.0)
    assert [len(e.chunk.token_ids) for e in effects if isinstance(e, Deliver)] == ([10] if is_confirmed else [])
    assert ("tokens of version 7, which it has not confirmed" in hub.members["a"].distrust) is not is_confirmed


@pytest.mark.parametrize("offset", [0, 5, 11], ids=["repeated", "overlapping", "after a gap"])
def test_tokens_that_are_not_the_next_ones_end_the_connection(offset: int) -> None:
    hub, worker = with_a_call()
    (first,) = decoded(worker, "g0.0#0.", 10)
    hub.received(worker.lease, first, 1.0)
    (goodbye, failed, *_) = hub.received(worker.lease, structs.replace(first, offset=offset), 1.0)
    reason = f"a broke the order of messages: it sent tokens from position {offset} on, but those from 10 are next"
    assert goodbye == Send(worker.lease, Goodbye(reason=reason, is_final=False))
    assert failed == Fail("g0.0#0.", reason, is_displaced=True) and hub.counters["out_of_order"] == 1
    assert hub.received(worker.lease, first, 1.0) == [], "it has no lease"
    (welcome,) = sent(hub.connected("a", worker.hello(), 2.0), Welcome)
    assert welcome.lease > worker.lease and not hub.members["a"].distrust


def test_what_was_lost_with_a_connection_is_told_after_the_next_greeting() -> None:
    """Lost were the acknowledgement of one call, and the abort and the end of another."""
    hub, worker = with_a_member()
    for sample in ("g0.0", "g1.0"):
        worker.got(sent(hub.opened(request(sample)), Assign)[0])
        hub.received(worker.lease, *decoded(worker, f"{sample}#0.", 10), 1.0)
    hub.journaled("g0.0.", 4)
    hub.disconnected(worker.lease, 2.0)
    (cut,) = hub.aborted(["g1.0#0."])
    assert isinstance(cut, Deliver) and cut.chunk.finish_reason is FinishReason.ABORT
    effects = [e.message for e in hub.connected("a", worker.hello(), 3.0) if isinstance(e, Send)]
    ack, adopt, abort = effects[1:]
    assert ack == Ack(call_id="g0.0#0.", offset=4)
    assert isinstance(adopt, Adopt) and (adopt.held, adopt.call_id, adopt.offset) == ("g0.0#0.", "g0.0#0.", 10)
    assert abort == Abort(call_ids=("g1.0#0.",))
    (over,) = sent(hub.journaled("g1.0.", 10), Ack)
    assert over == Ack(call_id="g1.0#0.", offset=10, is_over=True)


def test_journaled_tokens_are_acknowledged_and_the_last_ones_once() -> None:
    hub, worker = with_a_call()
    assert sent(decodes(hub, worker, "g0.0#0.", LENGTH), Ack) == []
    assert sent(hub.journaled("g0.0.", 10), Ack) == [Ack(call_id="g0.0#0.", offset=10)]
    assert sent(hub.journaled("g0.0.", LENGTH), Ack) == [Ack(call_id="g0.0#0.", offset=LENGTH, is_over=True)]
    assert sent(hub.journaled("g0.0.", LENGTH), Ack) == [], "there is nothing left to acknowledge"


def test_a_worker_that_was_started_again_has_lost_its_calls_and_versions() -> None:
    hub, _ = with_a_call()
    effects = hub.connected("a", ModelWorker("a").hello(), 1.0)
    assert [e.call_id for e in effects if isinstance(e, Fail)] == ["g0.0#0."]
    assert hub.members["a"].served == {}


def test_tokens_that_are_not_journaled_are_acknowledged_at_once() -> None:
    hub, worker = with_a_member()
    worker.got(sent(hub.opened(request("e0", journaled=False)), Assign)[0])
    assert sent(decodes(hub, worker, "e0#0.", LENGTH), Ack) == [Ack(call_id="e0#0.", offset=LENGTH, is_over=True)]


def test_an_abort_ends_at_once_what_no_member_has() -> None:
    hub = coordinator()
    hub.opened(request("g0.0"))
    (end,) = hub.aborted(["g0.0#0.", "unknown"])
    assert isinstance(end, Deliver) and end.chunk.finish_reason is FinishReason.ABORT and end.chunk.token_ids == ()
    assert hub.num_waiting == 0


def test_a_member_is_checked_before_it_gets_calls_under_each_version() -> None:
    hub, worker = coordinator(checks=True), ModelWorker("a")
    effects = join(hub, worker)
    assert CheckLogprobs("a", 0) in effects
    assert hub.opened(request("g0.0")) == []
    assert sent(hub.opened(request("check"), only="a"), Assign), "the check's own calls reach it"
    assert len(sent(hub.checked("a", 0), Assign)) == 1
    hub.published(head(1), 0.0)
    hub.received(worker.lease, worker.change(head(1)), 1.0)
    assert hub.opened(request("g0.1")) == []


LIES = {
    "version that was not confirmed": {"version": 3, "kv_version": 3},
    "version older than the call accepts": {"version": 0, "kv_version": 0},
    "token beyond the vocabulary": {"token_ids": pack_ids([VOCAB])},
    "log-prob above 0": {"logprobs": pack_logprobs([0.3])},
    "log-prob that is no number": {"logprobs": pack_logprobs([float("nan")])},
    "more log-probs than tokens": {"logprobs": pack_logprobs([-1.0, -1.0])},
    "bytes that are no numbers": {"token_ids": b"abc"},
    "tokens beyond the limit": {"offset": LENGTH},
    "tokens before the beginning": {"offset": -1},
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_true_ends_the_membership(lie: str) -> None:
    hub, worker = with_a_member()
    hub.published(head(1), 0.0)
    hub.received(worker.lease, worker.change(head(1)), 0.0)
    worker.got(sent(hub.opened(request("g0.0", least_version=1)), Assign)[0])
    (true,) = decoded(worker, "g0.0#0.", 1)
    effects = hub.received(worker.lease, structs.replace(true, **LIES[lie]), 1.0)
    assert [e.call_id for e in effects if isinstance(e, Fail)] == ["g0.0#0."]
    assert sent(effects, Goodbye)[0].is_final
    assert hub.max_running == 0 and hub.counters["workers_sent_away"] == 1
    again = hub.connected("a", ModelWorker("a").hello(), 2.0)
    assert sent(again, Goodbye)[0].is_final and not sent(again, Welcome)


def test_a_version_that_was_never_published_is_refused() -> None:
    for version, manifest in ((0, head(5).manifest), (7, head(7).manifest)):
        hub, worker = coordinator(), ModelWorker("a")
        join(hub, worker)
        effects = hub.received(worker.lease, Serving(version=version, manifest=manifest), 1.0)
        assert sent(effects, Goodbye)[0].is_final


def test_late_news_of_an_older_version_means_nothing() -> None:
    hub, worker = with_a_member()
    hub.published(head(1), 0.0)
    old = worker.serving()
    hub.received(worker.lease, worker.change(head(1)), 1.0)
    assert hub.received(worker.lease, old, 2.0) == []
    assert hub.members["a"].version == 1


def test_another_protocol_or_too_short_a_context_is_refused_for_good() -> None:
    hub = coordinator()
    effects = hub.connected("a", Hello(protocols=(99,), software="other"), 0.0)
    (bye,) = sent(effects, Goodbye)
    assert bye.is_final and f"speaks version {PROTOCOL}" in bye.reason and "99" in bye.reason
    worker = ModelWorker("b")
    worker.got(sent(hub.connected("b", worker.hello(), 0.0), Welcome)[0])
    short = Ready(max_running=4, max_context_tokens=63, seeded=True, number_format="float32")
    (bye,) = sent(hub.received(worker.lease, short, 0.0), Goodbye)
    assert bye.is_final and "63" in bye.reason and "64" in bye.reason


@pytest.mark.parametrize(("what", "setting"), [("kept", "rollout.top_p"), ("routes", "trainer.replay_routes")])
def test_a_worker_without_what_a_run_wants_beside_tokens_is_refused(what: str, setting: str) -> None:
    for gives, expected in ((False, True), (True, False)):
        hub, worker = coordinator(), ModelWorker("a")
        hub.run = replace(hub.run, **{f"returns_{what}": True})
        worker.got(sent(hub.connected("a", worker.hello(), 0.0), Welcome)[0])
        able = {f"gives_{what}": gives}
        ready = Ready(max_running=4, max_context_tokens=64, seeded=True, number_format="float32", **able)
        byes = sent(hub.received(worker.lease, ready, 0.0), Goodbye)
        assert bool(byes) is expected and all(bye.is_final and setting in bye.reason for bye in byes)


@pytest.mark.parametrize(
    ("beside", "sent", "reason"),
    [
        ("routes", join_bytes((b"\x05\x02", b"\x07\x01")), None),
        ("routes", b"", "2 tokens came with 0 routes"),
        ("routes", join_bytes((b"\x05\x02", b"\x07")), "unlike sizes"),
        ("kept", join_bytes((b"\x05\x02", b"\x07")), None),
        ("kept", b"", "2 tokens came with 0 kept sets"),
        ("kept", join_bytes((b"\x05\x02", b"\x08")), "token 7 is not in its kept set"),
        ("kept", join_bytes((b"\x05\x02", b"\x07\xe2\x07")), "has token 1001"),
        ("kept", join_bytes((b"\x05\x02", b"\x07"))[:-1], "do not make 2 tokens"),
    ],
)
def test_what_a_worker_sends_beside_its_tokens_is_checked(beside: str, sent: bytes, reason: str | None) -> None:
    asked = request("g0.0")
    wanted: dict[str, Any] = {f"returns_{beside}": True} | ({"top_k": 2} if beside == "kept" else {})
    call = SwarmCall(replace(asked, params=replace(asked.params, **wanted)), 0)
    assert getattr(call.assignment("c", "k"), f"returns_{beside}")
    packed: dict[str, Any] = {"token_ids": pack_ids((7, 7)), "logprobs": pack_logprobs((-0.5, 0.0)), beside: sent}
    said = Decoded(call_id="c", offset=0, version=0, kv_version=0, **packed)
    if reason is None:
        chunk = checked_chunk(said, call, newest=0, vocab_size=VOCAB, keeps_kv=False)
        assert join_bytes(getattr(chunk, beside)) == sent
        return
    with pytest.raises(ProtocolError, match=reason):
        checked_chunk(said, call, newest=0, vocab_size=VOCAB, keeps_kv=False)


ENDLESS = "x" * 2**20


@pytest.mark.parametrize(
    "said",
    [
        NotServing(version=1, reason=ENDLESS),
        CallFailed(call_id="g0.0#0.", reason=ENDLESS),
        Leaving(reason=ENDLESS),
        Hello(protocols=(99,), software=ENDLESS),
    ],
    ids=lambda said: type(said).__name__,
)
def test_what_a_worker_says_at_length_is_cut(said: FromWorker) -> None:
    hub, worker = with_a_member()
    join(hub, ModelWorker("b"))  # the reason of a failed call is kept where another member does better
    hub.opened(request("g0.0"))
    effects = hub.connected("a", said, 1.0) if isinstance(said, Hello) else hub.received(worker.lease, said, 1.0)
    kept = hub.members["a"].last_error
    assert "xxx" in kept and len(kept) < 5000
    told = [e.reason if isinstance(e, Fail) else e.what for e in effects if isinstance(e, Fail | Changed)]
    assert all(len(text) < 5000 for text in (*told, *(bye.reason for bye in sent(effects, Goodbye))))


def test_one_connection_for_each_name() -> None:
    hub, worker = with_a_member()
    first = worker.lease
    effects = hub.connected("a", worker.hello(), 1.0)
    assert [
        (e.lease, e.message.is_final) for e in effects if isinstance(e, Send) and isinstance(e.message, Goodbye)
    ] == [(first, True)]
