"""The records of a training step: ``Trajectory -> Group -> Batch -> TrainedStep``, and why a token is not trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from rollover.types import Observation, Prompt, Segment, Trajectory


class Baseline(NamedTuple):
    """The reward that was expected of a prompt when a sample began (``rollover.rollout.reward_history``).

    Example: with ``Baseline(mean=0.25, std=0.5, num_siblings=7)``, a response that earns a reward of 1 is 1.5
    deviations above what was expected.
    """

    mean: float
    std: float
    num_siblings: float
    """Number of siblings that this knowledge is worth; 0 if nothing was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The scored siblings of one prompt, ready to train. Failed samples are not among them.

    Examples:
        >>> prompt = Prompt(prompt_id="sums/4@0", token_ids=(15, 10, 22), text="1+8", source="sums")
        >>> right = Trajectory(sample_id=SampleId(0, 0), prompt=prompt, reward=1.0)
        >>> wrong = Trajectory(sample_id=SampleId(0, 1), prompt=prompt, reward=0.0)
        >>> Group(group_id=0, prompt=prompt, trajectories=(right, wrong)).rewards_G
        (1.0, 0.0)
    """

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: Baseline | None = None
    """Baseline of a group of one, which has no siblings to be compared with."""

    @property
    def rewards_G(self) -> tuple[float, ...]:
        return tuple(t.reward for t in self.trajectories if t.reward is not None)

    @property
    def oldest_version(self) -> int:
        """Return the version of the oldest token in the group; ``max_staleness`` bounds its age."""
        versions = [v for t in self.trajectories if (v := t.oldest_version) is not None]
        assert versions, f"group {self.group_id} holds no token"
        return min(versions)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups that one training step trains.

    Examples:
        >>> prompt = Prompt(prompt_id="sums/4@0", token_ids=(15, 10, 22), text="1+8", source="sums")
        >>> segment = Segment(0, (31, 4), (-0.2, -1.1), FinishReason.STOP, 0, 3.5, 3.6)
        >>> samples = [Trajectory(sample_id=SampleId(0, i), prompt=prompt, segments=(segment,)) for i in range(8)]
        >>> batch = Batch(step=0, groups=(Group(group_id=0, prompt=prompt, trajectories=tuple(samples)),))
        >>> len(batch.trajectories), batch.num_tokens
        (8, 16)
    """

    step: int
    """The step that trains it, counted from 0: the weights it starts from are version ``step``."""
    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(t for g in self.groups for t in g.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(g.num_tokens for g in self.groups)

    def packed(self) -> Batch:
        """Return the same batch in a ninth of the memory, to be kept and not to be trained; ``unpacked`` undoes it."""
        return self._with(Segment.packed, Observation.packed)

    def unpacked(self) -> Batch:
        return self._with(Segment.unpacked, Observation.unpacked)

    def _with(self, segment: Callable[[Segment], Segment], observation: Callable[[Observation], Observation]) -> Batch:
        def changed(t: Trajectory) -> Trajectory:
            segments, observations = tuple(map(segment, t.segments)), tuple(map(observation, t.observations))
            return replace(t, segments=segments, observations=observations)

        groups = (replace(g, trajectories=tuple(map(changed, g.trajectories))) for g in self.groups)
        return replace(self, groups=tuple(groups))


class WasteCause(StrEnum):
    """The cause for which decoded tokens were never trained.

    The first six never reach the trainer; the others are in a batch, and the loss gives them no gradient. A token
    whose ratio is clipped is trained: the clip ends a movement that it made.

    Example: ``WasteCause("zero_advantage").is_by_rollout`` is false, and ``WasteCause.FAILED.is_by_rollout`` true.
    """

    SURPLUS_GROUP = "surplus_group"
    """Its group finished beyond the batch, and the strategy keeps none of those."""
    DISCARDED_ON_ABORT = "discarded_on_abort"
    """It was still being decoded when the batch was full, and the strategy parks nothing."""
    FILTER_ZERO_SIGNAL = "filter_zero_signal"
    """``algorithm.group_filter`` rejected its group, whose rewards are all equal."""
    UNTRUSTED_ENGINE = "untrusted_engine"
    """The log-probs of the engine that sampled it differ from the trainer\'s."""
    FAILED = "failed_or_crashed"
    """Its sample failed, or too few of its siblings succeeded, or the process died before it was on record."""
    NO_REWARD = "no_reward"
    """Its reward does not apply to it (``None``), or to so many of its siblings that nothing is left to compare it
    with."""
    SKIPPED = "skipped_batch"
    """The user skipped its batch."""
    MASKED_TRUNCATED = "masked_truncated"
    """Its response was cut by the token budget (``algorithm.mask_truncated``)."""
    MASKED_STALE = "masked_stale"
    """An older version sampled it (``algorithm.correction = "mask_stale"``)."""
    REJECTED_WEIGHT = "rejected_weight"
    """Its importance weight lies outside the bounds (``algorithm.correction = "mis"``)."""
    REJECTED_SAMPLE = "rejected_sample"
    """The mean weight of its sample lies outside the bounds (``algorithm.guard``)."""
    ONLY_CHOICE = "only_choice"
    """It was the only token that ``rollout.top_p``, ``top_k`` and ``min_p`` left, so its log-prob is always 0."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Its advantage is exactly 0, as in a group whose rewards are all equal, and no KL term trains it."""

    @property
    def is_by_rollout(self) -> bool:
        """Return whether the token never reached the trainer; otherwise it was in a batch, and the loss did not use
        it."""
        return self in _BY_ROLLOUT


_BY_ROLLOUT = frozenset(
    {
        WasteCause.SURPLUS_GROUP,
        WasteCause.DISCARDED_ON_ABORT,
        WasteCause.FILTER_ZERO_SIGNAL,
        WasteCause.UNTRUSTED_ENGINE,
        WasteCause.FAILED,
        WasteCause.NO_REWARD,
    }
)


class Drift(NamedTuple):
    """Distance between the log-probs that an engine reported and the trainer's, over tokens sampled by the current
    weights (lag 0), for which the two agree up to rounding.

    Example: ``Drift(num_tokens=3, mean_abs=0.02)`` for reported log-probs of -1.00, -2.00 and -0.50 and the trainer's
    -1.01, -2.02 and -0.53.
    """

    num_tokens: int
    mean_abs: float
    """Mean of |rollout log-prob - proximal log-prob|, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The result of one training step."""

    metrics: Mapping[str, float]
    untrained: Mapping[WasteCause, int] = field(default_factory=dict)
    """Response tokens of the batch that no gradient reached, by cause."""
    drift: Mapping[str, Drift] = field(default_factory=dict)
    """Drift of each engine that sampled tokens, by its name (``Segment.engine``)."""
