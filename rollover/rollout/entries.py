"""Records of what the ledger knows: samples, groups, and where every token went. Only the ledger changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollover.types import Prompt, SampleId, Segment, Trajectory, WasteCause


class SampleState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"
    SCORED = "scored"
    FAILED = "failed"


# Looked up several times per event: a name of a module is found in a tenth of the time of an enum's attribute.
WAITING, RUNNING, PARKED, FINISHED, SCORED, FAILED = SampleState
SETTLED = (SCORED, FAILED)
STARTABLE = (WAITING, PARKED)


@dataclass(slots=True)
class SampleEntry:
    """One sample's place in the ledger."""

    sample_id: SampleId
    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    reward: float | None = None
    state: SampleState = WAITING
    num_tokens: int = 0

    @property
    def trajectory(self) -> Trajectory:
        """The record of it as it stands."""
        return Trajectory(
            sample_id=self.sample_id, prompt=self.prompt, segments=tuple(self.segments), reward=self.reward
        )


@dataclass(slots=True)
class GroupEntry:
    """One group's place in the ledger."""

    group_id: int
    prompt: Prompt
    samples: list[SampleEntry]
    start_version: int | None = None
    """Weights in force when its first sample was sent out: no token of the group is older. ``None`` before."""
    num_unsettled: int = 0
    """Samples neither scored nor failed."""
    num_startable: int = 0
    """Samples waiting or parked."""

    @property
    def num_scored(self) -> int:
        return sum(s.state is SCORED for s in self.samples)

    @property
    def rewards_G(self) -> tuple[float, ...]:
        return tuple(s.reward for s in self.samples if s.reward is not None)


@dataclass(slots=True)
class Tokens:
    """The token account of a run: decoded = trained + wasted + live.

    Example: of 1,000 decoded tokens 600 were trained and 150 dropped with their groups. 250 are live: they are being
    decoded, parked, or in groups that no batch has taken yet.
    """

    decoded: int = 0
    trained: int = 0
    wasted: Counter[WasteCause] = field(default_factory=Counter)
    reprefilled: int = 0

    @property
    def live(self) -> int:
        return self.decoded - self.trained - sum(self.wasted.values())

    def write_off(self, untrained: Mapping[WasteCause, int], sign: int) -> None:
        """Move tokens without a gradient from the trained ones to the waste, or back again with ``sign`` -1."""
        for cause, num_tokens in untrained.items():
            self.trained -= sign * num_tokens
            self.wasted[cause] += sign * num_tokens
