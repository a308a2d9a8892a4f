"""Runs whose trainer is on a cluster learn what a run of one machine learns, and what cannot work is refused at once.

A run that is killed and resumed is in ``test_whole.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from tests import runs
from tests.cluster.conftest import cluster_has, until

ARGV = (
    *("--deterministic", "true", "--rollout.strategy", "sync", "--trainer.device", "cpu", "--trainer.num_devices", "2"),
)


def on(cluster: Any) -> tuple[str, ...]:
    return ("--cluster.address", cluster.address, "--cluster.trainer_resources.rank", "1")


def sampled(run: str) -> list[Any]:
    return [(t.sample_id, t.token_ids, t.rollout_logprobs) for b in runs.batches(Path(run)) for t in b.trajectories]


def test_a_run_with_its_warm_up_on_a_cluster_equals_one_in_process(
    cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warmup = ("--sft.num_steps", "2", "--sft.batch_size", "4", "--sft.learning_rate", "1e-2", "--sft.device", "cpu")
    argv = ("train", "run.toml", *ARGV, *warmup, "--trainer.num_devices", "1", "--steps", "2")
    assert cli.main([*argv, "--run-dir", "there", "--logging.progress", "plain", *on(cluster)]) == 0, said(capsys)
    told = said(capsys)
    assert "warm-up: rank 0 on node " in told and "trainer: rank 0 on node " in told
    assert cli.main([*argv, "--run-dir", "here"]) == 0, said(capsys)
    assert sampled("there") == sampled("here")
    assert runs.weights(Path("there"), 2) == runs.weights(Path("here"), 2)
    runs.ledger(Path("there"))
    until(lambda: cluster_has(cluster, CPU=8, rank=2), "what the run had is given back")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).replace("#", " ").split())


def test_a_dry_run_says_what_is_asked_for(cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.toml", "--dry-run", *ARGV, *on(cluster)]) == 0
    told = said(capsys)
    assert f"cluster: Ray at {cluster.address}, 3 nodes" in told
    assert "trainer: sharded over 2 processes on the cluster, each with CPU 1, rank 1" in told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--trainer.num_devices", "3"),
            "the trainer needs 3 bundles of CPU 1, rank 1 (trainer.num_devices, cluster.trainer_resources), but the"
            " nodes of the Ray cluster have room for 2 of 3: node",
        ),
        (("--trainer.device", "cuda"), "the trainer needs 2 bundles of GPU 1, rank 1"),
        (("--trainer.device", "cuda:1"), "trainer.device 'cuda:1' cannot be used on a cluster: set 'auto', 'cuda' or"),
    ],
)
def test_what_cannot_be_placed_is_said_before_anything_is_begun(
    cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    for dry in ((), ("--dry-run",)):
        assert cli.main(["train", "run.toml", "--run-dir", "out", *ARGV, *on(cluster), *argv, *dry]) == 2
        assert message in said(capsys)
    assert not Path("out").exists()
