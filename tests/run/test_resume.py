"""Runs that are killed or interrupted, and go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rollover.batch import WasteCause
from rollover.rollout.events import (
    BatchConsumed,
    CheckpointSaved,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from tests import runs
from tests.runs import Cue, Processes, succeeded

MOMENTS = {
    "with a new directory": Cue(VersionPublished, 1, before=True),
    "before the first step": Cue(SampleStarted, 1, before=True),
    "in the first rollout": Cue(SampleScored, 3),
    "with a batch on record and no step taken": Cue(BatchConsumed, 1),
    "between a step and its publication": Cue(VersionPublished, 3, before=True),
    "in mid-rollout, with samples parked": Cue(SegmentEnded, 30),
    "with a checkpoint that the journal does not know": Cue(CheckpointSaved, 1, before=True),
    "right after a checkpoint": Cue(CheckpointSaved, 1),
    "between checkpoint and the next": Cue(BatchConsumed, 1),
}


def test_killed_at_every_kind_of_moment_a_deterministic_run_ends_the_same(processes: Processes) -> None:
    argv = ["train", "run.toml", "--deterministic", "true", "--rollout.strategy", "rollover", "--steps", "14"]
    succeeded(processes.run(*argv, "--run-dir", "whole"))
    steps = []
    for number, (moment, cue) in enumerate(MOMENTS.items()):
        resumed = ["train", "--resume", "killed"] if number else [*argv, "--run-dir", "killed"]
        assert processes.run(*resumed, kill_at=cue).code == -9, f"was not killed {moment}"
        steps.append(len(runs.batches(Path("killed"))))
        runs.ledger(Path("killed"))
    succeeded(processes.run("train", "--resume", "killed"))
    assert steps[-1] > 2, "it had come some way in spite of everything"
    for version in (12, 14):
        assert runs.weights(Path("killed"), version) == runs.weights(Path("whole"), version), version
    assert runs.sampled(Path("killed")) == runs.sampled(Path("whole"))
    runs.ledger(Path("killed"))


def test_a_killed_run_loses_no_prompt_and_replays_its_consumed_batches(processes: Processes) -> None:
    killed = processes.run(
        *("train", "run.toml", "--run-dir", "out", "--rollout.strategy", "bounded_async"),
        *("--steps", "7", "--checkpoint.every_steps", "3"),
        kill_at=Cue(BatchConsumed, 5),
    )
    assert killed.code == -9
    before, batches = runs.ledger(Path("out")), runs.batches(Path("out"))
    assert before.next_step == 5
    succeeded(processes.run("train", "--resume", "out"))
    after = runs.ledger(Path("out"))
    assert runs.batches(Path("out"))[:5] == batches
    for cause in WasteCause:
        if cause is not WasteCause.ZERO_ADVANTAGE:  # more steps, more groups without a signal
            assert after.tokens.wasted[cause] == before.tokens.wasted[cause]
    assert after.next_group_id == after.num_consumed + after.num_unconsumed >= before.next_group_id
    assert [row["step"] for row in runs.rows(Path("out"))] == [0, 1, 2, 3, 3, 4, 5, 6]


def test_a_resumed_run_goes_on_past_the_checkpoint_it_came_from(processes: Processes) -> None:
    """Five checkpoints later the one it was resumed from is long deleted."""
    argv = ("--checkpoint.every_steps", "1", "--checkpoint.keep_last", "2", "--steps", "1")
    succeeded(processes.run("train", "run.toml", "--run-dir", "out", *argv))
    succeeded(processes.run("train", "--resume", "out", "--steps", "6"))
    assert {path.name for path in Path("out/checkpoints").iterdir()} == {"step_5", "step_6"}
    tokenizer = Path("out/checkpoints/step_6/tokenizer.json").read_text()
    assert tokenizer == Path("model/tokenizer.json").read_text()
    assert len(runs.batches(Path("out"))) == 6


def test_resuming_a_finished_run_says_so_and_changes_nothing(processes: Processes) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    succeeded(processes.run("train", "run.toml", "--logging.progress", "plain", "--run-dir", "out"))
    metrics = Path("out/metrics.jsonl").read_text()
    again = succeeded(processes.run("train", "--resume", "out"))
    assert "all 4 steps are done; for more: rollover train --resume out --steps N" in again.out
    assert Path("out/metrics.jsonl").read_text() == metrics
    succeeded(processes.run("train", "--resume", "out", "--steps", "5"))
    assert len(runs.batches(Path("out"))) == 5


def test_a_resumed_run_deletes_checkpoints_and_models_that_a_kill_left(processes: Processes) -> None:
    cue = Cue(CheckpointSaved, 2)
    killed = processes.run("train", "run.toml", "--run-dir", "out", "--checkpoint.keep_last", "1", kill_at=cue)
    assert killed.code == -9 and len(list(Path("out/checkpoints").iterdir())) == 2
    for name in (".partial-model-1f", ".partial-model-untrained-2e"):
        Path("out", name).mkdir()
    succeeded(processes.run("train", "--resume", "out"))
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step_4"]
    assert not list(Path("out").glob(".partial-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_end_finishes_cleanly_and_says_how_to_go_on(processes: Processes, number: int) -> None:
    cue = Cue(BatchConsumed, 2)
    stopped = processes.run("train", "run.toml", "--run-dir", "out", interrupt_at=cue, signals=[number])
    assert stopped.code == 128 + number, stopped.err
    assert "stopped; resume with: rollover train --resume out" in stopped.err
    assert Path("out/report.html").is_file() and Path("out/checkpoints/step_2").is_dir()
    ledger = runs.ledger(Path("out"))
    assert not ledger.running
    assert (
        "resumed at step 2/4" in succeeded(processes.run("train", "--resume", "out", "--logging.progress", "plain")).out
    )
    assert len(runs.batches(Path("out"))) == 4


def test_a_signal_in_mid_rollout_does_not_wait_for_the_batch(processes: Processes) -> None:
    cue = Cue(SegmentEnded, 1)
    stopped = processes.run("train", "run.toml", "--run-dir", "out", interrupt_at=cue, signals=[signal.SIGTERM])
    assert stopped.code == 143
    assert runs.batches(Path("out")) == [] and runs.ledger(Path("out")).tokens.live > 0
    succeeded(processes.run("train", "--resume", "out"))


def test_a_second_signal_ends_at_once_and_the_run_can_still_go_on(processes: Processes) -> None:
    cue, signals = Cue(BatchConsumed, 1), [signal.SIGINT, signal.SIGTERM]
    stopped = processes.run("train", "run.toml", "--run-dir", "out", interrupt_at=cue, signals=signals)
    assert stopped.code == 128 + signal.SIGTERM
    assert "rollover train --resume out" in stopped.err
    assert not Path("out/checkpoints").exists()
    succeeded(processes.run("train", "--resume", "out"))


def test_a_signal_in_the_warm_up_ends_it_at_once(processes: Processes) -> None:
    argv = ["--sft.num_steps", "100000", "--sft.batch_size", "2", "--run-dir", "out"]
    stopped = processes.run("train", "run.toml", *argv, interrupt_at=Cue(None, 5))
    assert stopped.code == 128 + signal.SIGINT
    assert "rollover train --resume out" in stopped.err
    assert not Path("out/model").exists()
