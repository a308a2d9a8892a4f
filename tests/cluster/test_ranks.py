"""Ranks on the nodes of a cluster: they train, publish and save what ranks of one machine do, and are replaced when
they are lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.cluster import files
from rollover.cluster.config import ClusterConfig
from rollover.cluster.nodes import NotPlaced
from rollover.cluster.ranks import RayLauncher
from rollover.errors import ConfigError
from rollover.trainer import ranks
from rollover.trainer.checkpoint import read_manifest, verify_files
from rollover.trainer.config import TrainerConfig
from rollover.trainer.fleet import FleetTrainer
from rollover.trainer.setup import TrainingSetup
from tests.cluster.conftest import add_node, cluster_has, remove_nodes, until
from tests.speed import within
from tests.trainer import forked_ranks
from tests.trainer.builders import make_batch, make_folder
from tests.trainer.test_fleet import PATIENCE_S, is_there, published

BATCHES = [make_batch(step=step, num_groups=5) for step in range(2)]
PROMPTS = [[3, 4, 5], [6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "policy")


@contextmanager
def fleet(folder: Path, tmp_path: Path, cluster: ClusterConfig | None, told: list[str], **given: Any) -> Iterator[Any]:
    config = TrainerConfig(**{"learning_rate": 1e-3, "device": "cpu", "num_devices": 2, **given})
    launcher = None
    if cluster is not None:
        timeout_s, file = config.rank_timeout_s, folder / "config.json"
        launcher = RayLauncher(cluster, config, timeout_s=timeout_s, run=file, notify=told.append)
    algorithm = resolve(AlgorithmConfig())
    trainer = FleetTrainer(
        TrainingSetup(
            config=config,
            algorithm=algorithm,
            temperature=0.8,
            max_response_tokens=25,
            num_steps=10,
            deterministic=True,
        ),
        folder,
        fallback=tmp_path / "staging",
        logs=tmp_path / "logs",
        notify=told.append,
        launcher=launcher,
    )
    try:
        yield trainer
    finally:
        trainer.close()


def test_ranks_on_two_nodes_equal_ranks_of_one_machine_also_after_losses(
    cluster: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is stopped, and in the end one is killed when there is no room for them any more."""
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_start", forked_ranks.start)
        with fleet(folder, tmp_path, None, []) as local:
            trained = [local.step(batch).metrics for batch in BATCHES]
            expected, logits = published(local), local.next_logits(PROMPTS)
    told: list[str] = []
    nodes = [add_node(cluster, {"spot": 1}) for _ in range(2)]
    settings = ClusterConfig(address=cluster.address, trainer_resources={"spot": 1}, placement_timeout_s=within(60.0))
    try:
        with fleet(folder, tmp_path, settings, told, rank_timeout_s=2 * PATIENCE_S) as trainer:
            assert len({host.node_id for host in trainer._ranks._hosts}) == 2
            assert told.pop(0).startswith("trainer: rank 0 on node ")
            metrics = [trainer.step(BATCHES[0]).metrics]
            trainer.save(tmp_path / "step_1", {"journal": 17})

            stopped = trainer.pids[0]
            trainer._ranks._timeout_s = SILENCE_S  # these have started
            os.kill(stopped, signal.SIGSTOP)
            metrics.append(trainer.step(BATCHES[1]).metrics)
            assert not is_there(stopped)

            source = trainer.weight_source()
            assert source.manifest.version == 2
            ours = {name: tensor.clone() for name, tensor in source.tensors()}
            assert ours.keys() == expected.keys()
            assert [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])] == []
            assert (trainer.next_logits(PROMPTS) == logits).all()

            last, launcher = trainer.pids, trainer._launcher
            os.kill(last[1], signal.SIGKILL)
            launcher._cluster = replace(settings, placement_timeout_s=1.0)
            launcher._demand = replace(launcher._demand, bundle={"CPU": 1.0, "spot": 2.0})
            no_room = r"^the trainer needs 2 bundles of CPU 1, spot 2 .*had no room within 1 s"
            with pytest.raises(NotPlaced, match=no_room):
                trainer.step(make_batch(step=2))
    finally:
        remove_nodes(cluster, nodes)
    for message, (fate, rest) in zip(told, LOSSES, strict=True):
        assert re.match(rf"trainer: rank \d of 2 {fate}", message), message
        assert message.partition("restarting all 2 ranks from ")[2] == f"step_1, {rest} to repeat (restart 1 of 3)"
    for there, here in zip(metrics, trained, strict=True):
        assert there.keys() == here.keys()
        assert {k for k, v in there.items() if v != here[k]} <= {"time/step_s", "tokens/per_s"}
    manifest = read_manifest(tmp_path / "step_1")
    verify_files(tmp_path / "step_1", manifest)
    assert (manifest.version, manifest.num_ranks, manifest.extra) == (1, 2, {"journal": 17})
    until(lambda: not any(map(is_there, last)), "the ranks end")


SILENCE_S = float(round(within(0.7)))
LOSSES = (
    (rf"did nothing for {SILENCE_S:g} s \(trainer.rank_timeout_s\) in step 1: it was stopped", "0 steps"),
    (r"was killed \(SIGKILL, possibly out of memory\) in ", "1 step"),
)


def test_a_node_that_does_not_see_the_run_is_named(
    cluster: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of this machine see the folder; the driver is given other digests."""
    monkeypatch.setattr(files, "sampled_digest", lambda path: "other than there")
    settings = ClusterConfig(address=cluster.address, trainer_resources={"one": 1})
    with (
        pytest.raises(ConfigError, match=r"node \S+ does not see the files of .* \(config\.json\): ranks read the"),
        fleet(folder, tmp_path, settings, [], num_devices=1),
    ):
        pass
    until(lambda: cluster_has(cluster, CPU=8, one=4), "its place is given back")
