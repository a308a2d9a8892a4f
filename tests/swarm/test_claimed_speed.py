"""What a member says of its speed is believed as far as its tokens arrive."""

from __future__ import annotations

import math

import pytest

from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Send
from rollover.swarm.wire.messages import Assign, Serving
from tests.swarm.kit import LENGTH, ModelWorker, assert_crowd_is_current, head, request
from tests.swarm.test_coordinator import beat, decodes, join, sent, with_a_call, with_a_member

BEAT_S = 5.0


def says(hub: Coordinator, worker: ModelWorker, number: int, claimed: float, *, mean_running: float = 1.0) -> float:
    """Let a member claim a speed for each of its calls. Returns what is believed."""
    claim = beat(number, mean_running=mean_running, tokens_per_s=claimed * mean_running)
    hub.received(worker.lease, claim, number * BEAT_S)
    assert_crowd_is_current(hub)
    return hub.members[worker.name].call_tokens_per_s or 0.0


@pytest.mark.parametrize("mean_running", [1.0, 1e-9, 4.0])
@pytest.mark.parametrize(
    ("claimed", "num_tokens", "believed"),
    [
        pytest.param(2.0, 10, 2.0, id="true"),
        pytest.param(4.0, 10, 4.0, id="half of them are on the way"),
        pytest.param(1.0, 10, 1.0, id="modest"),
        pytest.param(1e5, 10, 4.4, id="boastful"),
        pytest.param(1e5, 0, 0.4, id="a token for each call is the least that can be seen"),
        pytest.param(1e12, 10, 4.4, id="absurd"),
    ],
)
def test_a_claim_hardly_exceeds_arrivals(claimed: float, num_tokens: int, believed: float, mean_running: float) -> None:
    hub, worker = with_a_call()
    for number in range(1, 4):
        decodes(hub, worker, "g0.0#0.", num_tokens, number * BEAT_S)
        found = says(hub, worker, number, claimed, mean_running=mean_running)
    assert found == pytest.approx(believed)


def test_many_heartbeats_at_once_show_nothing() -> None:
    hub, worker = with_a_call()
    says(hub, worker, 1, 1e6)
    for number in range(2, 1000):
        hub.received(worker.lease, beat(number, mean_running=1.0, tokens_per_s=1e6), BEAT_S + number / 1000)
    assert hub.members["a"].call_tokens_per_s == pytest.approx(1e6), "it is not known better yet"
    assert says(hub, worker, 1000, 1e6) < 1.0


def test_what_was_shown_counts_until_tokens_arrive_again() -> None:
    hub, worker = with_a_call()
    assert says(hub, worker, 1, 1e4) == pytest.approx(1e4)
    slow = says(hub, worker, 2, 1e4)
    hub.cut(["g0.0#0."])
    assert says(hub, worker, 3, 1e4) == says(hub, worker, 4, 1e4) == slow < 1.0
    worker.got(sent(hub.opened(request("g1.0")), Assign)[0])
    decodes(hub, worker, "g1.0#0.", LENGTH, 4.1 * BEAT_S)
    assert says(hub, worker, 5, 1e4) == pytest.approx(1e4), "a response within a heartbeat"


def test_an_outage_says_nothing_of_the_speed() -> None:
    hub, worker = with_a_call()
    says(hub, worker, 1, 2.0)
    decodes(hub, worker, "g0.0#0.", 10, 2 * BEAT_S)
    assert says(hub, worker, 2, 2.0) == pytest.approx(2.0)
    hub.disconnected(worker.lease, 2 * BEAT_S)
    for effect in join(hub, worker, 4.9 * BEAT_S):
        if isinstance(effect, Send):
            worker.got(effect.message)
    hub.received(worker.lease, beat(1, mean_running=1.0, tokens_per_s=2.0), 5 * BEAT_S)
    decodes(hub, worker, "g0.0#0.", 10, 6 * BEAT_S)
    hub.received(worker.lease, beat(2, mean_running=1.0, tokens_per_s=2.0), 6 * BEAT_S)
    assert hub.members["a"].call_tokens_per_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    "figures",
    [{field: value} for field in ("prepare_s", "pause_s") for value in (math.nan, math.inf, -math.inf, -1.0)]
    + [{"wire_bytes": -1}],
    ids=str,
)
def test_times_that_cannot_be_end_the_membership(figures: dict[str, float]) -> None:
    hub, worker = with_a_member()
    hub.published(head(1), 0.0)
    hub.received(worker.lease, Serving(version=1, manifest=head(1).manifest, **figures), 1.0)  # type: ignore[arg-type]
    member = hub.members["a"]
    assert "which is impossible" in member.distrust and member.prepare_s is None and member.version is None


@pytest.mark.parametrize("figures", [{"tokens_per_s": 1e300}, {"mean_running": 1e300}, {"tokens_per_s": math.nan}])
def test_speeds_that_cannot_be_end_the_membership(figures: dict[str, float]) -> None:
    hub, worker = with_a_member()
    hub.received(worker.lease, beat(1, **{"mean_running": 1.0, **figures}), 1.0)
    assert "which is impossible" in hub.members["a"].distrust
