"""Runs whose trainer is on a cluster learn what a run of one machine learns, and what cannot work is refused at once.

A run that is killed and resumed is in ``test_whole.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollover import cli
from rollover.trainer import ranks
from rollover.trainer.checkpoint import read_manifest
from tests import runs
from tests.cluster.conftest import cluster_has, until
from tests.trainer import forked_ranks

ARGV = (
    *("--deterministic", "true", "--rollout.strategy", "sync", "--trainer.device", "cpu", "--trainer.num_devices", "2"),
)


def on(cluster: Any) -> tuple[str, ...]:
    return ("--cluster.address", cluster.address, "--cluster.trainer_resources.rank", "1")


def weights(run: str, step: int) -> dict[str, torch.Tensor]:
    folder = Path(run, "checkpoints", f"step_{step}")
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def sampled(run: str) -> list[Any]:
    return [(t.sample_id, t.token_ids, t.reward) for batch in runs.batches(Path(run)) for t in batch.trajectories]


def test_a_run_on_a_cluster_equals_one_machine(
    cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("train", "run.toml", *ARGV, "--steps", "2")
    assert cli.main([*argv, "--run-dir", "there", *on(cluster)]) == 0, capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_start", forked_ranks.start)
        assert cli.main([*argv, "--run-dir", "here"]) == 0
    assert sampled("there") == sampled("here")
    ours, theirs = weights("there", 2), weights("here", 2)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
    assert read_manifest(Path("there/checkpoints/step_2")).num_ranks == 2
    runs.ledger(Path("there"))
    until(lambda: cluster_has(cluster, CPU=8, rank=2), "what the run had is given back")


def test_a_dry_run_says_what_the_cluster_is_asked_for(
    cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "run.toml", "--dry-run", *ARGV, *on(cluster)]) == 0
    said = " ".join(capsys.readouterr().out.replace("#", " ").split())
    assert f"cluster: Ray at {cluster.address}, 3 nodes" in said
    assert "trainer: sharded over 2 processes on the cluster, each with CPU 1, rank 1" in said


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
        (
            ("--cluster.address", "127.0.0.1:9", "--cluster.placement_timeout_s", "2"),
            "cluster.address is 127.0.0.1:9, but this process is connected to",
        ),
    ],
)
def test_what_cannot_be_placed_is_said_before_anything_is_begun(
    cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    for dry in ((), ("--dry-run",)):
        assert cli.main(["train", "run.toml", "--run-dir", "out", *ARGV, *on(cluster), *argv, *dry]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()
