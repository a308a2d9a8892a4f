"""The record of publications and changes: what is written can be read, is summed up once, and never ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover.swarm.coordinator.machine.effects import ServesAnew
from rollover.swarm.coordinator.status.board import WeightLog
from rollover.swarm.publication.publications import PublishedWeights
from rollover.swarm.wire.messages import Serving
from tests.swarm.kit import ModelWorker, coordinator, head
from tests.swarm.test_coordinator import join


def publication(version: int, wire_bytes: int = 100) -> PublishedWeights:
    return PublishedWeights(
        version=version,
        manifest=head(version).manifest,
        kind="delta",
        reason="",
        wire_bytes=wire_bytes,
        full_bytes=4000,
        elapsed_s=0.5,
    )


def serving(version: int, *, prepare_s: float = 1.0, pause_s: float = 0.1, wire_bytes: int = 100) -> Serving:
    return Serving(
        version=version, manifest=head(version).manifest, prepare_s=prepare_s, pause_s=pause_s, wire_bytes=wire_bytes
    )


def test_each_publication_and_each_change_is_a_line(tmp_path: Path) -> None:
    log = WeightLog(tmp_path)
    log.published(publication(7))
    log.changed("laptop", serving(7, prepare_s=2.0))
    log.changed("phone", serving(6))  # a publication of an earlier process
    first, second, third = map(json.loads, (tmp_path / "weights.jsonl").read_text().splitlines())
    assert [first[key] for key in ("record", "version", "kind", "wire_bytes")] == ["publication", 7, "delta", 100]
    assert [second[key] for key in ("record", "member", "version", "prepare_s")] == ["change", "laptop", 7, 2.0]
    assert 0 <= second["after_s"] < 60
    assert third["after_s"] is None


def test_metrics_are_of_what_came_since_the_last_ones() -> None:
    log = WeightLog()
    assert log.take_metrics() == {}
    log.published(publication(6, wire_bytes=0))
    log.published(publication(7, wire_bytes=300))
    log.changed("laptop", serving(7, prepare_s=1.0, pause_s=0.1, wire_bytes=300))
    log.changed("phone", serving(7, prepare_s=3.0, pause_s=0.5, wire_bytes=400))
    found = log.take_metrics()
    assert 0 <= found.pop("swarm/convergence_s") < 60
    assert found == {
        "swarm/published_bytes": 300,
        "swarm/changes": 2,
        "swarm/wire_bytes": 700,
        "swarm/prepare_s": 2.0,
        "swarm/pause_s": 0.3,
        "swarm/pause_s_max": 0.5,
    }
    assert log.take_metrics() == {}


def test_a_record_that_cannot_be_written_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = WeightLog(tmp_path / "gone")
    log.published(publication(7))
    log.changed("laptop", serving(7))
    assert log.take_metrics()["swarm/changes"] == 1
    assert [record.message for record in caplog.records if "cannot be written" in record.message] != []
    assert len(caplog.records) == 1, "it is said once"


def test_the_coordinator_tells_of_a_version_once_for_each_member() -> None:
    hub, worker = coordinator(), ModelWorker("laptop")
    told = join(hub, worker)
    told += hub.received(worker.lease, serving(0), 1.0)  # said twice, since the first may have been lost
    hub.published(head(1), 0.0)
    told += hub.received(worker.lease, serving(1, wire_bytes=7), 2.0)
    anew = [(e.member, e.serving.version, e.serving.wire_bytes) for e in told if isinstance(e, ServesAnew)]
    assert anew == [("laptop", 0, 0), ("laptop", 1, 7)]
