"""Ranks on the nodes of a cluster: they train, publish and save what ranks of one machine do, and are replaced when
they are lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
from rollover.trainer.sft import run_sft
from tests.cluster.conftest import add_node, cluster_has, until
from tests.speed import within
from tests.trainer import forked_ranks
from tests.trainer.builders import make_batch, make_folder, make_trainer
from tests.trainer.test_fleet import PATIENCE_S
from tests.trainer.test_sft import EXAMPLES
from tests.trainer.test_sft import config as sft_config

BATCHES = [make_batch(step=step, num_groups=5) for step in range(3)]
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


def published(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weight_source().tensors()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


def test_ranks_on_two_nodes_equal_ranks_of_one_machine_also_after_losses(
    cluster: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is stopped, the node of another goes, and in the end one is killed when there is no room for them any more."""
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
            assert len({*trainer._ranks.nodes}) == 2
            assert told.pop(0).startswith("trainer: rank 0 on node ")
            metrics = [trainer.step(BATCHES[0]).metrics]
            trainer.save(tmp_path / "step_1", {"journal": 17})

            stopped = trainer.pids[0]
            trainer._ranks._timeout_s = SILENCE_S  # these have started
            os.kill(stopped, signal.SIGSTOP)
            metrics.append(trainer.step(BATCHES[1]).metrics)
            assert not is_there(stopped)

            lose(cluster, nodes.pop(), trainer)
            with ThreadPoolExecutor(1) as pool:
                stepping = pool.submit(trainer.step, BATCHES[2])
                until(lambda: len(told) == 2, "the loss is told")
                nodes.append(add_node(cluster, {"spot": 1}))
                metrics.append(stepping.result().metrics)

            source = trainer.weight_source()
            assert source.manifest.version == 3
            assert_equal({name: tensor.clone() for name, tensor in source.tensors()}, expected)
            assert (trainer.next_logits(PROMPTS) == logits).all()

            last, launcher = trainer.pids, trainer._launcher
            os.kill(last[1], signal.SIGKILL)
            launcher._cluster = replace(settings, placement_timeout_s=1.0)
            launcher._demand = replace(launcher._demand, bundle={"CPU": 1.0, "spot": 2.0})
            no_room = r"^the trainer needs 2 bundles of CPU 1, spot 2 .*had no room within 1 s"
            with pytest.raises(NotPlaced, match=no_room):
                trainer.step(make_batch(step=3))
    finally:
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
    for message, (fate, rest) in zip(told, LOSSES, strict=True):
        assert re.match(rf"trainer: rank \d of 2 {fate}", message), message
        assert message.partition("restarting all 2 ranks from ")[2] == f"step_1, {rest} to repeat (restart 1 of 3)"
    for ours, theirs in zip(metrics, trained, strict=True):
        assert {k: v for k, v in ours.items() if not is_time(k)} == {k: v for k, v in theirs.items() if not is_time(k)}
    manifest = read_manifest(tmp_path / "step_1")
    verify_files(tmp_path / "step_1", manifest)
    assert (manifest.version, manifest.num_ranks, manifest.extra) == (1, 2, {"journal": 17})
    until(lambda: not any(map(is_there, last)), "the ranks end")


SILENCE_S = float(round(within(0.7)))
LOSSES = (
    (rf"did nothing for {SILENCE_S:g} s \(trainer.rank_timeout_s\) in step 1: it was stopped", "0 steps"),
    (r"was lost with its host on node \S+ \((it cannot be|that node is)", "1 step"),
    (r"was killed \(SIGKILL, possibly out of memory\) in ", "2 steps"),
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


def test_a_trainer_of_one_device_is_placed_and_equals_one_in_process(
    cluster: Any, folder: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    settings = ClusterConfig(address=cluster.address, trainer_resources={"one": 1})
    with fleet(folder, tmp_path, settings, told, num_devices=1) as trainer:
        until(lambda: cluster_has(cluster, CPU=7, one=3, two=4), "its place is accounted for")
        here = make_trainer(folder, deterministic=True)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for batch in BATCHES[:2]:
                trainer.step(batch)
                here.step(batch)
        finally:
            torch.set_num_threads(num_threads)
        assert_equal(published(trainer), dict(here.weights()))
        trainer.save(tmp_path / "step_2")
        assert_equal(
            {name: tensor.float() for name, tensor in load_file(tmp_path / "step_2" / "model.safetensors").items()},
            dict(here.weights()),
        )
    assert len(told) == 1 and told[0].startswith("trainer: rank 0 on node ")
    until(lambda: cluster_has(cluster, CPU=8, one=4), "what it had is given back")


def test_a_warm_up_on_the_cluster_equals_one_machine(
    cluster: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmup = sft_config(num_steps=3, batch_size=2, learning_rate=1e-3, device="cpu", num_devices=2)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_start", forked_ranks.start)
        run_sft(folder, EXAMPLES, warmup, output=tmp_path / "here", deterministic=True, logs=tmp_path / "logs")
    told: list[str] = []
    settings = ClusterConfig(address=cluster.address, trainer_resources={"rank": 1})
    launcher = RayLauncher(settings, warmup, timeout_s=within(20.0), run=folder / "config.json", notify=told.append)
    run_sft(folder, EXAMPLES, warmup, output=tmp_path / "there", deterministic=True, launcher=launcher)
    assert len(told) == 1 and told[0].startswith("warm-up: rank 0 on node ")
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")} for name in ("there", "here")
    )
    assert ours == theirs and len(ours) == 2
    until(lambda: cluster_has(cluster, CPU=8, rank=2), "what the warm-up had is given back")


def is_time(metric: str) -> bool:
    return metric in ("time/step_s", "tokens/per_s")


def lose(cluster: Any, node: Any, trainer: Any) -> None:
    """Remove a node, and wait until its rank is gone: a step takes less time than the loss."""
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: not all(map(is_there, trainer.pids)), "a rank ends with its node")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
