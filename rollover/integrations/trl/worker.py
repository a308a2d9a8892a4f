"""Rollouts for TRL's ``AsyncGRPOTrainer``: its rollout worker and its weight transfer, which are one object here.

::

    trainer                                                     worker
    send_weights(tensors) ──▶ a version is published ────────▶  rollouts
    rollout_buffer.get()  ◀── samples, batch after batch  ◀──  a thread that asks the rollouts for them

TRL drops samples older than its ``max_staleness`` when it takes them from the queue, which favours short responses.
Here none gets that old: a batch has as many samples as the trainer takes between two publications, so that batch ``s``
is trained at version ``s``, and the bound of the rollouts, which is no higher than TRL's, holds there. A sample is
labelled with the version of its *oldest* token.

Weights are published between batches: ``send_weights`` waits until the batch that is being collected is complete.

What it keeps true: samples are put into the queue batch by batch, in order, and each batch has as many as the trainer
takes, even if samples have failed; never more than ``batches_ahead`` batches wait there; a batch counts as trained once
newer weights are sent; ``check_health`` raises the error that the thread failed with.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollover.errors import ConfigError, RolloverError, RunError
from rollover.rollout.config import RolloutConfig
from rollover.types import Batch, Group, Trajectory, WasteCause

_POLL_S = 0.05

Messages = list[dict[str, Any]]
"""A conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSettings:
    """The facts that a worker needs about the trainer that it serves.

    Example: ``AsyncSettings(max_staleness=4, samples_per_version=64)`` for steps of 64 samples, each followed by a
    publication.
    """

    max_staleness: int
    """``AsyncGRPOConfig.max_staleness``."""
    samples_per_version: int
    """Samples that the trainer takes between two publications: per_device_train_batch_size times
    gradient_accumulation_steps times the number of processes times weight_sync_steps. The trainer takes this many if
    ``AsyncGRPOConfig.token_budget`` is 0; with a budget it takes as many as fit."""
    batches_ahead: int = 1
    """Number of batches that may wait in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The result of training a batch.

    Example: ``Trained(rewards=(1.0, 0.0), untrained={}, waited_s=0.5)``
    """

    rewards: Sequence[float]
    """Rewards of its samples, summed over the reward functions; NaN for one that has none."""
    untrained: Mapping[WasteCause, int]
    """Its tokens without a gradient, by cause."""
    waited_s: float
    """Seconds that the trainer waited for its samples."""


class Rollouts(Protocol):
    """The part of a run that a worker uses. Its methods are called by one thread at a time.

    Example: ``rollouts.publish(0, tensors)``, ``rollouts.batch(0)`` and, once the next weights are there,
    ``rollouts.trained(batch, outcome)`` and ``rollouts.publish(1, tensors)``.
    """

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Load named tensors into the engine as weights ``version``."""
        ...

    def batch(self, version: int) -> Batch:
        """Return the batch that weights ``version`` train. It has deadlines of its own."""
        ...

    def trained(self, batch: Batch, outcome: Trained) -> None:
        """Record that a batch is trained. It will not be requested again."""
        ...

    def close(self) -> None: ...


Rewards = Callable[[Group], Sequence[Mapping[str, float]]]
"""A function that returns, for each trajectory of a group, the values of its reward functions by name; NaN where one
returns none."""


@dataclass(slots=True)
class _HandedOut:
    """A batch that is not known to be trained."""

    batch: Batch
    rewards: list[float] = field(default_factory=list)
    num_without_signal: int = 0
    """Number of tokens with an advantage of 0."""


class _TimedQueue(queue.Queue[Any]):
    """Measures how long its readers wait."""

    waited_s = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        began_s = time.perf_counter()
        try:
            return super().get(block, timeout)
        finally:
            self.waited_s += time.perf_counter() - began_s


class RolloutWorker:
    """Implements TRL's ``RolloutWorkerProtocol`` and ``WeightTransferProtocol``. ``rollout_worker`` builds one from a
    trainer's arguments.

    Example::

        worker = RolloutWorker(rollout, settings, open_rollouts=open_rollouts, rewards=rewards, messages=messages)
        AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=worker)

    Args:
        rollout: settings of the rollouts. Their batch has as many samples as the trainer takes per version.
        open_rollouts: called when the first weights are sent.
        rewards: see ``Rewards``; called on the worker's thread.
        messages: returns prompt and completion of a trajectory as lists of messages, for TRL's traces.
        make_sample: TRL's ``RolloutSample``; imported from TRL when left out.

    Raises:
        ConfigError: the bound of ``rollout`` is above TRL's, or its batch does not have the size that the trainer takes
            per version.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        settings: AsyncSettings,
        *,
        open_rollouts: Callable[[], Rollouts],
        rewards: Rewards,
        messages: Callable[[Trajectory], tuple[Messages, Messages]],
        make_sample: Callable[..., Any] | None = None,
    ) -> None:
        if rollout.staleness_bound > settings.max_staleness:
            raise ConfigError(
                f"rollout.max_staleness is {rollout.staleness_bound}, but AsyncGRPOConfig.max_staleness is"
                f" {settings.max_staleness}: the trainer would drop older samples, and so mostly long ones; lower the"
                " former or raise the latter"
            )
        if rollout.num_samples != settings.samples_per_version:
            raise ConfigError(
                f"a batch has {rollout.num_samples} samples (rollout_batch_size times group_size), but the trainer"
                f" takes {settings.samples_per_version} per version of the weights: make them equal, so that each"
                " sample is trained at the version that it is meant for"
            )
        self.rollout_buffer = _TimedQueue(settings.batches_ahead * rollout.num_samples)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._open_rollouts = open_rollouts
        self._rewards = rewards
        self._messages = messages
        self._make_sample = make_sample or _rollout_sample()
        self._rollouts: Rollouts | None = None
        self._turn = threading.Lock()
        """Held by the thread that uses the rollouts."""
        self._version = -1
        """The version that was published last."""
        self._published = threading.Condition()
        self._bound = rollout.staleness_bound
        self._group_size = rollout.group_size
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._alive_s = time.monotonic()
        """Time of the thread's last activity, while it is not waiting for a batch."""
        self._waits_for_batch = False
        """True while it waits for a batch, which has deadlines of its own and may take longer than the trainer's."""
        self._handed_out: dict[int, _HandedOut] = {}
        self._waited_s = 0.0
        """Seconds that the trainer had waited for samples when a batch was last recorded as trained."""

    # -- the worker ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to fill ``rollout_buffer``. TRL has sent the first weights before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, name="rollover-worker", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop and release everything. Does nothing when called again."""
        self._stopping.set()
        with self._published:
            self._published.notify_all()
        try:
            if self._rollouts is not None:
                self._rollouts.close()  # this comes first, as the thread may be waiting for a batch
        finally:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._rollouts = None

    def update_model_version(self, model_version: int) -> None:
        """Check the version that TRL counts, which is one more than that of the rollouts, which count from 0.

        Raises:
            RunError: it is not the version whose weights were sent last.
        """
        if model_version != self._version + 1:
            raise RunError(
                f"TRL counts version {model_version}, but has sent weights {self._version + 1} times: rollouts would be"
                " labelled wrongly; call send_weights before each update_model_version, once, as AsyncGRPOTrainer does"
            )

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that the worker failed with. A batch that is being collected may take as long as the rollouts
        allow.

        Raises:
            RolloverError: any that the rollouts raise; they stop waiting for an engine after
                ``rollout.stall_timeout_s``.
            RunError: ``rewards`` or ``messages`` have not returned for ``stale_after_s``.
        """
        if self._error is not None:
            raise self._error
        silent_s = time.monotonic() - self._alive_s
        if silent_s > stale_after_s and not self._waits_for_batch:
            raise RunError(
                f"the rewards of a group have taken {silent_s:.0f} s so far: make them faster, or raise"
                " AsyncGRPOConfig.heartbeat_stale_after_s"
            )

    # -- the weight transfer ---------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Open the rollouts, if they are not open."""
        if self._rollouts is None:
            self._rollouts = self._open_rollouts()

    def pause(self) -> None:
        """Do nothing: running samples are stopped, or continue, when the weights arrive."""

    def resume(self) -> None:
        """Do nothing, as in ``pause``."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish the next version of the weights, once the batch that is being collected is complete."""
        self.init_weight_transfer()
        assert self._rollouts is not None
        tensors, version = dict(iterator), self._version + 1
        with self._turn:
            self._trained_before(version)
            self._rollouts.publish(version, tensors)
        with self._published:
            self._version = version
            self._published.notify_all()

    def destroy(self) -> None:
        """Release everything."""
        self.stop()

    def _trained_before(self, version: int) -> None:
        """Record that the trainer has trained the batches before ``version``."""
        assert self._rollouts is not None
        for step in sorted(step for step in self._handed_out if step < version):
            done, waited_s = self._handed_out.pop(step), self.rollout_buffer.waited_s
            untrained = {WasteCause.ZERO_ADVANTAGE: done.num_without_signal} if done.num_without_signal else {}
            outcome = Trained(rewards=done.rewards, untrained=untrained, waited_s=waited_s - self._waited_s)
            self._waited_s = waited_s
            self._rollouts.trained(done.batch, outcome)

    # -- the thread ------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        try:
            version = 0
            while self._wait_for(version - self._bound):
                assert self._rollouts is not None
                with self._turn, self._waiting_for_batch():
                    batch = self._rollouts.batch(version)
                    self._handed_out[version] = _HandedOut(batch)
                if not self._put(batch):
                    return
                version += 1
        except BaseException as error:
            if not self._stopping.is_set():
                self._error = error

    @contextmanager
    def _waiting_for_batch(self) -> Iterator[None]:
        self._waits_for_batch = True
        try:
            yield
        finally:
            self._alive_s = time.monotonic()
            self._waits_for_batch = False

    def _wait_for(self, version: int) -> bool:
        """Wait until weights of ``version`` or newer are published; return whether they are."""
        with self._published:
            while self._version < version and not self._stopping.is_set():
                self._published.wait(_POLL_S)
                self._alive_s = time.monotonic()  # it is waiting for the trainer
        return not self._stopping.is_set()

    def _put(self, batch: Batch) -> bool:
        """Put the samples of a batch into the queue as it empties, and return whether all were put."""
        for group in batch.groups:
            for sample in self._samples(group, self._handed_out[batch.step]):
                while not self._stopping.is_set():
                    self._alive_s = time.monotonic()
                    with suppress(queue.Full):
                        self.rollout_buffer.put(sample, timeout=_POLL_S)
                        break
        return not self._stopping.is_set()

    def _samples(self, group: Group, handed_out: _HandedOut) -> list[Any]:
        """Return a sample for each trajectory, followed by one in place of each failed sibling."""
        values = self._rewards(group)
        totals = [_total(each.values()) for each in values]
        advantages, std = normalised(totals)
        made = []
        for trajectory, each, total, advantage in zip(group.trajectories, values, totals, advantages, strict=True):
            named = {f"rewards/{name}": value for name, value in each.items()}
            metrics = {"reward": total, "reward_std": std, **named}
            made.append(self._sample(trajectory, trajectory.num_tokens, advantage, metrics))
            handed_out.rewards.append(total)
            handed_out.num_without_signal += trajectory.num_tokens if advantage == 0.0 else 0
        # The trainer waits for whole batches, and fails on a row without a token to train. So a sibling's first token
        # stands in, which has no gradient with an advantage of 0.
        fillers = self._group_size - len(made)
        return made + [self._sample(group.trajectories[0], 1, 0.0, {}) for _ in range(fillers)]

    def _sample(self, trajectory: Trajectory, num_tokens: int, advantage: float, metrics: Mapping[str, float]) -> Any:
        """Return the first ``num_tokens`` of a response in the trainer's form."""
        oldest = trajectory.oldest_version
        if oldest is None:
            raise RolloverError(f"{trajectory.sample_id} holds no token")
        prompt, completion = self._messages(trajectory)
        prompt_ids, num_prompt = trajectory.prompt.token_ids, len(trajectory.prompt.token_ids)
        logprobs = trajectory.rollout_logprobs[:num_tokens]
        return self._make_sample(
            prompt=prompt,
            completion=completion,
            input_ids=np.array([*prompt_ids, *trajectory.token_ids[:num_tokens]], dtype=np.int64),
            completion_mask=np.repeat([0, 1], [num_prompt, num_tokens]),
            old_log_probs=np.array([0.0] * num_prompt + [*logprobs], dtype=np.float32),
            advantage=advantage,
            model_version=oldest + 1,  # TRL counts the publication before the first step
            group_id=trajectory.sample_id.group,
            metrics=dict(metrics),
            enqueued_at=time.time(),
        )


def normalised(rewards: Sequence[float]) -> tuple[list[float], float]:
    """Return the advantages of siblings as TRL's worker computes them, and the standard deviation of their rewards. One
    without a reward (NaN) has advantage 0 and does not count in the mean.

    Example: for rewards 1, 0, 0 and 1 the advantages are +1, -1, -1 and +1, and the deviation is 0.5.
    """
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if not scored:
        return [0.0] * len(rewards), math.nan
    mean = sum(scored) / len(scored)
    std = (sum((reward - mean) ** 2 for reward in scored) / len(scored)) ** 0.5
    return [0.0 if math.isnan(reward) else (reward - mean) / (std + 1e-8) for reward in rewards], std


def _total(values: Iterable[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return sum(there) if there else math.nan


def _rollout_sample() -> Callable[..., Any]:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    make: Callable[..., Any] = RolloutSample
    return make
