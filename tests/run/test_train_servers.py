"""``rollover train`` with servers in place of the embedded engine: real sockets, real weights, a scripted server."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.run.directory import RunDir
from tests import runs
from tests.engine.servers.model_server import ModelServer, serving
from tests.runs import Say
from tests.speed import within
from tests.swarm.chaos.forked import Forked

CONTEXT = 80


def train(*urls: str, steps: int = 3, strategy: str = "april", more: tuple[str, ...] = ()) -> int:
    engine = ["--engine.kind", "vllm", "--engine.urls", json.dumps(urls), "--engine.max_running", "24"]
    engine += ["--engine.weights_dir", "shared"]
    run = ["train", "run.toml", "--run-dir", "out", "--steps", str(steps), "--rollout.strategy", strategy]
    return cli.main([*run, *engine, *more])


@pytest.mark.parametrize("strategy", ["sync", "april"])
def test_a_run_on_two_servers_trains_what_each_version_really_sampled(experiment: Path, strategy: str) -> None:
    one, two = (ModelServer(experiment / "model", context=CONTEXT) for _ in range(2))
    with serving(one) as first, serving(two) as second:
        assert train(first, second, strategy=strategy) == 0
    out = Path("out")
    ledger = runs.ledger(out)
    assert ledger.next_step == 3
    versions = {v for batch in runs.batches(out) for t in batch.trajectories for v in t.policy_versions}
    # A fast server may finish all that APRIL has asked of one version before the next one is there.
    assert versions == {0, 1, 2} if strategy == "sync" else {0} < versions <= {0, 1, 2}
    with RunDir(out) as run:
        name = run.identity()
    assert sorted(p.name for p in Path("shared", name).iterdir()) == ["v2", "v3"], "no other run has this folder"
    assert {one.version, two.version} == {f"rollover:{name}:3:free"}
    assert min(sum(path == "/v1/completions" for _, path, _, _ in server.log) for server in (one, two)) > 5
    # APRIL's later batches hold tokens of older versions, how many depends on timing; the first holds none.
    fresh = runs.rows(out) if strategy == "sync" else runs.rows(out)[:1]
    assert max(abs(row["kl/rollout_proximal_k1"]) for row in fresh) < 1e-5


def test_a_run_waits_for_dead_servers_as_long_as_it_says(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Although that is longer than it may be silent."""

    class Mortal(ModelServer):
        def _decode(self, name: str, running: Any) -> None:
            super()._decode(name, running)
            if self.version.endswith(":1"):
                self.kill()

    with serving(Mortal(experiment / "model", context=CONTEXT)) as url:
        assert train(url, more=("--engine.all_down_timeout_s", "5", "--rollout.stall_timeout_s", "2")) == 2
    message = f"no engine has been up for 5 s (engine.all_down_timeout_s): {url}: "
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_server_that_reloads_some_weights_stops_the_run(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ModelServer(experiment / "model", context=CONTEXT, stale_head=True)
    config = (experiment / "run.toml").read_text().replace("learning_rate = 3e-3", "learning_rate = 0.3")
    (experiment / "run.toml").write_text(config)
    with serving(server) as url:
        assert train(url, steps=20) == 2
    assert "does not sample from the trainer's policy" in capsys.readouterr().err


def test_ctrl_c_in_a_hung_update_ends_the_run_and_leaves_no_paused_server(experiment: Path) -> None:
    class Hanging(ModelServer):
        async def _post_collective_rpc(self, query, body):  # type: ignore[no-untyped-def]
            if body["kwargs"]["weights_path"].endswith("v2"):
                hung.set()
                while not over.is_set():
                    await asyncio.sleep(0.05)
            return await super()._post_collective_rpc(query, body)

    hung, over = threading.Event(), threading.Event()
    server = Hanging(experiment / "model", context=CONTEXT)
    with serving(server) as url:
        engine = ("--engine.kind", "vllm", "--engine.urls", json.dumps([url]), "--engine.max_running", "24")
        training = Forked(experiment, "run", ("train", "run.toml", "--run-dir", "out", "--steps", "9", *engine))
        try:
            assert hung.wait(within(120.0)), training.last_words()
            assert server.paused
            training.send(signal.SIGINT)
            give_up_s = time.monotonic() + within(100.0)
            while training.exit_code is None:
                assert time.monotonic() < give_up_s, training.last_words()
                time.sleep(0.05)
            assert training.exit_code == 130
        finally:
            training.kill()
            over.set()
        assert not server.paused
    assert runs.ledger(Path("out")).next_step == 2


def test_evaluation_measures_the_runs_own_model_whatever_the_server_held(
    experiment: Path, tmp_path_factory: pytest.TempPathFactory, done: Say
) -> None:
    other = runs.save_model(tmp_path_factory.mktemp("other") / "model", seed=9)
    server = ModelServer(other, context=CONTEXT)
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    with serving(server) as url:
        engine = ["--engine.kind", "vllm", "--engine.urls", json.dumps([url])]
        told = done("eval", "run.toml", "--run-dir", "out", *engine)
    assert Path(server.weights).resolve() == (experiment / "model").resolve()
    assert "only training checks their log-probs" in " ".join(told.split())
