"""The account of whole runs: what had a gradient, what had none and why, and batches that cannot be trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.batch import Batch, TrainedStep, WasteCause
from rollover.errors import RolloverError
from rollover.rollout.events import BatchTrained, SampleFailed
from rollover.trainer.local import LocalTrainer
from rollover.types import FinishReason
from tests import runs
from tests.runs import Say

pytestmark = pytest.mark.usefixtures("experiment")

DETERMINISTIC = ("--deterministic", "true")


def train(*argv: str) -> int:
    return cli.main(["train", *argv])


def masked_and_stale(batch: Batch) -> Counter[WasteCause]:
    """What ``mask_truncated`` and ``mask_stale`` leave without a gradient, by hand."""
    counts: Counter[WasteCause] = Counter()
    for group in batch.groups:
        for t in group.trajectories:
            for version in t.policy_versions:
                if t.finish_reason is FinishReason.LENGTH:
                    counts[WasteCause.MASKED_TRUNCATED] += 1
                elif version < batch.step:
                    counts[WasteCause.MASKED_STALE] += 1
                elif len(set(group.rewards_G)) == 1:
                    counts[WasteCause.ZERO_ADVANTAGE] += 1
    return counts


def test_ledger_metrics_and_report_count_as_trained_what_had_a_gradient() -> None:
    from rollover.report.record import read_run
    from rollover.report.summary import summarize

    changes = ("--algorithm.correction", "mask_stale", "--algorithm.mask_truncated", "true")
    assert train("run.toml", "--run-dir", "out", "--steps", "6", "--rollout.max_new_tokens", "12", *changes) == 0
    run = Path("out")
    ledger, batches, expected = runs.ledger(run), runs.batches(run), Counter[WasteCause]()
    for batch, event in zip(batches, (e for e in runs.events(run) if isinstance(e, BatchTrained)), strict=True):
        assert event.step == batch.step and event.untrained == masked_and_stale(batch)
        expected.update(event.untrained)
    assert len(expected) >= 2, "a run in which nothing is masked proves nothing"
    assert +ledger.tokens.wasted == expected
    assert ledger.tokens.trained == sum(b.num_tokens for b in batches) - expected.total()
    rows = runs.rows(run)
    assert [row["tokens/trained"] for row in rows] == [b.num_tokens - masked_and_stale(b).total() for b in batches]
    assert rows[-1]["rollout/trained_tokens"] == ledger.tokens.trained
    for row in rows:
        assert row["perf/trained_tokens_per_s"] == pytest.approx(row["tokens/trained"] / row["time/step_s"])
    record = read_run(run)
    summary = summarize(record.metrics, record.timeline)
    assert summary.trained_tokens == ledger.tokens.trained and summary.live_tokens == ledger.tokens.live
    assert summary.wasted_tokens == {str(cause): n for cause, n in expected.items()}
    assert "without a gradient: masked stale" in (run / "report.html").read_text()


def test_batches_that_are_masked_entirely_are_steps_like_others() -> None:
    changes = ("--algorithm.mask_truncated", "true", "--rollout.max_new_tokens", "1")
    assert train("run.toml", "--run-dir", "out", "--steps", "6", *DETERMINISTIC, *changes) == 0
    assert runs.ledger(Path("out")).tokens.wasted[WasteCause.MASKED_TRUNCATED] > 0
    rows = runs.rows(Path("out"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert 0 in [row["tokens/trained"] for row in rows], "no batch was masked as a whole: this proves nothing"
    json.dumps(rows, allow_nan=False)


# -- rewards that cannot be trained ---------------------------------------------------------------------------------

HUGE = """\
async def share_now(prompts, completions, answer, **columns):
    return [1e308 if letter == "a" else text.count(letter) / max(1, len(text))
            for text, letter in zip(completions, answer)]
"""


def test_a_reward_beyond_float32_fails_its_sample_and_not_the_run() -> None:
    Path("letter_reward.py").write_text(HUGE)
    assert train("run.toml", "--run-dir", "out") == 0
    failures = [e for e in runs.events(Path("out")) if isinstance(e, SampleFailed)]
    assert failures and all("1e+308" in e.reason and "float32" in e.reason for e in failures)
    assert all(t.prompt.columns["answer"] != "a" for b in runs.batches(Path("out")) for t in b.trajectories)


def test_a_journal_with_such_a_reward_can_go_on_without_its_batch(
    monkeypatch: pytest.MonkeyPatch, refused: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("letter_reward.py").write_text(HUGE)
    with monkeypatch.context() as patch:
        patch.setattr("rollover.rollout.scheduler.MAX_REWARD", float("inf"))
        patch.setattr("rollover.environments.reward_value.MAX_REWARD", float("inf"))
        message = refused("train", "run.toml", "--run-dir", "out")
    assert "has reward 1e+308: not a finite number within 1e+15" in message
    step = runs.ledger(Path("out")).next_step - 1
    assert f"--resume out --skip-batch {step}" in message
    Path("letter_reward.py").write_text(runs.REWARD)
    while train("--resume", "out", "--skip-batch", str(step)) == 2:  # groups that were ready may be as bad
        assert "has reward 1e+308: not a finite number within 1e+15" in capsys.readouterr().err
        step = runs.ledger(Path("out")).next_step - 1
    assert runs.ledger(Path("out")).next_step == 4
    assert runs.ledger(Path("out")).tokens.wasted[WasteCause.SKIPPED] > 0


# -- batches that cannot be trained ---------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Within ``poison(steps)``, the trainer refuses the batches of these steps."""

    def install(*steps: int) -> pytest.MonkeyPatch:
        def step(trainer: LocalTrainer, batch: Batch) -> TrainedStep:
            if batch.step in steps:
                raise RolloverError("training diverged: the gradient norm is nan")
            return original(trainer, batch)

        monkeypatch.setattr(LocalTrainer, "step", step)
        return monkeypatch

    original = LocalTrainer.step
    return install


def test_an_untrainable_batch_is_stepped_over_when_asked(poison: Callable[..., Any], refused: Say, done: Say) -> None:
    poison(2)
    advice = "the batch of step 2 was not trained; to resume without it: rollover train --resume out --skip-batch 2"
    argv = ("--checkpoint.every_steps", "1", "--checkpoint.keep_last", "10", "--logging.progress", "plain")
    for attempt in (("run.toml", "--run-dir", "out", *argv), ("--resume", "out")):
        assert advice in (told := refused("train", *attempt)) and "gradient norm is nan" in told
        assert [p.name for p in sorted(Path("out/checkpoints").iterdir())] == ["step_1", "step_2"], "nothing is saved"
    shown = done("train", "--resume", "out", "--skip-batch", "2")
    ledger, batches = runs.ledger(Path("out")), runs.batches(Path("out"))
    tokens = batches[2].num_tokens
    assert f"step 2: its batch of 4 groups was skipped, as asked by --skip-batch; {tokens} tokens are wasted" in shown
    assert ledger.next_step == 4 and ledger.tokens.wasted[WasteCause.SKIPPED] == tokens
    assert runs.weights(Path("out"), 3) == runs.weights(Path("out"), 2) != runs.weights(Path("out"), 4)
    rows = {row["step"]: row for row in runs.rows(Path("out"))}
    assert rows[2]["rollout/wasted_tokens/skipped_batch"] == tokens and rows[2]["perf/trained_tokens_per_s"] == 0
    json.dumps(rows, allow_nan=False)


def test_a_skipped_batch_is_skipped_by_every_later_resume_bit_for_bit(poison: Callable[..., Any]) -> None:
    argv = (*DETERMINISTIC, "--steps", "6", "--checkpoint.every_steps", "6")
    for name, later in (("once", ()), ("again", (3,))):
        poison(2)
        assert train("run.toml", "--run-dir", name, *argv) == 2
        poison(*later)
        assert train("--resume", name, "--skip-batch", "2") == (2 if later else 0)
        for step in later:  # from the beginning each time: no checkpoint was saved
            poison(*(s for s in later if s > step))
            assert train("--resume", name) == (2 if step != later[-1] else 0)
        ledger = runs.ledger(Path(name))
        assert ledger.tokens.wasted[WasteCause.SKIPPED] == runs.batches(Path(name))[2].num_tokens
    assert runs.weights(Path("once"), 6) == runs.weights(Path("again"), 6)
    one, two = (runs.ledger(Path(name)).tokens for name in ("once", "again"))
    assert one.trained == two.trained


def test_the_flag_is_refused_if_there_is_nothing_to_skip(refused: Say) -> None:
    told = refused("train", "run.toml", "--skip-batch", "2")
    assert "--skip-batch applies to a resumed run: give --resume RUN" in told
    assert train("run.toml", "--run-dir", "out", "--steps", "2") == 0
    last = runs.events(Path("out"))[-1]
    told = refused("train", "--resume", "out", "--steps", "3", "--skip-batch", "1")
    assert "there is no batch of step 1 to skip; since the checkpoint at step 2, none was collected" in told
    assert runs.events(Path("out"))[-1] == last, "a refusal leaves no trace"
