"""The events that can happen to a rollout, a closed set: the journal contains nothing else.

The ledger is the fold of these, the report is drawn from these, and the simulator replays these. Events
contain facts and no decisions: everything that a decision needs is derived by the fold. They are tuples, which Python
creates in a third of the time of a frozen dataclass: a simulation creates tens of millions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rollover.batch import WasteCause
from rollover.types import NO_COMPONENTS, Observation, Prompt, SampleId, Segment


class GroupOpened(NamedTuple):
    """A prompt was admitted, and its samples wait to be started.

    Example: ``GroupOpened(time_s=0.0, group_id=12, prompt=prompt, group_size=8, cursor=13)`` admits the thirteenth
    prompt of the source with samples ``g12.0`` to ``g12.7``.
    """

    time_s: float
    group_id: int
    prompt: Prompt
    group_size: int
    cursor: int
    """Prompts drawn from the source, this one included: a restart continues there."""


class SampleStarted(NamedTuple):
    """A waiting or parked sample was sent to an engine whose weights were ``policy_version``.

    Example: ``SampleStarted(4.0, SampleId(12, 0), 3)``: sample g12.0 went out under version 3, 4 s into the run.
    """

    time_s: float
    sample_id: SampleId
    policy_version: int


class SegmentEnded(NamedTuple):
    """Tokens arrived. With ``stop`` or ``length`` the sample is finished, with ``abort`` it is parked, with ``turn``
    its environment acts, and with ``None`` it keeps running (the weights changed, or progress was saved).

    Example: ``SegmentEnded(8.0, SampleId(12, 0), segment)`` with 300 tokens of version 3 and ``FinishReason.STOP``:
    sample g12.0 waits for its reward.
    """

    time_s: float
    sample_id: SampleId
    segment: Segment


class Observed(NamedTuple):
    """The environment of an episode has answered its last turn: another turn follows, or the episode has ended.

    Example: ``Observed(8.4, SampleId(12, 0), observation)`` with the three tokens of a tool's result: sample g12.0 is
    parked until the engine has room for its next turn.
    """

    time_s: float
    sample_id: SampleId
    observation: Observation


class SampleScored(NamedTuple):
    """A finished sample has its reward.

    Example: ``SampleScored(9.5, SampleId(12, 0), reward=1.0, shaping=-0.2)`` is a right answer that the algorithm
    punishes for its length: siblings are compared with 0.8. With ``components={"exact": 1.0, "style": 0.5}`` the reward
    is their weighted sum.
    """

    time_s: float
    sample_id: SampleId
    reward: float
    """The reward before shaping."""
    shaping: float = 0.0
    """The amount that the algorithm adds to it before comparing (a penalty for length, for example)."""
    components: Mapping[str, float] = NO_COMPONENTS
    """The numbers that the reward is the weighted sum of, by name; empty for a reward without parts."""
    solved: bool | None = None
    """True if the reward reached the ``pass_score`` of its source; ``None`` if that is not known."""


class SampleFailed(NamedTuple):
    """The sample was given up, and its tokens are wasted. Its siblings continue without it."""

    time_s: float
    sample_id: SampleId
    reason: str
    cause: WasteCause = WasteCause.FAILED
    """``no_reward`` for a sample that no reward applies to, which is not a failure."""


class GroupDropped(NamedTuple):
    """The group will never be trained. The tokens of its samples are wasted for ``cause``."""

    time_s: float
    group_id: int
    cause: WasteCause
    prompt_returned: bool
    """True if the prompt goes back to the head of the source."""


class BatchConsumed(NamedTuple):
    """The batch of ``step`` was taken: it consists of these groups, in this order."""

    time_s: float
    step: int
    group_ids: tuple[int, ...]


class BatchTrained(NamedTuple):
    """The step that trained the batch is done. ``untrained`` counts its tokens that had no gradient, by cause."""

    time_s: float
    step: int
    untrained: Mapping[WasteCause, int]


class BatchSkipped(NamedTuple):
    """The user decided to skip the batch of ``step`` whenever it is handed out: its step makes a version without an
    update. It was consumed before, and no checkpoint includes it.
    """

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
    """A new process took over from the trainer's checkpoint at ``step``. Running samples fall back to their journaled
    tokens; batches consumed at ``step`` and later will be handed out again as they were.
    """

    time_s: float
    step: int
    redo_from: int | None
    """Journal sequence number after which the earlier events about rollouts are void (deterministic runs decode the
    interrupted round again); ``None`` keeps everything."""
    lost_tokens: int
    """Tokens recorded by the voided events; they are wasted."""


Event = (
    GroupOpened
    | SampleStarted
    | SegmentEnded
    | Observed
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
