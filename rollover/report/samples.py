"""The samples that a step trained, as the journal recorded them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from rollover.errors import RunError
from rollover.report.record import JOURNAL
from rollover.rollout.events import BatchConsumed, BatchTrained, GroupOpened, SampleScored, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.types import FinishReason, Prompt, SampleId, Segment, append_segment

Order = Literal["reward", "length", "lag", "advantage"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSample:
    """A sample of a batch with what was learned from it.

    Example: of a group with rewards 1 and 0, the samples have ``relative`` 0.5 and -0.5.
    """

    sample_id: SampleId
    prompt: Prompt
    segments: tuple[Segment, ...]
    step: int
    reward: float
    shaping: float
    """The amount that the algorithm added to the reward."""
    relative: float
    """The shaped reward minus the mean of the group."""

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def lag(self) -> float:
        """Return the mean lag of its tokens, in versions."""
        lags = sum((self.step - segment.policy_version) * len(segment.token_ids) for segment in self.segments)
        return lags / max(1, self.num_tokens)

    @property
    def is_cut(self) -> bool:
        """Return whether the response reached the limit of its length."""
        return self.segments[-1].finish_reason is FinishReason.LENGTH

    @property
    def breaks(self) -> list[tuple[int, str]]:
        """Return (number of tokens before it, description) of the places where the response was interrupted."""
        found, num_tokens = [], 0
        for before, after in pairwise(self.segments):
            num_tokens += len(before.token_ids)
            parked = "parked" if before.finish_reason is FinishReason.ABORT else "new weights"
            found.append((num_tokens, f"{parked}, version {before.policy_version} → {after.policy_version}"))
        return found


class TrainedBatch(NamedTuple):
    """The batch of a step.

    Example: ``TrainedBatch(step=3, samples=(...), is_trained=True)``.
    """

    step: int
    samples: tuple[TrainedSample, ...]
    is_trained: bool
    """False if the step has not ended."""


def read_batch(run_dir: Path, step: int | None = None) -> TrainedBatch:
    """Read the batch that a step trained; the newest one if ``step`` is None.

    Raises:
        RunError: there is no journal, or no such batch.
    """
    journal = run_dir / JOURNAL
    batches: dict[int, tuple[int, ...]] = {}
    trained: set[int] = set()
    for _, event in read_events(journal, effective=True, tokens=False):
        if isinstance(event, BatchConsumed):
            batches[event.step] = event.group_ids
        elif isinstance(event, BatchTrained):
            trained.add(event.step)
    if not batches:
        raise RunError(f"{run_dir} has not trained a batch yet")
    wanted = max(batches) if step is None else step
    if wanted not in batches:
        raise RunError(f"{run_dir} has no batch of step {wanted}: it has the batches of steps 0 to {max(batches)}")
    return TrainedBatch(wanted, _samples(journal, wanted, batches[wanted]), wanted in trained)


def _samples(journal: Path, step: int, group_ids: Sequence[int]) -> tuple[TrainedSample, ...]:
    groups = set(group_ids)
    prompts: dict[int, Prompt] = {}
    segments: dict[SampleId, list[Segment]] = {}
    scored: dict[SampleId, SampleScored] = {}
    for _, event in read_events(journal, effective=True, tokens=groups.__contains__):
        if isinstance(event, GroupOpened):
            if event.group_id in groups:
                prompts[event.group_id] = event.prompt
        elif isinstance(event, SegmentEnded):
            if event.sample_id.group in groups and event.segment.token_ids:
                append_segment(segments.setdefault(event.sample_id, []), event.segment)
        elif isinstance(event, SampleScored) and event.sample_id.group in groups:
            scored[event.sample_id] = event
    found = []
    for group in group_ids:
        siblings = [one for one in sorted(scored) if one.group == group]
        mean = statistics.fmean(scored[one].reward + scored[one].shaping for one in siblings)
        found += [
            TrainedSample(
                sample_id=one,
                prompt=prompts[group],
                segments=tuple(segments[one]),
                step=step,
                reward=scored[one].reward,
                shaping=scored[one].shaping,
                relative=scored[one].reward + scored[one].shaping - mean,
            )
            for one in siblings
            if segments.get(one)
        ]
    return tuple(found)


def in_order(samples: Sequence[TrainedSample], order: Order) -> list[TrainedSample]:
    """Sort samples, the largest first; by ``advantage``, the samples that move the policy most."""
    keys = {
        "reward": lambda sample: sample.reward,
        "length": lambda sample: sample.num_tokens,
        "lag": lambda sample: sample.lag,
        "advantage": lambda sample: abs(sample.relative),
    }
    return sorted(samples, key=keys[order], reverse=True)
