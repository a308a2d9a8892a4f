"""Runs whose engine and trainer take turns on the same devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.rollout.strategies import STRATEGIES
from rollover.trainer.local import LocalTrainer
from rollover.types import Batch
from tests import runs

COLOCATED = ("--engine.colocated", "true")
OVERLAPPING = {kind for kind, strategy in STRATEGIES.items() if strategy.builds.on_full.name == "KEEP"}


def train(*argv: str) -> int:
    return cli.main(["train", "run.toml", *argv])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to the memory, in order; in a step the engine must have none."""
    log: list[str] = []
    engines: list[EmbeddedEngine] = []

    def opened(self: EmbeddedEngine, core: Any, *args: Any, **settings: Any) -> None:
        engines.append(self)
        init(self, core, *args, **settings)

    def step(self: LocalTrainer, batch: Batch) -> Any:
        log.append("asleep" if engines[-1]._core._awake is None else "awake")
        log.append(f"step {batch.step}")
        return as_ever(self, batch)

    def logits(self: LocalTrainer, prompts: Any) -> Any:
        log.append("check: asleep" if engines[-1]._core._awake is None else "check: awake")
        return compute(self, prompts)

    def rest(self: LocalTrainer) -> None:
        give_back(self)
        assert all(p.grad is None for p in self._model.parameters())
        log.append("rest")

    async def load(self: EmbeddedEngine, version: int, source: Any) -> None:
        log.append(f"load {version}")
        await take(self, version, source)

    init, as_ever, compute, give_back, take = (
        EmbeddedEngine.__init__,
        LocalTrainer.step,
        LocalTrainer.next_logits,
        LocalTrainer.rest,
        EmbeddedEngine.load,
    )
    monkeypatch.setattr(EmbeddedEngine, "__init__", opened)
    monkeypatch.setattr(LocalTrainer, "step", step)
    monkeypatch.setattr(LocalTrainer, "next_logits", logits)
    monkeypatch.setattr(LocalTrainer, "rest", rest)
    monkeypatch.setattr(EmbeddedEngine, "load", load)
    return log


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_takes_turns_with_the_trainer_or_is_refused_at_the_start(
    experiment: Path, capsys: pytest.CaptureFixture[str], log: list[str], strategy: str
) -> None:
    code = train("--run-dir", "out", "--rollout.strategy", strategy, *COLOCATED, "--steps", "3")
    if strategy in OVERLAPPING:
        assert code == 2
        err = capsys.readouterr().err
        assert f"rollout.strategy '{strategy}' generates while the trainer trains" in err
        assert all((kind in err) == (kind not in OVERLAPPING) for kind in STRATEGIES if kind != strategy)
        assert not Path("out").exists()
        return
    assert code == 0, capsys.readouterr().err
    turns = [what for step in range(3) for what in ("asleep", f"step {step}", "rest", f"load {step + 1}")]
    assert log == ["check: awake", "rest", "load 0", "load 0", *turns]
    ledger = runs.ledger(Path("out"))
    assert ledger.next_step == 3
    assert ledger.tokens.decoded == ledger.tokens.trained + ledger.tokens.live + sum(ledger.tokens.wasted.values())
    assert all("time/sleep_s" in row for row in runs.rows(Path("out")))


def test_some_strategies_can_be_colocated_and_some_cannot() -> None:
    assert {"bounded_async", "inflight"} == OVERLAPPING


@pytest.mark.parametrize("strategy", ["sync", "april", "rollover"])
def test_a_deterministic_run_learns_the_same_to_the_bit(experiment: Path, strategy: str) -> None:
    argv = ("--deterministic", "true", "--rollout.strategy", strategy)
    assert train("--run-dir", "apart", *argv) == 0
    assert train("--run-dir", "turns", *argv, *COLOCATED) == 0
    assert runs.weights(Path("apart"), 4) == runs.weights(Path("turns"), 4)
    apart, turns = (
        [
            [(t.sample_id, t.token_ids, t.rollout_logprobs) for t in batch.trajectories]
            for batch in runs.batches(Path(r))
        ]
        for r in ("apart", "turns")
    )
    assert apart == turns


def test_whoever_reads_the_plan_is_told_once_what_taking_turns_costs(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--dry-run", *COLOCATED, "--rollout.strategy", "april") == 0
    out = capsys.readouterr().out
    assert out.count("take turns") == 1
    assert "what strategy april leaves unfinished is prefilled again in the next round" in out
    assert train("--dry-run", *COLOCATED, "--rollout.strategy", "sync") == 0
    assert "prefilled again" not in capsys.readouterr().out


def test_a_cache_that_is_to_be_kept_cannot_be_given_back(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*COLOCATED, "--engine.kv_on_update", "keep") == 2
    assert "kv_on_update = 'keep' cannot go with colocated = true" in capsys.readouterr().err
