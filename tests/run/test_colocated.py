"""Runs whose engine and trainer take turns on the same devices."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollover import cli
from rollover.batch import Batch
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.servers.start.launch import ServerProcess
from rollover.rollout.events import BatchTrained, SegmentEnded
from rollover.rollout.strategies import STRATEGIES
from rollover.trainer import ranks
from rollover.trainer.fleet import FleetTrainer
from rollover.trainer.local import LocalTrainer
from tests import runs
from tests.engine.servers.embedded.kit import ENGINE, serving
from tests.runs import Cue, Processes, Say
from tests.trainer import forked_ranks

COLOCATED = ("--engine.colocated", "true")
OVERLAPPING = ("bounded_async", "inflight")


def train(*argv: str) -> int:
    return cli.main(["train", "run.toml", *argv])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to the memory, in order; in a step the engine must have none."""
    log: list[str] = []
    engines: list[EmbeddedEngine] = []

    def watch(kind: type, name: str, note: Callable[..., None]) -> None:
        as_ever = getattr(kind, name)

        def watched(self: Any, *args: Any, **settings: Any) -> Any:
            note(self, *args)
            return as_ever(self, *args, **settings)

        monkeypatch.setattr(kind, name, watched)

    def rest(self: LocalTrainer) -> None:
        give_back(self)
        assert all(p.grad is None for p in self._model.parameters())
        log.append("rest")

    def engine() -> str:
        return "asleep" if engines[-1]._core._awake is None else "awake"

    give_back = LocalTrainer.rest
    monkeypatch.setattr(LocalTrainer, "rest", rest)
    watch(EmbeddedEngine, "__init__", lambda self, *args: engines.append(self))
    watch(LocalTrainer, "step", lambda self, batch: log.extend([engine(), f"step {batch.step}"]))
    watch(LocalTrainer, "next_logits", lambda self, prompts: log.append(f"check: {engine()}"))
    watch(EmbeddedEngine, "load", lambda self, version, source: log.append(f"load {version}"))
    return log


@pytest.mark.parametrize("strategy", OVERLAPPING)
def test_a_strategy_that_overlaps_the_trainer_is_refused_at_once(experiment: Path, refused: Say, strategy: str) -> None:
    told = refused("train", "run.toml", "--run-dir", "out", "--rollout.strategy", strategy, *COLOCATED)
    assert f"rollout.strategy '{strategy}' generates while the trainer trains" in told
    assert all((kind in told) == (kind not in OVERLAPPING) for kind in STRATEGIES if kind != strategy)
    assert not Path("out").exists()


@pytest.mark.parametrize("strategy", ["april", "oversample", "sync"])
def test_a_strategy_takes_turns_with_the_trainer(experiment: Path, log: list[str], strategy: str) -> None:
    assert train("--run-dir", "out", "--rollout.strategy", strategy, *COLOCATED, "--steps", "3") == 0
    assert log[:4] == ["check: awake", "rest", "load 0", "load 0"]
    turns = [[*group] for is_load, group in groupby(log[4:], lambda what: what.startswith("load")) if not is_load]
    steps = [what for turn in turns for what in turn if what != "rest"]
    assert steps == [what for step in range(3) for what in ("asleep", f"step {step}")]
    assert [turn[-1] for turn in turns] == ["rest"] * len(turns)  # before the engine takes its memory
    assert log[-1] == "load 3"
    assert runs.ledger(Path("out")).next_step == 3
    assert all("time/sleep_s" in row for row in runs.rows(Path("out")))


def test_the_engine_sleeps_through_all_batches_of_one_collection(experiment: Path, log: list[str]) -> None:
    argv = ("--deterministic", "true", "--rollout.strategy", '{kind = "rollover", lag_target = 2.0}', "--steps", "10")
    assert train("--run-dir", "apart", *argv) == 0
    assert train("--run-dir", "turns", *argv, *COLOCATED) == 0
    assert 10 > sum(what.startswith("load") for what in log[log.index("load 10") + 1 :]) - 2 > 2
    assert runs.weights(Path("apart"), 10) == runs.weights(Path("turns"), 10)
    assert runs.sampled(Path("apart")) == runs.sampled(Path("turns"))


def test_a_run_that_is_killed_in_a_step_goes_on_as_if_it_never_had_been(processes: Processes) -> None:
    argv = (
        *("train", "run.toml", "--deterministic", "true", "--steps", "7"),
        *("--rollout.strategy", "rollover", *COLOCATED),
    )
    assert processes.run(*argv, "--run-dir", "whole").code == 0
    cue = Cue(BatchTrained, 4, before=True)  # batches are on record that no checkpoint has seen
    assert processes.run(*argv, "--run-dir", "killed", kill_at=cue).code == -9
    resumed = processes.run("train", "--resume", "killed")
    assert resumed.code == 0, resumed.err
    assert runs.weights(Path("killed"), 7) == runs.weights(Path("whole"), 7)


def test_whoever_reads_the_plan_is_told_once_what_taking_turns_costs(experiment: Path, done: Say) -> None:
    plan = ("train", "run.toml", "--dry-run", *COLOCATED, "--rollout.strategy")
    out = done(*plan, "april")
    assert out.count("take turns") == 1
    assert "rollouts that strategy april leaves unfinished are prefilled again in the next round" in out
    assert "prefilled again" not in done(*plan, "sync")


def test_a_cache_that_is_to_be_kept_cannot_be_given_back(experiment: Path, refused: Say) -> None:
    told = refused("train", "run.toml", *COLOCATED, "--engine.kv_on_update", "keep")
    assert "kv_on_update = 'keep' does not work with colocated = true" in told


# -- servers, real ones ------------------------------------------------------------------------------------------------

SERVERS = (
    *("--engine.kind", "embedded_server", "--engine.max_running", "12", "--engine.control_timeout_s", "120"),
    *("--engine.health_timeout_s", "60", "--rollout.strategy", "april"),
)
SERVED = replace(ENGINE, max_running=24, kv_cache_bytes=2**21, block_size_tokens=4)


@pytest.fixture
def config(experiment: Path) -> Path:
    """The experiment without settings of the engine."""
    file = experiment / "run.toml"
    before, _, behind = file.read_text().partition("[engine]")
    file.write_text(before + "[trainer]" + behind.partition("[trainer]")[2])
    return file


def test_a_run_that_is_killed_in_a_step_wakes_its_servers_when_it_goes_on(config: Path) -> None:
    processes = Processes(config.parent)
    with serving(config.parent / "model", SERVED) as one, serving(config.parent / "model", SERVED) as two:
        urls = ("--engine.urls", json.dumps([one, two]))
        argv = ("train", "run.toml", "--run-dir", "out", *SERVERS, *urls, *COLOCATED)
        died = processes.run(*argv, kill_at=Cue(BatchTrained, 2, before=True))
        assert died.code == -9, died.err
        labels = [httpx.get(f"{url}/info").json()["label"] for url in (one, two)]
        assert [label.rpartition(":")[2] for label in labels] == ["asleep", "asleep"]
        done = processes.run("train", "--resume", "out")
        assert done.code == 0, done.err
        labels = [httpx.get(f"{url}/info").json()["label"] for url in (one, two)]
        assert all(label.endswith(":4:free") for label in labels)
    assert runs.ledger(Path("out")).next_step == 4


def test_a_server_killed_asleep_comes_back_with_the_current_weights_and_ends_with_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[ServerProcess] = []

    async def start(self: ServerProcess) -> None:
        await begin(self)
        started.append(self)

    def step(self: LocalTrainer, batch: Batch) -> Any:
        if batch.step == 1:
            assert started[-1]._supervisor is not None
            os.killpg(started[-1]._supervisor.pid, signal.SIGKILL)
        if batch.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return as_ever(self, batch)

    begin, as_ever = ServerProcess.start, LocalTrainer.step
    monkeypatch.setattr(ServerProcess, "start", start)
    monkeypatch.setattr(LocalTrainer, "step", step)
    launch = ("--engine.launch", "true", "--engine.kv_cache_bytes", str(2**21), "--engine.all_down_timeout_s", "600")
    assert train("--run-dir", "out", "--steps", "9", *SERVERS, *launch, *COLOCATED) == 130
    assert len(started) == 2 and all(server.exited for server in started), "Ctrl-C ends the server too"
    assert any("is back with weights version" in record.getMessage() for record in caplog.records)
    later = [e for e in runs.events(Path("out")) if isinstance(e, SegmentEnded) and e.segment.policy_version > 1]
    assert sum(len(e.segment.token_ids) for e in later) > 0
    assert runs.ledger(Path("out")).next_step == 4


def test_ranks_take_turns_with_the_engine_and_learn_the_same(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(self: FleetTrainer) -> None:
        give_back(self)
        rests.append(self.version)

    give_back, rests = FleetTrainer.rest, list[int]()
    monkeypatch.setattr(ranks, "_start", forked_ranks.start)
    monkeypatch.setattr(FleetTrainer, "rest", rest)
    argv = ("--deterministic", "true", "--rollout.strategy", "sync", "--trainer.num_devices", "2", "--steps", "3")
    for run, options in (("apart", ()), ("turns", COLOCATED)):
        assert train("--run-dir", run, *argv, *options) == 0
    assert rests == [0, 1, 2, 3]
    parts = [sorted(Path(run, "checkpoints", "step_3").glob("*.safetensors")) for run in ("apart", "turns")]
    apart, turns = ([(part.name, part.read_bytes()) for part in run] for run in parts)
    assert apart == turns and len(apart) > 1
