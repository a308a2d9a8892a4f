"""The state of a swarm as people see it, taken from a coordinator."""

from __future__ import annotations

from rollover.swarm.coordinator.machine.effects import Changed
from rollover.swarm.coordinator.status.snapshot import swarm_status
from rollover.swarm.wire.messages import NotServing
from tests.swarm.kit import ModelWorker, head, request
from tests.swarm.test_coordinator import beat, coordinator, decodes, join, with_a_member


def test_a_worker_is_shown_with_its_calls_and_tokens() -> None:
    hub, worker = coordinator(), ModelWorker("a", room=4)
    join(hub, worker)
    for i, num_done in enumerate((0, 7, 3)):
        for effect in hub.opened(request(f"g{i}.0", num_done=num_done)):
            worker.got(effect.message)  # type: ignore[union-attr]
    decodes(hub, worker, "g0.0#0.", 5)
    (seen,) = swarm_status(hub, "ws://x").workers
    assert (seen.state, seen.num_calls, seen.num_decoded) == ("ready", 3, 5)


def test_a_worker_that_is_full_says_what_it_waits_for() -> None:
    hub, worker = with_a_member()
    hub.received(worker.lease, beat(number=1, num_held=90, is_full=True), 1.0)
    (seen,) = swarm_status(hub, "ws://x").workers
    assert (seen.state, seen.num_held) == ("full", 90) and "pauses until they are journaled" in seen.note
    hub.received(worker.lease, beat(number=2, num_held=10), 2.0)
    (seen,) = swarm_status(hub, "ws://x").workers
    assert (seen.state, seen.note) == ("ready", "")


def test_a_worker_that_keeps_older_weights_says_why() -> None:
    hub, worker = with_a_member()
    hub.published(head(1), 0.0)
    full = NotServing(version=1, reason="no space left on /cache")
    warned = [[e for e in hub.received(worker.lease, full, now_s) if isinstance(e, Changed)] for now_s in (1.0, 2.0)]
    assert warned == [[Changed("a has no new weights: version 1: no space left on /cache", is_warning=True)], []]
    (seen,) = swarm_status(hub, "ws://x").workers
    assert (seen.state, seen.lag, seen.note) == ("ready", 1, "version 1: no space left on /cache")
    hub.received(worker.lease, worker.change(head(1)), 3.0)
    (seen,) = swarm_status(hub, "ws://x").workers
    assert (seen.state, seen.lag, seen.note) == ("ready", 0, "")


def test_what_new_weights_took_is_told_by_worker() -> None:
    hub, worker = with_a_member()
    hub.published(head(1), 0.0)
    serving = worker.change(head(1))
    took = type(serving)(version=1, manifest=serving.manifest, prepare_s=4.1, pause_s=0.3, wire_bytes=81_264)
    hub.received(worker.lease, took, 1.0)
    hub.received(worker.lease, serving, 2.0)  # again, which tells nothing of that
    (seen,) = swarm_status(hub, "ws://x").workers
    assert (seen.version, seen.lag, seen.prepare_s, seen.pause_s, seen.wire_bytes) == (1, 0, 4.1, 0.3, 81_264)


def test_a_worker_whose_new_weights_are_checked_is_not_said_to_load_them() -> None:
    hub, worker = coordinator(checks=True), ModelWorker("a")
    join(hub, worker)
    assert [w.state for w in swarm_status(hub, "ws://x").workers] == ["checking"]
    hub.checked("a", 0)
    assert [w.state for w in swarm_status(hub, "ws://x").workers] == ["ready"]


def test_what_was_refused_is_counted_for_people() -> None:
    hub = coordinator()
    join(hub, ModelWorker("a"))
    hub.distrust("a", "it lies")
    for cause, count in (("logins", 3), ("protocols", 2), ("frames", 1)):
        hub.counters[f"refused_{cause}"] += count
    hub.counters["out_of_order"] = 7
    counters = swarm_status(hub, "ws://x").counters
    assert {name: counters[name] for name in counters if name.startswith("refused")} == {
        "refused_logins": 3,
        "refused_protocols": 2,
        "refused_frames": 1,
    }
    assert (counters["out_of_order"], counters["workers_sent_away"]) == (7, 1)
