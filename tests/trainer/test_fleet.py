"""Ranks in processes of their own: what they train, publish and save, and what becomes of one that is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.errors import ConfigError, ModelError, RolloverError
from rollover.trainer.checkpoint import read_manifest, verify_files
from rollover.trainer.config import TrainerConfig
from rollover.trainer.fleet import FleetTrainer
from rollover.trainer.ranks import RankLost
from rollover.trainer.staging import Staging
from rollover.types import WasteCause
from tests.trainer.builders import make_batch, make_folder, make_trainer

BATCHES = [make_batch(step=step, num_groups=5) for step in range(4)]
ROOT = Path(__file__).parent.parent.parent
_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "policy")


@contextmanager
def fleet(folder: Path, tmp_path: Path, told: list[str] | None = None, **settings: Any) -> Iterator[FleetTrainer]:
    own: dict[str, Any] = {"temperature": 0.8, "max_response_tokens": 25, "num_steps": 10, "deterministic": True}
    own |= {key: settings.pop(key) for key in ("resume_from", "deterministic") if key in settings}
    config = TrainerConfig(**{"learning_rate": 1e-3, "device": "cpu", "num_devices": 2, **settings})
    opened = FleetTrainer(
        config,
        resolve(AlgorithmConfig()),
        folder,
        fallback=tmp_path / "staging",
        logs=tmp_path / "logs",
        notify=(told if told is not None else []).append,
        **own,
    )
    try:
        yield opened
    finally:
        pids = opened.pids
        opened.close()
        assert not any(map(is_there, pids)), "a rank outlived its trainer"
        assert not opened._staging.path.exists()


def is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def published(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weight_source().tensors()}


def alone(folder: Path, num: int) -> Any:
    trainer = make_trainer(folder)
    metrics = [trainer.step(batch).metrics for batch in BATCHES[:num]]
    return trainer, metrics


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() < 1e-6, name


def test_a_fleet_trains_publishes_and_saves_what_one_process_would(folder: Path, tmp_path: Path) -> None:
    expected, metrics = alone(folder, 2)
    prompts = [[3, 4, 5], [6, 7]]
    with fleet(folder, tmp_path, deterministic=False) as trainer:
        assert_close(published(trainer), dict(make_trainer(folder).weights()))
        for batch, theirs in zip(BATCHES, metrics, strict=False):
            assert trainer.version == batch.step
            found = trainer.step(batch)
            for name in theirs.keys() - {"time/step_s", "tokens/per_s"}:
                assert found.metrics[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
        source = trainer.weight_source()
        assert (source.manifest.version, source.folder) == (2, None)
        assert_close(dict(source.tensors()), dict(expected.weights()))
        logits = trainer.next_logits(prompts)
        assert logits.shape == (2, trainer.vocab_size)
        assert logits == pytest.approx(expected.next_logits(prompts), abs=1e-4)
        trainer.save(tmp_path / "step_2", {"journal": 17})
        manifest = read_manifest(tmp_path / "step_2")
        verify_files(tmp_path / "step_2", manifest)
        assert (manifest.version, manifest.num_ranks, manifest.extra) == (2, 2, {"journal": 17})
        skipped = trainer.skip(BATCHES[2])
        assert skipped.untrained == {WasteCause.SKIPPED: BATCHES[2].num_tokens} and trainer.version == 3
    one = make_trainer(folder, resume_from=tmp_path / "step_2")
    assert_close(dict(one.weights()), dict(expected.weights()))
    assert (tmp_path / "logs" / "trainer-rank-1.log").exists()


def test_a_batch_that_cannot_be_trained_is_told_as_by_one_process(folder: Path, tmp_path: Path) -> None:
    with (
        fleet(folder, tmp_path, learning_rate=1e38) as trainer,
        pytest.raises(RolloverError, match="not finite; lower"),
    ):
        trainer.step(BATCHES[0])


def test_only_one_error_is_told_of_a_model_that_no_rank_can_load(folder: Path, tmp_path: Path) -> None:
    bad = make_folder(tmp_path / "model")
    (bad / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"), fleet(bad, tmp_path):
        pass


# -- ranks that are lost ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after all batches."""
    with fleet(folder, tmp_path_factory.mktemp("undisturbed")) as trainer:
        for batch in BATCHES:
            trainer.step(batch)
        return published(trainer)


def in_the_middle(trainer: FleetTrainer, number: int) -> threading.Thread:
    """Send rank 1 a signal as soon as something is done after this call."""
    assert trainer._ranks is not None
    progress, pid, seen = trainer._ranks._progress, trainer.pids[1], trainer._ranks._progress.copy()

    def send() -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while (progress == seen).all() and time.monotonic() < deadline_s:
            pass
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "plan"),
    [
        (signal.SIGKILL, ["step", "publication", "checkpoint"]),
        (signal.SIGSTOP, ["checkpoint", "step"]),
    ],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_is_named_and_the_weights_are_those_that_they_would_have_been(
    folder: Path,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    number: signal.Signals,
    plan: list[str],
) -> None:
    told: list[str] = []
    seen: set[int] = set()
    with fleet(folder, tmp_path, told, rank_timeout_s=5.0) as trainer:
        for batch, doing in zip(BATCHES, [*plan, None, None], strict=False):
            works: dict[str, Callable[[], Any]] = {
                "step": partial(trainer.step, batch),
                "publication": trainer.weight_source,
                "checkpoint": partial(trainer.save, tmp_path / f"step_{batch.step + 1}"),
            }
            for name, work in works.items():
                thread = in_the_middle(trainer, number) if name == doing else None
                work()
                if thread is not None:
                    seen.update(trainer.pids)
                    thread.join()
                    if len(told) < 1 + plan.index(name):  # it was quicker than the signal
                        trainer.next_logits([[3]])
                    assert len(told) == 1 + plan.index(name)
        weights = published(trainer)
        assert not any(map(is_there, seen - {*trainer.pids})), "a rank that was given up is still there"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in undisturbed.items())
    for message in told:
        assert message.startswith("trainer: rank 1 of 2 ") and "(restart 1 of 3)" in message
        if number == signal.SIGKILL:
            assert "was killed (SIGKILL)" in message
        else:
            assert "did nothing for 5 s (trainer.rank_timeout_s) in " in message
            assert "it was stopped (SIGSTOP)" in message


def test_memory_that_runs_out_on_one_rank_is_tried_again_and_named(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    with fleet(folder, tmp_path, told, rank_timeout_s=10.0) as trainer:
        trainer.step(BATCHES[0])
        resource.prlimit(trainer.pids[1], resource.RLIMIT_AS, (1, 1))
        large = make_batch(step=1, num_groups=400, group_size=8)  # more memory than it has
        trainer.step(large)
        assert trainer.version == 2
    assert len(told) == 1 and "(restart 1 of 3)" in told[0]


def test_restarts_are_limited_and_the_last_loss_is_the_message(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    with fleet(folder, tmp_path, told, max_restarts=0) as trainer:
        os.kill(trainer.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^rank 0 of 2 was killed \(SIGKILL\)") as raised:
            trainer.step(BATCHES[0])
    assert raised.value.__notes__ == ["the ranks of the trainer were started 1 times in vain"]
    assert told == []


def test_ranks_end_with_the_process_that_leads_them(folder: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from tests.trainer.test_fleet import fleet\n"
        f"with fleet(Path({str(folder)!r}), Path({str(tmp_path)!r})) as trainer:\n"
        "    print(*trainer.pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    leader = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, timeout=_DEADLINE_S, text=True, check=False
    )
    pids = [int(pid) for pid in leader.stdout.split()]
    assert leader.returncode == -signal.SIGKILL and len(pids) == 2
    deadline_s = time.monotonic() + _DEADLINE_S
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "a rank outlived the process that led it"
        time.sleep(0.05)
    Staging(0, fallback=tmp_path).close()  # the next one clears away what it left
    assert not [
        path for path in Path("/dev/shm").glob("rollover-trainer-*") if not is_there(int(path.name.split("-")[2]))
    ]


# -- devices that are not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_devices": 999}, "trainer.num_devices is 999, but on the CPU of this machine at most"),
        ({"device": "meta"}, "trainer.device 'meta' cannot be used with trainer.num_devices = 2"),
        ({"device": "cuda:0"}, "trainer.device 'cuda:0' cannot be used with trainer.num_devices = 2"),
    ],
)
def test_devices_that_are_not_there_are_named(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised, fleet(folder, tmp_path, **settings):
        pass
    assert str(raised.value).startswith(message)


def test_gpus_and_nccl_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollover.trainer.devices import rank_devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert rank_devices(TrainerConfig(num_devices=2)) == ("cuda:0", "cuda:1")
    with pytest.raises(ConfigError, match="num_devices is 3, but 2 GPUs can be seen: lower it"):
        rank_devices(TrainerConfig(num_devices=3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="num_devices = 2 on GPUs needs a PyTorch with NCCL"):
        rank_devices(TrainerConfig(num_devices=2))
