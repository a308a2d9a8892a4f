"""Alarms name what is wrong in words and numbers, and a healthy run raises none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollover.algorithms.config import algorithm
from rollover.batch import Batch, WasteCause
from rollover.report.alarms import alarms
from rollover.report.metrics import MetricRow, read_metrics
from rollover.rollout.events import SampleFailed
from rollover.rollout.ledger import Ledger
from rollover.run.observers import RunObserver, StepEnded, alarms_to
from rollover.types import SampleId
from tests.report.synthetic import steps


def rows(num_steps: int, **curves: Callable[[int], float] | float) -> tuple[MetricRow, ...]:
    """Rows of steps whose metrics (named with ``__`` for a slash) are healthy but for ``curves``."""
    healthy = {"reward/mean": 0.5, "reward/groups_with_signal": 0.7, "entropy": 0.5, "surprise": 0.5}
    given = {name.replace("__", "/"): curve for name, curve in curves.items()}
    curves = healthy | given
    return steps(*({k: float(v(step) if callable(v) else v) for k, v in curves.items()} for step in range(num_steps)))


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_a_reward_that_never_differs_is_named_with_its_value(value: float) -> None:
    (alarm,) = alarms(rows(12, reward__mean=value, reward__groups_with_signal=0.0))
    assert alarm.startswith(f"every reward of the last 10 steps is {value:g}: rewards teach nothing.")
    assert "--dry-run" not in alarm, "another trainer has none"


def test_one_reward_for_a_hundred_responses_is_named_after_three_steps() -> None:
    def found(num_steps: int, **curves: Callable[[int], float] | float) -> tuple[str, ...]:
        equal = {"reward__mean": 0.0, "reward__groups_with_signal": 0.0}
        return alarms(rows(num_steps, **(equal | curves)), algorithm("grpo"))

    (alarm,) = found(3, rollout__batch_samples=34)
    assert alarm.startswith("every reward of the last 3 steps is 0: rewards teach nothing.") and "--dry-run" in alarm
    assert found(3, rollout__batch_samples=33) == found(2, rollout__batch_samples=50) == ()
    assert found(3, rollout__batch_samples=34, reward__mean=lambda step: step / 10) == ()


def test_equal_rewards_within_groups_teach_nothing() -> None:
    (alarm,) = alarms(rows(6, reward__mean=lambda step: step / 10, reward__groups_with_signal=0.0))
    assert alarm.startswith("all rewards within a group of the last 6 steps are equal")


@pytest.mark.parametrize("curves", [{"reward__mean": 1.0}, {}, {"reward__groups_with_signal": 0.05}])
@pytest.mark.parametrize("name", ["grpo", "reinforce++", "turn-grpo"])
def test_equal_rewards_are_no_alarm_if_more_is_compared(name: str, curves: dict[str, float]) -> None:
    """Whitened advantages compare the batch, turns their rewards. Else advantages are for the length alone."""
    base = {"reward__mean": lambda step: step / 10, "reward__groups_with_signal": 0.0, "advantage__abs_mean": 0.8}
    found = alarms(rows(10, **(base | curves)), algorithm(name))
    assert [" equal" in text or "every reward" in text for text in found] == [True] * (
        name == "grpo" or (name == "reinforce++" and "reward__mean" in curves)
    )
    assert len(alarms(rows(10, **(base | curves | {"advantage__abs_mean": 0.0})), algorithm(name))) == 1


def test_groups_of_one_response_have_no_share() -> None:
    shares = {"reward__groups_with_signal": math.nan}
    assert alarms(rows(10, reward__mean=0.5, reward__std=0.5, advantage__abs_mean=0.8, **shares)) == ()


@pytest.mark.parametrize(("mean", "level"), [(0.02, "too hard"), (0.99, "too easy")])
def test_prompts_without_signal_are_too_hard_or_too_easy(mean: float, level: str) -> None:
    (alarm,) = alarms(rows(10, reward__mean=mean, reward__groups_with_signal=0.05))
    assert alarm.startswith("95% of the groups of the last 10 steps have equal rewards") and level in alarm


def test_groups_that_a_filter_drops_are_counted_without_a_step() -> None:
    assert alarms((), filtered=0.9) == ()
    (alarm,) = alarms((), filtered=0.97)
    assert alarm.startswith("97% of the decoded tokens were dropped by algorithm.group_filter")


def test_a_fall_of_the_entropy_is_told_with_its_steps() -> None:
    falling = [0.4] * 10 + [0.4 - 0.02 * i for i in range(20)] + [0.01] * 10
    (alarm,) = alarms(rows(40, entropy=falling.__getitem__, surprise=falling.__getitem__))
    # Means of five steps: 0.104 at step 27 is the last above 0.1, 0.046 at step 30 the first below 0.05.
    assert alarm.startswith("entropy fell below 0.05 in 3 steps: from 0.10 at step 27 to 0.010 now.")
    assert alarms(rows(40, entropy=0.04, surprise=0.04)) == (), "an entropy that never was higher has not fallen"


def test_an_engine_that_draws_from_a_part_of_the_distribution_shows() -> None:
    (alarm,) = alarms(rows(10, entropy=0.8, surprise=0.6))
    assert alarm.startswith("trained tokens are less surprising than the policy: 0.60 against an entropy of 0.80 nats.")
    assert "top_k" in alarm and "requests on the way" in alarm
    assert alarms(rows(10, entropy=0.8, surprise=0.72)) == (), "a batch of right answers alone shows as much"
    assert alarms(rows(10, entropy=0.1, surprise=0.06)) == ()


@pytest.mark.parametrize(
    ("metric", "bad", "good", "words"),
    [
        ("response/truncated", 0.6, 0.5, "60% of the recent responses are cut at rollout.max_new_tokens"),
        ("prompt/repeated", 0.75, 0.4, "75% of the rows of a batch have the same prompt as another row"),
        ("ess/token", 0.2, 0.3, "the effective sample size is 20% of the tokens"),
    ],
)
def test_a_share_beyond_its_limit_is_named(metric: str, bad: float, good: float, words: str) -> None:
    (alarm,) = alarms(rows(10, **{metric: bad}))
    assert alarm.startswith(words)
    assert alarms(rows(10, **{metric: good})) == ()


def test_an_episode_may_end_at_other_limits_than_a_response() -> None:
    (alarm,) = alarms(rows(10, response__truncated=0.6, episode__turns=3.0))
    assert alarm.startswith("60% of the recent responses end at a limit (rollout.max_new_tokens, environment.max_turn")


def test_failures_that_befall_long_responses_are_named_with_both_lengths() -> None:
    def found(num_failed: int, tokens: float) -> tuple[str, ...]:
        late = {"rollout__failed_samples": num_failed, "rollout__failed_mean_tokens": tokens}
        return alarms(rows(6, response__mean_tokens=100, **late))

    (alarm,) = found(5, 150)
    assert alarm.startswith("5 samples have failed, with 150 tokens on average, and trained ones have 100: long")
    assert found(4, 150) == found(5, 149) == alarms(rows(6, response__mean_tokens=100)) == ()


def test_many_failures_are_told_and_few_are_not() -> None:
    def found(each: int) -> tuple[str, ...]:
        return alarms(rows(30, rollout__failed_samples=lambda step: 90 + each * step, rollout__batch_samples=8))

    (alarm,) = found(1)
    assert alarm.startswith("10 samples failed in the last 10 steps, and 80 were trained.")
    assert found(0) == alarms(rows(30, rollout__failed_samples=lambda step: step, rollout__batch_samples=91)) == ()


def test_the_first_failure_of_each_kind_is_shown_once_during_the_run() -> None:
    shown: list[str] = []
    seen = SimpleNamespace(message=shown.append, rollout=lambda *_: None)
    observe = RunObserver(metrics=cast(Any, None), progress=cast(Any, seen), ledger=Ledger(), batch_size=1, engine=None)
    for i, reason in enumerate(["it took 3.1 s (prompt a/1@0)", "it took 3.2 s (prompt a/2@0)", "died\nat\x1b"]):
        observe(SampleFailed(1.0, SampleId(i, 0), reason))
    observe(SampleFailed(1.0, SampleId(9, 0), "none applies", cause=WasteCause.NO_REWARD))
    assert shown == [
        "sample g0.0 failed, the first of its kind: it took 3.1 s (prompt a/1@0)",
        "sample g2.0 failed, the first of its kind: died at\\x1b",
    ]


def test_what_is_over_raises_no_alarm() -> None:
    assert alarms(rows(30, response__truncated=lambda step: 1.0 if step < 20 else 0.1)) == ()
    assert len(alarms(rows(30, response__truncated=lambda step: 0.1 if step < 20 else 1.0))) == 1


def test_no_alarm_is_raised_before_five_steps_or_without_a_measurement() -> None:
    assert alarms(rows(4, reward__mean=0.0, reward__groups_with_signal=0.0, response__truncated=1.0)) == ()
    assert alarms(steps(*[{"loss": 1.0, "entropy": math.nan}] * 20)) == ()


def test_the_quickstart_raises_no_alarm_at_any_of_its_steps() -> None:
    record = read_metrics(Path(__file__).parent / "quickstart")
    assert sum(row.kind == "step" for row in record) == 60
    for cut in range(len(record) + 1):
        assert alarms(record[:cut]) == ()


def test_a_run_shows_its_alarms_whenever_its_steps_have_doubled() -> None:
    shown: list[tuple[int, str]] = []
    found = rows(50, reward__mean=0.0, reward__groups_with_signal=0.0, rollout__batch_samples=34)
    observe = alarms_to(lambda text: shown.append((row.step + 1, text)))
    for row in found:
        observe(StepEnded(step=row.step, batch=Batch(step=row.step, groups=()), time_s=0.0, metrics=row.values))
    assert [step for step, _ in shown] == [3, 10, 20, 40]
    assert {text[:51] for _, text in shown[1:]} == {"alarm: every reward of the last 10 steps is 0: rewa"}
