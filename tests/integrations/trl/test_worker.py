"""The rollout worker of TRL's asynchronous trainer: what it puts into the queue, when, and under which version."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollover.errors import ConfigError, EngineTimeout, RunError
from rollover.integrations.feed import Feed, FeedParts, ScoredByHost
from rollover.integrations.trl.worker import AsyncSettings, RolloutWorker, Trained, normalised
from rollover.rollout.config import RolloutConfig
from rollover.rollout.generation import sample_seed
from rollover.rollout.strategies import AprilConfig
from rollover.types import Batch, Group, SampleId, Trajectory, WasteCause
from tests.engine.fake import FakeEngine, logprob_at, token_at
from tests.integrations.trl.kit import Flawed
from tests.rollout.kit import Prompts, lognormal
from tests.weights.kit import FakeWeights

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

PROMPTS, GENERATIONS, BOUND = 3, 3, 2
PER_VERSION = PROMPTS * GENERATIONS


class OverFeed:
    """Rollouts over a scripted engine. Remembers what it was told."""

    def __init__(self, engine: Any, rollout: RolloutConfig, journal: Path) -> None:
        self.engine = engine
        self.sent: list[tuple[int, list[str]]] = []
        self.done: list[tuple[Batch, Trained]] = []
        self.feed = Feed(self._open, rollout, journal=journal, seed=5)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[FeedParts]:
        yield FeedParts(engine=self.engine, source=Prompts(), scorer=ScoredByHost())
        await self.engine.close()

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.sent.append((version, [*tensors]))
        self.feed.publish(version, lambda: self.engine.load(version, FakeWeights(version)))

    def batch(self, version: int) -> Batch:
        return self.feed.batch(version)

    def trained(self, batch: Batch, outcome: Trained) -> None:
        self.done.append((batch, outcome))

    def close(self) -> None:
        self.feed.close()


class Trainer:
    """Takes samples as TRL's trainer does: it sends weights first, counts from 1, and drops what is too old."""

    def __init__(
        self, folder: Path, *, stall_timeout_s: float = 60.0, auto: bool = True, fails: str | None = None
    ) -> None:
        self.engine: Any = FakeEngine(lognormal(8, 1.0, cap=40), auto=auto)
        if fails is not None:
            self.engine = Flawed(self.engine, fails)
        self.rollout = RolloutConfig(
            max_retries=0 if fails else 3,
            rollout_batch_size=PROMPTS,
            group_size=GENERATIONS,
            max_new_tokens=40,
            max_staleness=BOUND,
            strategy=AprilConfig(over_sampling_batch_size=6),
            stall_timeout_s=stall_timeout_s,
        )
        self.folder = folder
        self.model_version = 0
        self.rollouts: OverFeed = None  # type: ignore[assignment]
        """Once they are open."""
        self.worker = RolloutWorker(
            self.rollout,
            AsyncSettings(max_staleness=BOUND, samples_per_version=PER_VERSION),
            open_rollouts=self._open,
            rewards=self._rewards,
            messages=self._messages,
        )

    def _open(self) -> OverFeed:
        self.rollouts = OverFeed(self.engine, self.rollout, self.folder / "journal.sqlite")
        return self.rollouts

    def _rewards(self, group: Group) -> Sequence[Mapping[str, float]]:
        return [{"odd": float(sum(t.token_ids) % 2), "short": -0.01 * t.num_tokens} for t in group.trajectories]

    def _messages(self, trajectory: Trajectory) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        return (
            [{"role": "user", "content": trajectory.prompt.text}],
            [{"role": "assistant", "content": str(trajectory.sample_id)}],
        )

    def begin_decoding(self) -> None:
        """Begin with an engine that is ticked by hand, and wait until it has calls."""
        self.begin()
        deadline_s = time.monotonic() + 60
        while not self.engine.requests:
            assert time.monotonic() < deadline_s, "the engine was asked for nothing"
            time.sleep(0.002)

    def sync(self) -> None:
        self.worker.pause()
        self.worker.send_weights(iter([("w", None), ("v", None)]))
        self.worker.resume()
        self.model_version += 1
        self.worker.update_model_version(self.model_version)

    def begin(self) -> None:
        self.worker.init_weight_transfer()
        self.sync()
        self.worker.start()

    def take(self, num: int) -> list[Any]:
        taken: list[Any] = []
        deadline_s = time.monotonic() + 60
        while len(taken) < num:
            assert time.monotonic() < deadline_s, f"{len(taken)} of {num} samples came"
            try:
                taken.append(self.worker.rollout_buffer.get(timeout=5))
            except queue.Empty:
                self.worker.check_health(60)
        return taken


@pytest.fixture
def made(tmp_path: Path) -> Any:
    trainers: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        trainers.append(Trainer(tmp_path, **options))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.worker.stop()


def test_the_queue_holds_what_trl_asks_for(made: Any) -> None:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    trainer = made()
    trainer.begin()
    groups: dict[int, list[Any]] = {}
    for sample in trainer.take(PER_VERSION):
        assert isinstance(sample, RolloutSample)
        assert {sample.input_ids.dtype, sample.completion_mask.dtype} == {np.dtype(np.int64)}
        assert sample.old_log_probs.dtype == np.float32
        groups.setdefault(sample.group_id, []).append(sample)
        index = len(groups[sample.group_id]) - 1
        seed = sample_seed(5, SampleId(sample.group_id, index))
        assert sample.completion == [{"role": "assistant", "content": f"g{sample.group_id}.{index}"}]
        num = len(sample.input_ids) - 3
        assert sample.input_ids.tolist() == [5, 6, 7, *(token_at(seed, p, 0) for p in range(num))]
        assert sample.completion_mask.tolist() == [0, 0, 0] + [1] * num
        expected = np.array([0.0, 0.0, 0.0, *(logprob_at(seed, p, 0) for p in range(num))], dtype=np.float32)
        assert sample.old_log_probs.tolist() == expected.tolist()
        assert sample.model_version == 1
        odd, short = sample.metrics["rewards/odd"], sample.metrics["rewards/short"]
        assert sample.metrics["reward"] == pytest.approx(odd + short)
        assert (odd, short) == (sum(sample.input_ids[3:]) % 2, pytest.approx(-0.01 * num))
    for siblings in groups.values():
        advantages, std = normalised([s.metrics["reward"] for s in siblings])
        assert [s.advantage for s in siblings] == pytest.approx(advantages)
        assert {s.metrics["reward_std"] for s in siblings} == {std}


def test_advantages_are_those_of_trls_worker() -> None:
    assert normalised([1.0, 0.0, 0.0, 1.0])[0] == pytest.approx([1, -1, -1, 1])
    assert normalised([0.5, 0.5])[0] == [0.0, 0.0]
    assert normalised([1.0, math.nan, 0.0])[0] == pytest.approx([1, 0, -1])
    assert normalised([math.nan, math.nan])[0] == [0.0, 0.0]


def test_trl_reads_packs_and_weighs_the_items_of_the_queue(made: Any) -> None:
    """Its own reader, planner and collator, up to the tensors of the loss."""
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        FixedCountBatcher,
        RolloutQueueDataset,
    )

    trainer, metrics = made(), defaultdict[str, list[Any]](list)
    trainer.begin()
    queue_read, kept = trainer.worker.rollout_buffer.get, []

    def get(**options: Any) -> Any:
        kept.append(queue_read(**options))
        return kept[-1]

    trainer.worker.rollout_buffer.get = get
    items = RolloutQueueDataset(
        trainer.worker.rollout_buffer, lambda: trainer.model_version, trainer.worker.check_health, 60, metrics, BOUND
    )
    (row,) = next(iter(FixedCountBatcher(items, 1, PER_VERSION)))
    tensors = DataCollatorForRollout(pad_token_id=0, metrics=metrics)([[row]])
    assert len(kept) == PER_VERSION
    terms = Counter(
        (round(float(old), 5), round(float(advantage), 5))
        for old, advantage in zip(tensors["old_log_probs"][0], tensors["advantages"][0], strict=True)
    )
    assert terms == Counter(
        (round(float(old), 5), round(sample.advantage, 5))
        for sample in kept
        for old in sample.old_log_probs[sample.completion_mask == 1]
    )
    assert metrics["sample/staleness_max"] == [0.0] * PER_VERSION
    assert 0 <= min(metrics["sample/time_in_queue_s"]) <= max(metrics["sample/time_in_queue_s"]) < 60
    assert "sample/dropped_stale_total" not in metrics
    assert metrics["reward"]


def test_no_sample_is_as_old_as_trl_would_drop(made: Any) -> None:
    trainer, lags = made(), Counter[int]()
    trainer.begin()
    for _ in range(8):
        lags.update(trainer.model_version - sample.model_version for sample in trainer.take(PER_VERSION))
        trainer.sync()
    assert max(lags) <= BOUND
    assert lags[1] + lags[2] > 0, "nothing was old, and the test shows nothing"
    assert trainer.rollouts.sent == [(version, ["w", "v"]) for version in range(9)]


def test_samples_wait_for_weights_rather_than_grow_too_old(made: Any) -> None:
    """Without a publication no more than the bound allows is put into the queue, however much is taken."""
    trainer = made()
    trainer.begin()
    taken = trainer.take(PER_VERSION * (BOUND + 1))
    assert {sample.model_version for sample in taken} == {1}
    with pytest.raises(queue.Empty):
        trainer.worker.rollout_buffer.get(timeout=0.3)
    trainer.sync()
    assert len(trainer.take(PER_VERSION)) == PER_VERSION


def test_settings_under_which_trl_would_drop_are_refused() -> None:
    def worker(settings: AsyncSettings) -> None:
        rollout = RolloutConfig(rollout_batch_size=3, group_size=2, max_staleness=4)
        nothing: Callable[..., Any] = lambda *args: None  # noqa: E731
        RolloutWorker(rollout, settings, open_rollouts=nothing, rewards=nothing, messages=nothing)

    with pytest.raises(ConfigError, match=r"max_staleness is 4, but AsyncGRPOConfig\.max_staleness is 3"):
        worker(AsyncSettings(max_staleness=3, samples_per_version=6))
    with pytest.raises(ConfigError, match=r"a batch has 6 samples .*, but the trainer takes 8 per version"):
        worker(AsyncSettings(max_staleness=4, samples_per_version=8))


def test_a_version_that_was_not_sent_is_refused(made: Any) -> None:
    trainer = made()
    trainer.worker.init_weight_transfer()
    trainer.sync()
    with pytest.raises(RunError, match="TRL counts version 5, but has sent weights 1 times"):
        trainer.worker.update_model_version(5)


def test_what_the_worker_fails_with_reaches_the_trainer(made: Any) -> None:
    trainer = made(stall_timeout_s=0.05, auto=False)
    trainer.begin()
    deadline_s = time.monotonic() + 60
    with pytest.raises(EngineTimeout, match=r"no token and no reward for"):
        while time.monotonic() < deadline_s:
            trainer.worker.check_health(60)
            time.sleep(0.005)


def test_a_batch_may_take_longer_than_trl_waits_for_a_sign_of_life(made: Any) -> None:
    trainer = made(auto=False)
    trainer.begin_decoding()
    time.sleep(0.01)
    trainer.worker.check_health(0.005)


def test_rewards_that_do_not_return_are_named(made: Any) -> None:
    trainer, judging, judged = made(), threading.Event(), threading.Event()

    def rewards(group: Group) -> Sequence[Mapping[str, float]]:
        judging.set()
        judged.wait(60)
        return [{} for _ in group.trajectories]

    trainer.worker._rewards = rewards
    trainer.begin()
    assert judging.wait(60)
    time.sleep(0.01)
    try:
        with pytest.raises(RunError, match=r"the rewards of a group have taken 0 s so far: .*heartbeat_stale_after_s"):
            trainer.worker.check_health(0.005)
    finally:
        judged.set()


def test_a_failed_sibling_leaves_its_batch_whole_and_the_loss_as_it_was(made: Any) -> None:
    """Otherwise the trainer would wait for the missing sample for ever."""
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, FixedCountBatcher

    trainer = made(fails="g1.1.")
    trainer.begin()
    groups: dict[int, list[Any]] = defaultdict(list)
    while 1 not in groups:
        for sample in trainer.take(PER_VERSION):
            groups[sample.group_id].append(sample)
        trainer.sync()
    assert {len(siblings) for siblings in groups.values()} == {GENERATIONS}
    *scored, filler = groups[1]
    assert [len(sample.input_ids) > 4 for sample in scored] == [True, True], "a filler has one token"
    assert filler.completion_mask.tolist() == [0, 0, 0, 1] and (filler.advantage, filler.metrics) == (0.0, {})
    assert filler.input_ids.tolist() == scored[0].input_ids[:4].tolist()
    assert filler.old_log_probs.tolist() == scored[0].old_log_probs[:4].tolist()
    rewards = [sample.metrics["reward"] for sample in scored]
    assert [sample.advantage for sample in scored] == pytest.approx(normalised(rewards)[0])
    row = {name: getattr(filler, name) for name in ("input_ids", "completion_mask", "old_log_probs", "advantage")}
    (alone,) = next(iter(FixedCountBatcher([{**row, "group_id": 1, "metrics": {}}], 1, 1)))
    tensors = DataCollatorForRollout(pad_token_id=0)([[alone]])
    assert tensors["advantages"].tolist() == [[0.0]], "TRL fails on a row without any term of the loss"


def test_batches_count_as_trained_once_newer_weights_are_sent(made: Any) -> None:
    trainer = made()
    signal, trainer.worker._rewards = (
        trainer.worker._rewards,
        lambda group: signal(group) if group.group_id % 2 else [{"same": 1.0}] * len(group.trajectories),
    )
    trainer.begin()
    for step in range(4):
        taken = trainer.take(PER_VERSION)
        assert len(trainer.rollouts.done) == step
        trainer.sync()
        batch, outcome = trainer.rollouts.done[-1]
        assert batch.step == step
        assert [*outcome.rewards] == [sample.metrics["reward"] for sample in taken]
        without_signal = sum(int(sample.completion_mask.sum()) for sample in taken if sample.advantage == 0.0)
        assert outcome.untrained == {WasteCause.ZERO_ADVANTAGE: without_signal} and without_signal > 0
        assert outcome.waited_s > 0.0
    assert len(trainer.worker._handed_out) <= BOUND + 1, "the worker keeps no batch that was trained"


def test_stopping_twice_is_no_error_and_leaves_no_thread(made: Any) -> None:
    trainer = made()
    trainer.begin()
    trainer.take(1)
    trainer.worker.stop()
    trainer.worker.destroy()
    assert trainer.worker._thread is None


def test_stopping_does_not_wait_for_a_batch(made: Any) -> None:
    trainer = made(auto=False)
    trainer.begin_decoding()
    trainer.worker.stop()
    trainer.worker.check_health(60)
