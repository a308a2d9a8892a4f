"""Ranks in processes of their own: what they train, publish and save, and how a lost rank is replaced."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rollover.batch import WasteCause
from rollover.errors import ConfigError, ModelError, ResourceError, RolloverError
from rollover.trainer import rank as rank_module
from rollover.trainer import ranks, staging
from rollover.trainer.checkpoint import read_manifest, verify_files
from rollover.trainer.config import TrainerConfig
from rollover.trainer.fleet import FleetTrainer
from rollover.trainer.leading import RankLost
from rollover.trainer.local import LocalTrainer
from rollover.trainer.messages import Failed
from tests.speed import within
from tests.trainer import forked_ranks
from tests.trainer.builders import (
    apart_from_time,
    assert_same,
    clones,
    make_batch,
    make_folder,
    make_setup,
    make_trainer,
    untrainable,
)

BATCHES = [make_batch(step=step, num_groups=5) for step in range(4)]
PROMPTS = [[3, 4, 5], [6, 7]]
ROOT = Path(__file__).parent.parent.parent
_DEADLINE_S = within(60.0)
PATIENCE_S = float(round(within(1.7)))
"""``rank_timeout_s`` where a rank is stopped: many times what a step takes."""


class Undisturbed(NamedTuple):
    metrics: list[Any]
    published: dict[str, torch.Tensor]
    """At version 2, as ``logits`` and ``saved``."""
    logits: Any
    saved: Path
    weights: dict[str, torch.Tensor]
    """At version 4."""


@contextmanager
def fleet(folder: Path, tmp_path: Path, told: list[str] | None = None, **settings: Any) -> Iterator[FleetTrainer]:
    resume_from = settings.pop("resume_from", None)
    opened = FleetTrainer(
        make_setup(**{"num_devices": 2, "deterministic": True, **settings}),
        folder,
        resume_from=resume_from,
        fallback=tmp_path / "staging",
        logs=tmp_path / "logs",
        notify=(told if told is not None else []).append,
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
    return clones(dict(trainer.weight_source().tensors()))


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() < 1e-6, name


# -- ranks that nothing happens to ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetTrainer]:
    """A fleet that the tests of this section share; it is at version 2 when the first begins."""
    with fleet(folder, tmp_path_factory.mktemp("undisturbed")) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def after_all(undisturbed: FleetTrainer, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What the shared fleet has at version 2, and its weights after all batches."""
    trainer, saved = undisturbed, tmp_path_factory.mktemp("saved") / "step_2"
    assert_close(published(trainer), dict(make_trainer(folder).weights()))
    metrics = [trainer.step(batch).metrics for batch in BATCHES[:2]]
    source = trainer.weight_source()
    assert (source.manifest.version, source.folder) == (2, None)
    logits = trainer.next_logits(PROMPTS)
    trainer.save(saved, {"journal": 17})
    metrics += [trainer.step(batch).metrics for batch in BATCHES[2:]]
    assert trainer.version == 4
    return Undisturbed(metrics, dict(source.tensors()), logits, saved, published(trainer))


def test_a_fleet_does_what_one_process_would(folder: Path, undisturbed: FleetTrainer, after_all: Undisturbed) -> None:
    expected = make_trainer(folder)
    for batch, ours in zip(BATCHES[:2], after_all.metrics, strict=False):
        theirs = apart_from_time(expected.step(batch).metrics)
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert_close(after_all.published, dict(expected.weights()))
    assert after_all.logits.shape == (2, undisturbed.vocab_size)
    assert after_all.logits == pytest.approx(expected.next_logits(PROMPTS), abs=1e-4)
    manifest = read_manifest(after_all.saved)
    verify_files(after_all.saved, manifest)
    assert (manifest.version, manifest.num_ranks, manifest.extra) == (2, 2, {"journal": 17})
    one = make_trainer(folder, resume_from=after_all.saved)
    assert_close(dict(one.weights()), dict(expected.weights()))
    assert (undisturbed._launcher._logs / "trainer-rank-1.log").exists()


def test_a_batch_is_counted_without_training_it(undisturbed: FleetTrainer, after_all: Undisturbed) -> None:
    version = undisturbed.version
    batch = make_batch(step=version)
    skipped = undisturbed.skip(batch)
    assert skipped.untrained == {WasteCause.SKIPPED: batch.num_tokens} and undisturbed.version == version + 1
    assert_same(published(undisturbed), after_all.weights)


def test_a_batch_that_cannot_be_trained_is_told_as_by_one_process(undisturbed: FleetTrainer) -> None:
    with pytest.raises(RolloverError, match=r"^sample g2\.1 cannot be trained on: "):
        undisturbed.step(untrainable(make_batch(step=undisturbed.version)))
    assert undisturbed.pids == []


def test_only_one_error_is_told_of_a_model_that_no_rank_can_load(folder: Path, tmp_path: Path) -> None:
    bad = make_folder(tmp_path / "model")
    (bad / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"), fleet(bad, tmp_path):
        pass


# -- ranks that are lost ----------------------------------------------------------------------------------------------


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


class Loss(NamedTuple):
    """How rank 1 is lost, and in which work."""

    number: signal.Signals
    work: str


LOSSES = [
    [Loss(signal.SIGKILL, "step"), Loss(signal.SIGKILL, "publication")],
    [Loss(signal.SIGSTOP, "checkpoint")],
    [],
    [Loss(signal.SIGKILL, "step"), Loss(signal.SIGKILL, "checkpoint")],
]
"""Of each version, from 0."""


def test_a_lost_rank_changes_no_weight(folder: Path, tmp_path: Path, after_all: Undisturbed, forked: None) -> None:
    told: list[str] = []
    seen: set[int] = set()
    with fleet(folder, tmp_path, told, rank_timeout_s=PATIENCE_S) as trainer:
        for batch, losses in zip(BATCHES, LOSSES, strict=True):
            works: dict[str, Callable[[], Any]] = {
                "step": partial(trainer.step, batch),
                "publication": trainer.weight_source,
                "checkpoint": partial(trainer.save, tmp_path / f"step_{batch.step + 1}"),
            }
            for name, work in works.items():
                numbers = [loss.number for loss in losses if loss.work == name]
                threads = [in_the_middle(trainer, number) for number in numbers]
                seen.update(trainer.pids)
                num_told = len(told)
                work()
                for thread in threads:
                    thread.join()
                    if len(told) == num_told:  # it was quicker than the signal
                        trainer.next_logits(PROMPTS)
                assert len(told) == num_told + len(threads)
        assert not any(map(is_there, seen - {*trainer.pids})), "a rank that was given up is still there"
        assert_same(published(trainer), after_all.weights)
    for message, loss in zip(told, [loss for losses in LOSSES for loss in losses], strict=True):
        assert message.startswith("trainer: rank 1 of 2 ") and " of 3)" in message
        if loss.number == signal.SIGKILL:
            assert "was killed (SIGKILL, possibly out of memory) in " in message
        else:
            assert f"did nothing for {PATIENCE_S:g} s (trainer.rank_timeout_s) in " in message
            assert "it was stopped (SIGSTOP)" in message


def test_a_rank_that_stops_at_its_start_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(rank: int, logs: Path | None) -> ranks._Process:
        process = forked_ranks.start(rank, logs)
        if rank == 1 and not told:
            os.kill(process.popen.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(ranks, "_start", start)
    told: list[str] = []
    with fleet(folder, tmp_path, told, rank_timeout_s=PATIENCE_S) as trainer:
        assert trainer.version == 0
    assert len(told) == 1
    assert told[0].startswith(f"trainer: rank 1 of 2 did nothing for {PATIENCE_S:g} s (trainer.rank_timeout_s)")


def test_memory_that_runs_out_on_one_rank_is_tried_again_and_named(folder: Path, tmp_path: Path, forked: None) -> None:
    told: list[str] = []
    with fleet(folder, tmp_path, told) as trainer:
        trainer.step(BATCHES[0])
        resource.prlimit(trainer.pids[1], resource.RLIMIT_AS, (1, 1))
        trainer.step(make_batch(step=1, num_groups=200, group_size=8))  # more memory than it has
        assert trainer.version == 2
    assert len(told) == 1 and "(restart 1 of 3)" in told[0]


def failing(folder: Path, error: Exception, times: int, rank: int) -> None:
    """Have rank 1 raise ``error`` in the middle of step 1, so many times in all, and write down what others tell."""
    accumulate, refused = LocalTrainer._accumulate, rank_module._refused

    def failing_accumulate(trainer: Any, *args: Any) -> Any:
        count = len(list(folder.glob("raised-*")))
        if trainer.version == 1 and count < times:
            (folder / f"raised-{count}").touch()
            raise error
        return accumulate(trainer, *args)

    def noted(error: BaseException) -> Failed:
        answer = refused(error)
        (folder / "rank-0").write_text(f"{answer.is_secondary} {answer.message}")
        return answer

    if rank == 0:
        rank_module._refused = noted
    else:
        LocalTrainer._accumulate = failing_accumulate  # type: ignore[method-assign]


def test_memory_that_runs_out_again_ends_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = partial(failing, tmp_path, torch.OutOfMemoryError("CUDA out of memory"), 9)
    monkeypatch.setattr(ranks, "_start", partial(forked_ranks.start, prepare=prepare))
    told: list[str] = []
    with fleet(folder, tmp_path, told) as trainer:
        trainer.step(BATCHES[0])
        with pytest.raises(ResourceError, match=r"^rank 1 of 2: training ran out of memory: lower trainer\.") as raised:
            trainer.step(BATCHES[1])
    assert raised.value.__notes__ == ["it ran out again after the trainer's ranks were restarted"]
    assert len(told) == 1 and "trainer: rank 1 of 2: training ran out of memory" in told[0]
    assert "(restart 1 of 3)" in told[0] and len(list(tmp_path.glob("raised-*"))) == 2


def test_a_rank_cut_off_is_not_blamed_for_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = partial(failing, tmp_path, KeyError("broken"), 1)
    monkeypatch.setattr(ranks, "_start", partial(forked_ranks.start, prepare=prepare))
    told: list[str] = []
    with fleet(folder, tmp_path, told) as trainer:
        for batch in BATCHES[:2]:
            trainer.step(batch)
    (message,) = told
    assert message.startswith("trainer: rank 1 of 2 failed in step 1: KeyError: 'broken'; ")
    assert (tmp_path / "rank-0").read_text().startswith("True RuntimeError: ")  # in a pass: FSDP2's own collective


def test_restarts_are_limited_and_the_last_loss_is_the_message(folder: Path, tmp_path: Path, forked: None) -> None:
    told: list[str] = []
    with fleet(folder, tmp_path, told, max_restarts=0) as trainer:
        os.kill(trainer.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^rank 0 of 2 was killed \(SIGKILL, .* memory\) in step 0") as raised:
            trainer.step(BATCHES[0])
    (note,) = raised.value.__notes__
    assert note == "the trainer's ranks were lost once without a new step in between (trainer.max_restarts = 0)"
    assert told == []


def test_a_rank_ends_with_its_leading_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_SHARED_MEMORY", tmp_path)  # fleets of tests beside this one clear the shared one
    code = (
        "import os, signal; from pathlib import Path; from tests.trainer.test_fleet import fleet\n"
        f"from rollover.trainer import staging; staging._SHARED_MEMORY = Path({str(tmp_path)!r})\n"
        f"with fleet(Path({str(folder)!r}), Path({str(tmp_path)!r}), num_devices=1) as trainer:\n"
        "    print(trainer._staging.path, *trainer.pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    leader = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, timeout=_DEADLINE_S, text=True, check=False
    )
    left, pid = leader.stdout.split()
    assert leader.returncode == -signal.SIGKILL
    deadline_s = time.monotonic() + _DEADLINE_S
    while is_there(int(pid)):
        assert time.monotonic() < deadline_s, "the rank outlived the process that led it"
        time.sleep(0.05)
    assert Path(left).exists()
    staging.Staging(0, fallback=tmp_path).close()  # the next one clears away what it left
    assert not Path(left).exists()


# -- devices that are not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_devices": 999}, "trainer.num_devices is 999, but at most"),
        ({"device": "meta"}, "trainer.device 'meta' cannot be used with trainer.num_devices = 2"),
        ({"device": "cuda:0"}, "trainer.device 'cuda:0' cannot be used with trainer.num_devices = 2"),
    ],
)
def test_missing_devices_are_named(folder: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
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
