"""The records in the ledger: samples, groups, and what became of every token. Only the ledger changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollover.batch import WasteCause
from rollover.types import NO_COMPONENTS, Observation, Prompt, SampleId, Segment, Trajectory


class SampleState(StrEnum):
    """The state of a sample, from the opening of its group to its reward or failure."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ACTING = "acting"
    FINISHED = "finished"
    SCORED = "scored"
    FAILED = "failed"


# These are looked up several times per event, and a module's name is found in a tenth of the time of an enum's
# attribute.
WAITING, RUNNING, PARKED, ACTING, FINISHED, SCORED, FAILED = SampleState
SETTLED = (SCORED, FAILED)
STARTABLE = (WAITING, PARKED)


@dataclass(slots=True)
class SampleRecord:
    """One sample's place in the ledger."""

    sample_id: SampleId
    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=lambda: NO_COMPONENTS)
    solved: bool | None = None
    cause: WasteCause | None = None
    """The cause for which it was given up."""
    state: SampleState = WAITING
    num_tokens: int = 0
    num_observed: int = 0
    """Number of tokens of its observations."""
    turn_start: int = 0
    """Number of tokens sampled before the turn that goes on."""

    @property
    def trajectory(self) -> Trajectory:
        """Return the present state as a record."""
        segments = tuple(segment.unpacked() for segment in self.segments)
        return Trajectory(
            sample_id=self.sample_id,
            prompt=self.prompt,
            segments=segments,
            reward=self.reward,
            components=self.components,
            solved=self.solved,
            observations=tuple(observation.unpacked() for observation in self.observations),
        )

    @property
    def limited_tokens(self) -> int:
        return self.trajectory.limited_tokens if self.observations else self.num_tokens

    def pack(self) -> None:
        """Hold the tokens in little memory, now that they are only kept for a restart."""
        self.segments = [segment.packed() for segment in self.segments]
        self.observations = [observation.packed() for observation in self.observations]


@dataclass(slots=True)
class GroupRecord:
    """One group's place in the ledger."""

    group_id: int
    prompt: Prompt
    samples: list[SampleRecord]
    start_version: int | None = None
    """Weights in force when its first sample was sent out: no token of the group is older. ``None`` before."""
    num_unsettled: int = 0
    """Number of samples neither scored nor failed."""
    num_startable: int = 0
    """Number of samples waiting or parked."""

    @property
    def num_scored(self) -> int:
        return sum(s.state is SCORED for s in self.samples)


@dataclass(slots=True)
class Tokens:
    """The token accounts of a run: decoded = trained + wasted + live, and observed = in batches + dropped + live."""

    decoded: int = 0
    trained: int = 0
    wasted: Counter[WasteCause] = field(default_factory=Counter)
    reprefilled: int = 0
    observed: int = 0
    """Tokens of observations."""
    observed_in_batches: int = 0
    """Number of them in consumed batches, where the trainer reads and does not train them."""
    observed_dropped: int = 0
    """Number of them in samples that were given up or dropped."""

    @property
    def live(self) -> int:
        return self.decoded - self.trained - sum(self.wasted.values())

    @property
    def observed_live(self) -> int:
        return self.observed - self.observed_in_batches - self.observed_dropped

    def waste(self, cause: WasteCause, sample: SampleRecord) -> None:
        """Count the tokens of a sample that will never be in a batch."""
        self.wasted[cause] += sample.num_tokens
        self.observed_dropped += sample.num_observed

    def write_off(self, untrained: Mapping[WasteCause, int], sign: int) -> None:
        """Move tokens without a gradient from trained to wasted, or back with ``sign`` -1."""
        for cause, num_tokens in untrained.items():
            self.trained -= sign * num_tokens
            self.wasted[cause] += sign * num_tokens
