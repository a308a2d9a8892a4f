"""What can happen to a rollout: the closed set of journal events.

The ledger is the fold of these, the report is drawn from these, and the simulator replays these. Events
carry facts and no decisions: everything a decision needs is derived by the fold. They are tuples, which Python makes
in a third of the time of a frozen dataclass: a simulation makes tens of millions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rollover.types import Prompt, SampleId, Segment, WasteCause


class GroupOpened(NamedTuple):
    """A prompt was admitted; its samples wait."""

    time_s: float
    group_id: int
    prompt: Prompt
    group_size: int
    cursor: int
    """Prompts drawn from the source once this one is: where a restart goes on."""


class SampleStarted(NamedTuple):
    """A waiting or parked sample was sent to an engine whose weights were ``policy_version``."""

    time_s: float
    sample_id: SampleId
    policy_version: int


class SegmentEnded(NamedTuple):
    """Tokens reached us. With ``stop`` or ``length`` the sample is finished, with ``abort`` it is parked,
    with ``None`` it runs on (the weights changed, or progress was saved)."""

    time_s: float
    sample_id: SampleId
    segment: Segment


class SampleScored(NamedTuple):
    time_s: float
    sample_id: SampleId
    reward: float
    """As the task gives it."""
    shaping: float = 0.0
    """What the algorithm adds to it before it compares (a punishment for length, say)."""


class SampleFailed(NamedTuple):
    """The sample is out, with its tokens as waste; its siblings go on without it."""

    time_s: float
    sample_id: SampleId
    reason: str


class GroupDropped(NamedTuple):
    """The group will never be trained; its tokens are waste of ``cause``."""

    time_s: float
    group_id: int
    cause: WasteCause
    prompt_returned: bool
    """The prompt goes back to the head of the source."""


class BatchConsumed(NamedTuple):
    """These groups are the batch of ``step``, in this order."""

    time_s: float
    step: int
    group_ids: tuple[int, ...]


class BatchTrained(NamedTuple):
    """The step that trained the batch is done; these tokens of it had no gradient, by cause."""

    time_s: float
    step: int
    untrained: Mapping[WasteCause, int]


class BatchSkipped(NamedTuple):
    """The user decided that the batch of ``step`` is stepped over, whenever it is handed out: its step makes a version
    without an update. It was consumed before, and no checkpoint has seen it."""

    time_s: float
    step: int


class VersionPublished(NamedTuple):
    """Engines sample from ``policy_version`` from here on. Loading took ``pause_s``."""

    time_s: float
    policy_version: int
    pause_s: float


class CheckpointSaved(NamedTuple):
    """The trainer's state after ``step`` steps is on disk: earlier batches need no replay."""

    time_s: float
    step: int


class Restarted(NamedTuple):
    """A new process took over from the trainer's checkpoint at ``step``. Running samples fall back to what
    was journaled; batches consumed at ``step`` and later will be handed out again as they were."""

    time_s: float
    step: int
    redo_from: int | None
    """Journal sequence number after which the earlier events about rollouts are void (deterministic runs decode the
    interrupted round again); ``None`` keeps everything."""
    lost_tokens: int
    """Tokens recorded by the voided events; they are waste."""


Event = (
    GroupOpened
    | SampleStarted
    | SegmentEnded
    | SampleScored
    | SampleFailed
    | GroupDropped
    | BatchConsumed
    | BatchTrained
    | BatchSkipped
    | VersionPublished
    | CheckpointSaved
    | Restarted
)
