"""What a worker says of its tokens and of its engine switches no check off: it can be true, or the worker is sent away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec import structs

from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Deliver, Send, SentAway
from rollover.swarm.wire.messages import Adopt, Assign, Decoded, Goodbye, Welcome
from tests.swarm.kit import ModelCall, ModelWorker, coordinator, head, request
from tests.swarm.test_coordinator import decodes, join, sent, with_a_member


@dataclass
class Mislabels(ModelWorker):
    """Labels the tokens of a message with what ``label`` makes of their version and of the first one's position."""

    label: Callable[[int, int], dict[str, int]] = lambda version, position: {}

    def piece(self, call: ModelCall, start: int, stop: int, version: int, reason: str | None = None) -> Decoded:
        return structs.replace(super().piece(call, start, stop, version, reason), **self.label(version, start))


def of_version(version: int) -> dict[str, int]:
    return {"version": version, "kv_version": version}


def change(hub: Coordinator, worker: ModelWorker, version: int) -> None:
    """Publish weights, which the worker then serves."""
    hub.published(head(version), 0.0)
    hub.received(worker.lease, worker.change(head(version)), 0.0)


def given(hub: Coordinator, worker: ModelWorker) -> str:
    """Give a call to the worker that any weights may decode."""
    (assign,) = sent(hub.opened(request("g0.0")), Assign)
    worker.got(assign)
    return str(assign.call_id)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"kv_version": 0}, "version 1 with a cache of version 0, but says that its engine keeps no caches of older"),
        ({"kv_version": -1}, "a cache of version -1, which is impossible"),
        ({"kv_version": 2}, "a cache of version 2, which is impossible"),
        (of_version(0), "tokens of version 0 for a call that needs version 1"),
    ],
)
def test_labels_that_cannot_be_true_are_found_at_the_first_token(labels: dict[str, int], reason: str) -> None:
    hub, worker = coordinator(), Mislabels("a", label=lambda version, position: labels)
    join(hub, worker)
    change(hub, worker, 1)
    effects = decodes(hub, worker, given(hub, worker), 3)
    assert not any(isinstance(e, Deliver) for e in effects)
    (gone,) = [e for e in effects if isinstance(e, SentAway)]
    assert reason in gone.reason


def test_labels_that_go_back_within_a_response_are_found() -> None:
    """Each second message is labelled with older weights, so that no stretch is longer than a message."""
    changing = Mislabels("a", label=lambda version, position: of_version(version - (version > 0 and position % 2)))
    hub, worker = coordinator(), changing
    join(hub, worker)
    call_id = given(hub, worker)
    effects = decodes(hub, worker, call_id, 4)
    change(hub, worker, 1)
    effects += decodes(hub, worker, call_id, 1)
    assert [e.chunk.policy_version for e in effects if isinstance(e, Deliver)] == [0, 1]
    (gone,) = [e for e in decodes(hub, worker, call_id, 1) if isinstance(e, SentAway)]
    assert "tokens of version 0 after tokens of version 1 in one response" in gone.reason


def test_an_honest_worker_may_change_weights_within_a_response() -> None:
    hub, worker = with_a_member()
    call_id = given(hub, worker)
    worker.decode(call_id, 4)
    change(hub, worker, 1)
    effects = decodes(hub, worker, call_id, 4)
    assert [e.chunk.policy_version for e in effects if isinstance(e, Deliver)] == [0, 1]
    assert not hub.members["a"].distrust


def test_a_worker_that_keeps_caches_may_name_them() -> None:
    hub, worker = (
        coordinator(),
        Mislabels("a", keeps_kv=True, label=lambda version, position: {"kv_version": version - 1}),
    )
    join(hub, worker)
    change(hub, worker, 1)
    (out,) = decodes(hub, worker, given(hub, worker), 3)
    assert isinstance(out, Deliver) and (out.chunk.policy_version, out.chunk.kv_version) == (1, 0)


def test_tokens_before_the_engine_is_described_end_the_connection() -> None:
    """A coordinator that was started again takes over a call before the worker's ``Ready`` has arrived."""
    before, worker = coordinator(), ModelWorker("a")
    join(before, worker)
    call_id = given(before, worker)
    worker.decode(call_id, 10)
    hub = coordinator()
    (welcome,) = sent(hub.connected("a", worker.hello(), 0.0), Welcome)
    worker.got(welcome)
    (adopt,) = sent(hub.opened(request("g0.0", 1)), Adopt)
    worker.got(adopt)
    (bye,) = [e.message for e in decodes(hub, worker, adopt.call_id, 0) if isinstance(e, Send)]
    assert isinstance(bye, Goodbye) and not bye.is_final and "before it had described its engine" in bye.reason
