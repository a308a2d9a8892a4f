"""A run of a swarm over NATS with real processes, in the middle of which the NATS server is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollover.swarm.coordinator.status.snapshot import StatusFile
from tests import runs
from tests.swarm.nats_kit import NatsServer, needs_server, running
from tests.swarm.test_runs import assert_conserved, swarm

pytestmark = [needs_server, pytest.mark.slow]


def test_a_run_goes_on_when_the_nats_server_is_killed_and_nothing_is_lost_or_doubled(experiment: Path) -> None:
    steps = 40
    server = NatsServer(experiment, jetstream=True)
    url = f"{server.url}/runs.sums"
    with running(server), swarm(experiment) as it:
        argv = ["--rollout.strategy", "bounded_async", "--rollout.max_staleness", "2", "--steps", str(steps)]
        nats = ["--engine.transport", "nats", "--engine.nats_url", url]
        it.spawn("trainer", "train", "swarm.toml", "--run-dir", "out", *nats, *argv)
        it.until("the swarm", it.run / "swarm" / "status.json")
        for name in ("a", "b"):
            it.join(name, url=url)
        for name in ("a", "b"):
            it.until_sampled(name)
        server.kill()
        it.until("the loss is noticed", experiment / "trainer.log", holds="is lost: ")
        server.start()
        it.finish()
        assert not any(w.state == "sent away" for w in StatusFile(it.run / "swarm" / "status.json").read().workers)
        for name in ("a", "b"):
            assert it.processes[name].wait(60) == 0, it.logs()
            assert re.search(r"the connection to nats://\S+ ended", (experiment / f"{name}.log").read_text())
    assert_conserved(it.run, steps)
    lags = [batch.step - v for batch in runs.batches(it.run) for t in batch.trajectories for v in t.policy_versions]
    assert max(lags) <= 2
    sampled_by = {s.engine for batch in runs.batches(it.run) for t in batch.trajectories for s in t.segments}
    assert {"a", "b"} <= sampled_by
