"""Runs whose trainer is sharded: they learn what a run on one device learns, and go on from each other's checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollover.batch import Batch
from rollover.trainer import ranks
from rollover.trainer.checkpoint import read_manifest
from rollover.trainer.fleet import FleetTrainer
from tests import runs
from tests.runs import Say
from tests.trainer import forked_ranks

pytestmark = pytest.mark.usefixtures("experiment")

ARGV = ("--deterministic", "true", "--rollout.strategy", "sync")
TWO = ("--trainer.num_devices", "2")


def weights(run: str, step: int) -> dict[str, torch.Tensor]:
    folder = Path(run, "checkpoints", f"step_{step}")
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def sampled(run: str) -> list[Any]:
    return [(t.sample_id, t.token_ids, t.reward) for batch in runs.batches(Path(run)) for t in batch.trajectories]


def test_two_devices_equal_one_also_after_a_kill(refused: Say, done: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ("--checkpoint.every_steps", "2", "--checkpoint.keep_last", "9")
    done("train", "run.toml", "--run-dir", "one", *ARGV, *keep)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_start", forked_ranks.start)
        patch.setattr(FleetTrainer, "step", killing_at(3, FleetTrainer.step))
        argv = ("--logging.progress", "plain", *keep, *TWO)
        said = done("train", "run.toml", "--run-dir", "two", *ARGV, *argv)
    assert "rank 1 of 2 was killed (SIGKILL, possibly out of memory)" in said
    assert "ranks from step_2, 1 step to repeat" in said
    assert sampled("one") == sampled("two")
    for step in (2, 4):
        ours, theirs = weights("two", step), weights("one", step)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() < 1e-5, name
    assert runs.ledger(Path("one")).tokens.decoded == runs.ledger(Path("two")).tokens.decoded
    assert read_manifest(Path("two/checkpoints/step_4")).num_ranks == 2
    assert sorted(path.name for path in Path("two/logs").iterdir()) == ["trainer-rank-0.log", "trainer-rank-1.log"]

    # What matters to bits may not change; where bits do not matter it may.
    told = refused("train", "--resume", "two", "--trainer.num_devices", "1")
    assert "trainer.num_devices cannot change when a run is resumed" in told
    argv = ("--resume", "two", "--trainer.num_devices", "1", "--deterministic", "false", "--steps", "5")
    done("train", *argv)
    assert read_manifest(Path("two/checkpoints/step_5")).num_ranks == 1
    runs.ledger(Path("two"))


def killing_at(version: int, as_ever: Callable[[FleetTrainer, Batch], Any]) -> Callable[[FleetTrainer, Batch], Any]:
    def step(trainer: FleetTrainer, batch: Batch) -> Any:
        if batch.step == version:
            os.kill(trainer.pids[1], signal.SIGKILL)
        return as_ever(trainer, batch)

    return step


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--trainer.num_devices", "999"), "trainer.num_devices is 999, but at most"),
        (("--sft.num_devices", "999"), "sft.num_devices is 999, but at most"),
        ((*TWO, "--trainer.device", "cuda"), "trainer.num_devices is 2, but 0 GPUs can be seen: lower it"),
        (
            ("--trainer.num_devices", "4", "--trainer.context_parallel", "4"),
            "trainer.context_parallel is 4, but the model has 4 attention heads and 2 key-value heads, which are divided"
            " among the devices: set it to a divisor of both (1, 2)",
        ),
        (("--sft.num_devices", "4", "--sft.context_parallel", "4"), "sft.context_parallel is 4, but the model has 4"),
        (
            ("--trainer.lora.targets", '["q_proj", "query"]'),
            "trainer.lora.targets names 'query', which the model does not have; its matrices: q_proj, k_proj, v_proj, o_proj,"
            " gate_proj, up_proj, down_proj, lm_head",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_begins(refused: Say, argv: tuple[str, ...], message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    for dry in ((), ("--dry-run",)):
        said = refused("train", "run.toml", "--run-dir", "out", "--trainer.device", "cpu", *argv, *dry)
        assert message in " ".join(said.split())
    assert not Path("out").exists()


def test_a_dry_run_says_where_the_trainer_is(done: Say) -> None:
    said = done("train", "run.toml", "--dry-run", "--trainer.device", "cpu", *TWO)
    assert "trainer: sharded over 2 devices (cpu, cpu), one process each" in " ".join(said.split())
    said = done("train", "run.toml", "--dry-run", *TWO, "--trainer.context_parallel", "2")
    assert "trainer: each pass is shared by 2 devices, along the sequence" in " ".join(said.split())
