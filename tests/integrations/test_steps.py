"""The steps of a host that only asks: their times, their tokens and what is known to be trained."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from rollover.batch import Batch, Group, WasteCause
from rollover.errors import RunError
from rollover.integrations import steps as module
from rollover.integrations.steps import AskedSteps
from rollover.report.metrics import SPEED
from rollover.types import Prompt, SampleId, Trajectory
from tests.segments import segment


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Feed:
    """The part of a feed that is asked."""

    def __init__(self) -> None:
        self.decoded = 0.0
        self.is_decoding, self.seconds = False, 0.0
        self.replayed = frozenset[int]()
        self.done: list[tuple[int, dict[WasteCause, int]]] = []

    def account(self) -> dict[str, float]:
        return {"rollout/decoded_tokens": self.decoded}

    def trained(self, step: int, untrained: dict[WasteCause, int]) -> None:
        if self.done and self.done[-1][0] >= step:
            raise RunError(f"step {step} is trained already")
        self.done.append((step, untrained))

    def now_s(self) -> float:
        return self.seconds


class Run:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def step_ended(self, step: int, time_s: float, metrics: dict[str, float]) -> None:
        self.rows.append((step, dict(metrics)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def batch(step: int) -> Batch:
    prompt = Prompt(prompt_id=f"p{step}@0", token_ids=(1, 2), text="p", source="test", columns={})
    segments = (segment(20, version=step),)
    one = Trajectory(sample_id=SampleId(step, 0), prompt=prompt, segments=segments, reward=1.0)
    return Batch(step=step, groups=(Group(group_id=step, prompt=prompt, trajectories=(one,)),))


def a_step(steps: AskedSteps, feed: Feed, clock: Clock, step: int, **untrained: int) -> dict[str, float]:
    steps.begin(step)
    clock.now_s += 1.0
    steps.published()
    clock.now_s += 10.0
    feed.decoded += 500.0
    return steps.handed_out(batch(step), {WasteCause(c): n for c, n in untrained.items()})


def test_a_step_lasts_until_the_next_batch_is_asked_for(clock: Clock) -> None:
    feed, run = Feed(), Run()
    steps = AskedSteps(feed, run)  # type: ignore[arg-type]
    told = a_step(steps, feed, clock, 0)
    assert (told["time/publish_s"], told["time/rollout_s"]) == (1.0, 10.0) and not run.rows
    clock.now_s += 4.0
    for _ in range(2):
        with steps.set_aside():
            clock.now_s += 100.0
            with steps.set_aside():
                clock.now_s += 20.0
    steps.begin(1)
    ((step, row),) = run.rows
    assert (step, row["time/step_s"], row["time/train_s"]) == (0, 15.0, 4.0)
    assert (row["rollout/tokens_per_s"], row["time/decoding_s"]) == (50.0, 10.0)
    assert row["perf/trained_tokens_per_s"] == pytest.approx(20 / 15) and "time/evaluate_s" not in row


@pytest.mark.parametrize("decoding", [(True, True), (True, False), (False, True)])
def test_the_time_of_an_evaluation_counts_where_samples_decode(clock: Clock, decoding: tuple[bool, bool]) -> None:
    feed, run = Feed(), Run()
    steps = AskedSteps(feed, run, overlaps_training=True)  # type: ignore[arg-type]
    a_step(steps, feed, clock, 0)
    clock.now_s += 4.0
    feed.is_decoding = decoding[0]
    with steps.set_aside(), steps.set_aside():
        clock.now_s += 35.0
        feed.decoded += 1000.0
        feed.is_decoding = decoding[1]
    steps.close()
    ((_, row),) = run.rows
    assert (row["time/step_s"], row["time/evaluate_s"], row["time/train_s"]) == (50.0, 35.0, 4.0)
    assert row["rollout/tokens_per_s"] == 1500.0 / 50.0


def test_batches_that_an_earlier_process_decoded_lack_speeds(clock: Clock) -> None:
    """All of them if it was handed the batch, and that of training if it decoded a part."""
    feed, run = Feed(), Run()
    feed.seconds, feed.replayed = 7.0, frozenset({4})
    steps = AskedSteps(feed, run)  # type: ignore[arg-type]
    for step in (4, 5, 6):
        a_step(steps, feed, clock, step)
    steps.close()
    _, whole = run.rows[-1]
    speeds = {name for name in whole if name.startswith(SPEED)}
    assert [whole.keys() - row.keys() for _, row in run.rows] == [speeds, {"perf/trained_tokens_per_s"}, set()]
    assert "rollout/tokens_per_s" in speeds


def test_only_steps_that_were_handed_out_have_a_line(clock: Clock) -> None:
    feed, run = Feed(), Run()
    steps = AskedSteps(feed, run)  # type: ignore[arg-type]
    with suppress(RuntimeError), steps.set_aside():
        raise RuntimeError("an evaluation before the first step")
    steps.begin(0)
    a_step(steps, feed, clock, 0)
    steps.close()
    steps.close()
    assert [step for step, _ in run.rows] == [0]


def test_batches_are_trained_in_order_each_once(clock: Clock) -> None:
    feed = Feed()
    steps = AskedSteps(feed, Run())  # type: ignore[arg-type]
    a_step(steps, feed, clock, 3, masked_stale=7)
    a_step(steps, feed, clock, 4)
    steps.trained_before(3)
    assert feed.done == []
    with ThreadPoolExecutor(4) as threads:
        for told in [threads.submit(steps.trained_before, 5) for _ in range(4)]:
            told.result(30.0)
    assert feed.done == [(3, {WasteCause.MASKED_STALE: 7}), (4, {})]


def test_a_host_may_measure_its_batch_later_and_decode_while_it_trains(clock: Clock) -> None:
    feed, run = Feed(), Run()
    steps = AskedSteps(feed, run, knows_rewards=False, overlaps_training=True)  # type: ignore[arg-type]
    assert a_step(steps, feed, clock, 0)["time/rollout_s"] == 10.0
    steps.measured({"reward/mean": 0.5}, {WasteCause.ZERO_ADVANTAGE: 5})
    steps.measured({"drift": 0.1})
    clock.now_s += 4.0
    feed.decoded += 100.0
    steps.trained_before(1)
    steps.close()
    ((_, row),) = run.rows
    assert (row["reward/mean"], row["drift"], row["time/step_s"], row["time/train_s"]) == (0.5, 0.1, 15.0, 4.0)
    assert row["rollout/tokens_per_s"] == 600.0 / 15.0, "what was decoded in the whole step, over the whole step"
    assert row["perf/trained_tokens_per_s"] == pytest.approx(15 / 15)
    assert feed.done == [(0, {WasteCause.ZERO_ADVANTAGE: 5})]
