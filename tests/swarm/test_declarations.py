"""What a worker says of its tokens and of its engine switches no check off: it can be true, or the worker is sent away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollover.engine.logprob_check import FLOAT32_TOLERANCE, HALF_TOLERANCE
from rollover.engine.reexecution import Slack
from rollover.run.engine_trust import Trust
from rollover.run.loading import load
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Changed, Deliver, Effect, Send, SentAway
from rollover.swarm.wire.messages import Adopt, Assign, CallState, Goodbye, Welcome
from tests.swarm import liars
from tests.swarm.kit import VOCAB, ModelWorker, coordinator, head, request
from tests.swarm.test_coordinator import beat, decoded, join, sent
from tests.virtual_time import VirtualClock, run

UP_TO_DATE = [
    (liars.OldCache, "version 1 with a cache of version 0, but says that its engine keeps no caches of older weights"),
    (liars.NoCache, "a cache of version -1, which is impossible"),
    (liars.NewCache, "a cache of version 2, which is impossible"),
    (liars.OldLabels, "tokens of version 0 for a call that needs version 1"),
]


def change(hub: Coordinator, worker: ModelWorker, version: int) -> None:
    """Publish weights, which the worker then serves."""
    hub.published(head(version), 0.0)
    hub.received(worker.lease, worker.change(head(version)), 0.0)


def given(hub: Coordinator, worker: ModelWorker) -> str:
    """Give a call to the worker that any weights may decode."""
    (assign,) = sent(hub.opened(request("g0.0")), Assign)
    worker.got(assign)
    return str(assign.call_id)


def says(hub: Coordinator, worker: ModelWorker, call_id: str, num_tokens: int) -> list[Effect]:
    effects: list[Effect] = []
    for piece in decoded(worker, call_id, num_tokens):
        effects += hub.received(worker.lease, piece, 1.0)
    return effects


@pytest.mark.parametrize(("kind", "reason"), UP_TO_DATE)
def test_labels_that_cannot_be_true_are_found_at_the_first_token(kind: type[ModelWorker], reason: str) -> None:
    hub, worker = coordinator(), kind("a")
    join(hub, worker)
    change(hub, worker, 1)
    effects = says(hub, worker, given(hub, worker), 3)
    assert not any(isinstance(e, Deliver) for e in effects)
    (gone,) = [e for e in effects if isinstance(e, SentAway)]
    assert reason in gone.reason


def test_labels_that_go_back_within_a_response_are_found() -> None:
    hub, worker = coordinator(), liars.ChangingLabels("a")
    join(hub, worker)
    call_id = given(hub, worker)
    effects = says(hub, worker, call_id, 4)
    change(hub, worker, 1)
    effects += says(hub, worker, call_id, 1)
    assert [e.piece.version for e in effects if isinstance(e, Deliver)] == [0, 1]
    (gone,) = [e for e in says(hub, worker, call_id, 1) if isinstance(e, SentAway)]
    assert "tokens of version 0 behind tokens of version 1 in one response" in gone.reason


def test_an_honest_worker_may_change_weights_within_a_response_and_keep_what_it_has_sampled() -> None:
    hub, worker = coordinator(), ModelWorker("a")
    join(hub, worker)
    call_id = given(hub, worker)
    worker.decode(call_id, 4)
    change(hub, worker, 1)
    effects = says(hub, worker, call_id, 4)
    assert [e.piece.version for e in effects if isinstance(e, Deliver)] == [0, 1]
    assert not hub.members["a"].distrust


def test_who_keeps_caches_may_name_them_and_people_are_told() -> None:
    hub, worker = coordinator(), liars.KeepsCachesOfOldLabels("a")
    (warning,) = [e for e in join(hub, worker) if isinstance(e, Changed) and e.is_warning]
    assert warning.what == (
        "a is ready, but its engine keeps caches of older weights (kv_on_update), so its tokens cannot be verified"
    )
    change(hub, worker, 1)
    (out,) = says(hub, worker, given(hub, worker), 3)
    assert isinstance(out, Deliver) and (out.piece.version, out.piece.kv_version) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (liars.Unseeded, "its engine does not draw tokens by seed"),
        (liars.KeepsCaches, "its engine keeps caches of older weights"),
        (liars.CoarseInWords, ""),
        (ModelWorker, ""),
    ],
)
def test_an_operator_can_turn_away_who_cannot_be_verified(kind: type[ModelWorker], reason: str) -> None:
    for only in (False, True):
        hub, worker = coordinator(verifiable_only=only), kind("a")
        byes = sent(join(hub, worker), Goodbye)
        assert bool(byes) == bool(only and reason)
        assert all(bye.is_final and reason in bye.reason and "engine.verifiable_only" in bye.reason for bye in byes)
        assert (hub.max_running == 0) == bool(byes) and not hub.members["a"].distrust


@pytest.mark.parametrize(
    ("number_format", "setting", "tolerance"),
    [
        ("float32", None, FLOAT32_TOLERANCE),
        ("bfloat16", None, HALF_TOLERANCE),
        ("float32", 0.03, 0.03),
    ],
)
def test_the_run_decides_what_rounding_explains_and_not_what_a_worker_says_of_its_format(
    number_format: str, setting: float | None, tolerance: float
) -> None:
    async def law() -> None:
        hub, config = coordinator(), SwarmConfig(logprob_tolerance=setting)
        engine = SwarmEngine(
            config, hub, lambda version, source: head(version), VirtualClock(), number_format=number_format
        )
        join(hub, liars.CoarseInWords("a"))
        join(hub, ModelWorker("b"))
        assert engine.reexecutions.slack == Slack(logprobs=tolerance)
        engine.allow_rounding(0.05)  # the trainer computes in a coarser format, say
        assert engine.reexecutions.slack == Slack(logprobs=0.05)
        await engine.close()

    run(law())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32_TOLERANCE), ("bfloat16", HALF_TOLERANCE)])
def test_re_execution_allows_as_much_as_the_log_prob_check(dtype: str, tolerance: float) -> None:
    """A member that the check lets in, with a trainer in half precision, is not sent away for its rounding later."""

    async def law() -> None:
        config = load("quickstart", ["--engine.kind", "swarm", "--trainer.dtype", dtype])
        assert isinstance(config.engine, SwarmConfig)
        engine = SwarmEngine(
            config.engine, coordinator(), lambda v, source: head(v), VirtualClock(), number_format="float32"
        )
        trainer: Any = SimpleNamespace(vocab_size=VOCAB)
        Trust(config, engine, trainer, num_tokens=VOCAB, trainer_format=dtype, replayed=())
        assert engine.reexecutions.slack == Slack(logprobs=tolerance)
        await engine.close()

    run(law())


def test_tokens_wait_until_their_worker_has_described_its_engine() -> None:
    """A coordinator that was started again takes over a call before the worker's ``Ready`` has arrived, which was lost:
    whether the tokens can be verified is known from the next heartbeat on."""
    before, worker = coordinator(), ModelWorker("a")
    join(before, worker)
    call_id = given(before, worker)
    worker.decode(call_id, 10)
    hub = coordinator()
    (welcome,) = sent(hub.connected("a", worker.hello(), 0.0), Welcome)
    ready, _ = worker.got(welcome)
    (adopt,) = sent(hub.opened(request("g0.0", 1)), Adopt)
    worker.got(adopt)
    assert says(hub, worker, adopt.call_id, 0) == [] and hub.counters.unconfirmed_tokens == 10
    states = (CallState(call_id=adopt.call_id, start=0, sent=10),)
    for number in (1, 2, 3):
        for message in hub.received(worker.lease, beat(number, ready=ready, serving=head(0), calls=states), 2.0):
            if isinstance(message, Send):
                worker.got(message.message)
    (out,) = says(hub, worker, adopt.call_id, 0)
    assert isinstance(out, Deliver) and len(out.piece.token_ids) == 10 and not hub.members["a"].distrust
