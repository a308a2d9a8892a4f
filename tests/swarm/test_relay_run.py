"""A run whose weights come through a relay and an object store, both of which fail for a while."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rollover.engine.servers.launch import free_port
from tests import runs
from tests.swarm.nginx_kit import Nginx, needs_nginx
from tests.swarm.test_runs import DEADLINE_S, assert_conserved, swarm

pytestmark = [pytest.mark.slow, needs_nginx]


def test_a_run_goes_on_without_its_relay_and_its_object_store_and_uses_them_when_they_are_back(
    experiment: Path,
) -> None:
    port = free_port()
    relay, store = Nginx(experiment / "relay", port, f"http://127.0.0.1:{port}/v1/blobs"), experiment / "store"
    with swarm(experiment) as it:
        places = ["--engine.blob_urls", json.dumps([relay.url]), "--engine.blob_store", f"file://{store}"]
        argv = ["--rollout.strategy", "bounded_async", "--rollout.max_staleness", "2", "--steps", "400"]
        it.train("swarm.toml", "--run-dir", "out", *argv, *places)
        it.until("the swarm", it.run / "swarm" / "status.json")
        it.rollover("workers", str(it.run), "--add", "relay", "--out", "relay.token")
        said = it.rollover(
            *("relay", "--join", f"ws://127.0.0.1:{it.port}", "--token-file", "relay.token"),
            *("--listen", f"127.0.0.1:{port}", "--folder", "relay"),
        )
        assert "nginx -p relay -c nginx.conf" in said
        relay.start()
        try:
            it.join("a")
            it.until_step(2)
            relay.kill()
            store.rename(experiment / "aside")
            (experiment / "store").write_text("no folder")
            it.join("b")
            missed = "was not copied; workers fetch it from the trainer"
            it.until("the store is missed", experiment / "trainer.log", holds=missed)
            it.until_sampled("b")
            os.unlink(experiment / "store")
            (experiment / "aside").rename(store)
            before = {*relay.cached()}
            assert before, "nobody has fetched from the relay"
            relay.start()
            it.join("c")  # the others may avoid the relay for a minute, since it has failed them
            it.until("the relay is used again", lambda: bool({*relay.cached()} - before))
            it.until_sampled("c")
            it.until_step(runs.rows(it.run)[-1]["step"] + 2)
            it.processes["trainer"].send_signal(signal.SIGINT)
            assert it.processes["trainer"].wait(DEADLINE_S) in (0, 130), it.logs()
        finally:
            relay.kill()
    assert_conserved(it.run, len(runs.rows(it.run)))
    assert {path.name for path in store.iterdir()} == {path.name for path in (it.run / "swarm" / "blobs").iterdir()}
