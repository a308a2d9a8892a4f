"""The steps of a host: each lasts from one request for a batch to the next.

In between the host trains, loads weights into its servers, saves and logs. Evaluations during which no sample decodes
are excluded.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from rollover.batch import Batch, WasteCause
from rollover.integrations.feed import Feed, OpenParts
from rollover.integrations.hosted import HostedConfig
from rollover.integrations.record import HostedRun
from rollover.report import throughput
from rollover.report.metrics import SPEED
from rollover.rollout.events import Event
from rollover.rollout.metrics import batch_metrics


@dataclass(slots=True, kw_only=True)
class _AskedStep:
    step: int
    began_s: float
    decoded_before: float
    published_s: float | None = None
    handed_out_s: float | None = None
    is_evaluating: bool = False
    aside_s: float = 0.0
    evaluate_s: float = 0.0
    num_tokens: int = 0
    """Number of tokens of its batch."""
    is_own: bool = True
    """This process has decoded its batch, all of it."""
    untrained: Mapping[WasteCause, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def opened(
    stack: ExitStack,
    run: HostedRun,
    config: HostedConfig,
    open_parts: OpenParts,
    *,
    step: int = 0,
    observer: Callable[[Event], None],
    knows_rewards: bool = True,
) -> tuple[Feed, AskedSteps]:
    """Open the feed of ``run`` and the steps over it; ``stack`` closes both. Trainer and engine take turns."""
    feed = Feed(open_parts, config.rollout, journal=run.journal, step=step, seed=config.seed, observer=observer)
    stack.callback(feed.close)
    run.note_engine(feed.parts.engine.capabilities, takes_turns=True, knows_rewards=knows_rewards)
    steps = AskedSteps(feed, run, knows_rewards=knows_rewards)
    stack.callback(steps.close)
    return feed, steps


class AskedSteps:
    """Records what became of each batch and how long its step took, in the journal and in ``metrics.jsonl``.

    Example: a host that asks for batches 0 and 1::

        for step in range(2):
            steps.begin(step)                    # now batch ``step - 1`` has its line
            steps.trained_before(step)           # and is known to be trained
            feed.publish(step, load)
            steps.published()
            metrics = steps.handed_out(feed.batch(step))

    Args:
        knows_rewards: whether rewards are known before the host has its batch.
        overlaps_training: whether samples decode while the host trains, so that decoding takes all of a step.
    """

    def __init__(
        self, feed: Feed, run: HostedRun, *, knows_rewards: bool = True, overlaps_training: bool = False
    ) -> None:
        self._feed = feed
        self._run = run
        self._knows_rewards = knows_rewards
        self._overlaps_training = overlaps_training
        self._underway: _AskedStep | None = None
        self._untrained: dict[int, Mapping[WasteCause, int]] = {}
        """Tokens without a gradient in the batches that were handed out and are not known to be trained."""
        self._resumed_s = feed.now_s()
        self._telling = threading.Lock()
        """A host may save a checkpoint, and so report trained batches, while another of its threads rolls out."""

    def begin(self, step: int) -> None:
        """Record that the host asks for batch ``step``."""
        self.close()
        self._underway = _AskedStep(step=step, began_s=time.perf_counter(), decoded_before=self._decoded())

    def published(self) -> None:
        """Record that the engine has the weights of this step."""
        assert self._underway is not None, "a step has begun"
        self._underway.published_s = time.perf_counter()

    def handed_out(self, batch: Batch, untrained: Mapping[WasteCause, int] | None = None) -> dict[str, float]:
        """Record that the host has its batch. Returns the measurements of the batch that are known by then.

        Args:
            untrained: tokens of the batch that get no gradient, by cause; ``measured`` may add them later.
        """
        underway = self._underway
        assert underway is not None and underway.published_s is not None, "a step has begun"
        underway.handed_out_s = now_s = time.perf_counter()
        underway.num_tokens = batch.num_tokens
        underway.is_own = all(s.end_s >= self._resumed_s for t in batch.trajectories for s in t.segments)
        if underway.step not in self._feed.replayed:
            self._resumed_s = -math.inf
        of_batch = batch_metrics(batch)
        if not self._knows_rewards:
            of_batch = {name: value for name, value in of_batch.items() if not name.startswith("reward/")}
        underway.metrics = {
            **of_batch,
            **self._feed.account(),
            "time/publish_s": underway.published_s - underway.began_s,
            "time/rollout_s": now_s - underway.published_s,
        }
        metrics = {**underway.metrics}
        self.measured({}, untrained or {})
        return metrics

    def measured(self, metrics: Mapping[str, float], untrained: Mapping[WasteCause, int] | None = None) -> None:
        """Add the host's measurements of its present batch. ``untrained``: as in ``handed_out``."""
        underway = self._underway
        assert underway is not None and underway.handed_out_s is not None, "a batch was handed out"
        underway.metrics.update(metrics)
        if untrained is not None:
            with self._telling:
                underway.untrained = self._untrained[underway.step] = untrained

    def trained_before(self, step: int) -> None:
        """Record that the host has trained the batches of all steps before ``step``. May be called from any thread."""
        with self._telling:
            for done in sorted(s for s in self._untrained if s < step):
                self._feed.trained(done, self._untrained.pop(done))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Exclude the host's evaluation within this context from the step, unless samples decode meanwhile: then it
        counts, as ``time/evaluate_s``. Within another such context it does nothing."""
        underway = self._underway
        if underway is None or underway.is_evaluating:
            yield
            return
        underway.is_evaluating, began_s, is_decoding = True, time.perf_counter(), self._feed.is_decoding
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - began_s
            underway.is_evaluating = False
            if is_decoding or self._feed.is_decoding:
                underway.evaluate_s += elapsed_s
            else:
                underway.aside_s += elapsed_s

    def close(self) -> None:
        """End the current step. One whose batch the host never received has no line."""
        underway, self._underway = self._underway, None
        if underway is None or underway.handed_out_s is None:
            return
        metrics = underway.metrics
        step_s = time.perf_counter() - underway.began_s - underway.aside_s
        rollout_s = metrics["time/rollout_s"]
        decoded = self._decoded() if self._overlaps_training else metrics["rollout/decoded_tokens"]
        speeds = throughput.of_step(
            trained_tokens=underway.num_tokens - sum(underway.untrained.values()),
            decoded_tokens=int(decoded - underway.decoded_before),
            step_s=step_s,
            decoding_s=step_s if self._overlaps_training else rollout_s,
        )
        if underway.evaluate_s:
            speeds["time/evaluate_s"] = underway.evaluate_s
        train_s = max(step_s - rollout_s - metrics["time/publish_s"] - underway.evaluate_s, 0.0)
        told = {**metrics, **speeds, "time/train_s": train_s}
        if underway.step in self._feed.replayed and WasteCause.SKIPPED not in underway.untrained:
            told = {name: value for name, value in told.items() if not name.startswith(SPEED)}  # nothing was decoded
        elif not underway.is_own:
            del told[throughput.TRAINED.name]  # no step has the seconds of what an earlier process decoded
        self._run.step_ended(underway.step, self._feed.now_s(), told)

    def _decoded(self) -> float:
        return self._feed.account()["rollout/decoded_tokens"]
