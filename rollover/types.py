"""The records that cross package boundaries: ``Prompt -> Trajectory (Segments and Observations)``.

All are frozen and none needs torch. A new stage of the flow makes a new value
(``trajectory.extended(segment)``); nothing is ever edited in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from rollover.kept import MAX_KEPT
from rollover.token_bytes import in_order, join_bytes, split_bytes

UNBOUNDED = "unbounded"
"""``Annotated[float, UNBOUNDED]`` declares a setting that may be ``inf``; all other numbers of a config are finite."""


def is_moderate(number: float) -> bool:
    """Return whether float32 can compute with ``number``: it is 0, or its size lies between 1e-30 and 1e30."""
    return number == 0 or 1e-30 <= abs(number) <= 1e30


class FinishReason(StrEnum):
    """The reason for which a segment ended.

    Examples:
        >>> FinishReason("abort") is FinishReason.ABORT
        True
    """

    STOP = "stop"
    """The model sampled a stop token (kept, as its last token) or completed a stop string."""
    LENGTH = "length"
    """The response reached ``max_new_tokens``, counted over all its segments."""
    ABORT = "abort"
    """The scheduler stopped it; the trajectory is parked and can be resumed."""
    TURN = "turn"
    """The model's turn in an episode is over, and it is for the environment to act."""


class SampleId(NamedTuple):
    """One sample: the number of its group (in order of opening) and its place among the siblings.

    Examples:
        The fourth sample of the thirteenth group:

        >>> str(SampleId(12, 3))
        'g12.3'
    """

    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no code calls on a sample

    def __str__(self) -> str:
        return f"g{self.group}.{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings for drawing tokens. Every field is sent to every engine explicitly.

    Examples:
        Greedy decoding, for evaluation:

        >>> SamplingParams(max_new_tokens=512, temperature=0.0).top_p
        1.0
    """

    max_new_tokens: int
    """Budget of the whole response, across all resumes."""
    temperature: float = 1.0
    """0 means greedy: allowed for evaluation, refused for training."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    """Leaves out tokens that are less probable than this share of the most probable one."""
    returns_kept: bool = False
    """Each token comes with its kept set (``rollover.kept``): the tokens among which it was drawn."""
    returns_routes: bool = False
    """Each token comes with its route (``rollover.routes``): the experts of the row that it was drawn from."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Return whether tokens are drawn from a part of the vocabulary only."""
        return bool(self.temperature and (self.top_k or self.top_p < 1 or self.min_p))

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not (self.temperature >= 0 and is_moderate(self.temperature)):
            raise ValueError(f"temperature must be 0 or lie between 1e-30 and 1e30, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 is off), got {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must lie in [0, 1) (0 is off), got {self.min_p}")
        if self.returns_kept and not 0 < self.top_k <= MAX_KEPT:
            raise ValueError(f"kept sets need a top_k from 1 to {MAX_KEPT:,}, got {self.top_k}")
        if "" in self.stop_strings:
            raise ValueError("stop_strings must not hold an empty string, which every response completes at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question for the model, tokenised once and for all.

    Examples:
        >>> answer = {"answer": "9"}
        >>> prompt = Prompt(prompt_id="sums/4@0", token_ids=(15, 10, 22), text="1+8", source="sums", columns=answer)
        >>> prompt.columns["answer"]
        '9'
    """

    prompt_id: str
    """Names the dataset row and the pass over it: ``"<source>/<row>@<epoch>"``."""
    token_ids: tuple[int, ...]
    text: str
    """The prompt as the model sees it, after the chat template."""
    source: str
    """Name of the task source; it chooses the reward."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's remaining columns (answer, metadata): JSON values only."""


class Segment(NamedTuple):
    """Tokens decoded without interruption by one engine under one policy version.

    A tuple like the events (``rollover.rollout.events``), and for the same reason.

    Examples:
        Two tokens that version 7 sampled before the sample was parked:

        >>> segment = Segment(7, (31, 4), (-0.2, -1.1), FinishReason.ABORT, 7, 3.5, 3.6)
        >>> segment.policy_version, len(segment.token_ids), segment.finish_reason.value
        (7, 2, 'abort')
    """

    policy_version: int
    """Version of the weights that sampled these tokens."""
    token_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was sampled from; float32 values."""
    finish_reason: FinishReason | None
    """``None`` when the weights changed under a running rollout: the next segment continues it."""
    kv_version: int
    """Oldest version whose key-value cache these tokens attended to; equals ``policy_version``
    unless the engine kept its cache over a weight update."""
    start_s: float
    end_s: float
    """Run clock at the first and after the last token of the segment."""
    num_prefilled_tokens: int = 0
    """Response tokens whose cache had to be computed again before this segment could start; with vLLM, all that were
    sent again. For an episode, only tokens of its current turn: earlier turns are part of the call's prompt."""
    engine: str = ""
    """Name of the engine that sampled these tokens, where a run has several."""
    kept: Sequence[bytes] = ()
    """Kept set of each token (``rollover.kept``); empty if all were drawn from the whole vocabulary."""

    routes: Sequence[bytes] = ()
    """Route of each token (``rollover.routes``); empty if none was recorded."""

    def continues_into(self, later: Segment) -> bool:
        """Return whether ``later`` continued without an interruption and under the same weights and cache."""
        return (
            self.policy_version == later.policy_version
            and self.finish_reason is None
            and self.kv_version == later.kv_version
            and self.engine == later.engine
        )

    def joined(self, later: Segment) -> Segment:
        return later._replace(
            token_ids=_joined(self.token_ids, later.token_ids),
            rollout_logprobs=_joined(self.rollout_logprobs, later.rollout_logprobs),
            start_s=self.start_s,
            num_prefilled_tokens=self.num_prefilled_tokens + later.num_prefilled_tokens,
            kept=in_order((s.kept, len(s.token_ids)) for s in (self, later)),
            routes=in_order((s.routes, len(s.token_ids)) for s in (self, later)),
        )

    def packed(self) -> Segment:
        """Return the same segment with 8 bytes a token instead of about 70; ``unpacked`` undoes it exactly, since
        log-probs are float32 values. Kept sets are then in one piece, and so are routes. Tokens that are not in a
        tuple stay as they are."""
        if not isinstance(self.token_ids, tuple):
            return self
        return self._replace(
            token_ids=array("i", self.token_ids),
            rollout_logprobs=array("f", self.rollout_logprobs),
            kept=(join_bytes(self.kept),) if self.kept else (),
            routes=(join_bytes(self.routes),) if self.routes else (),
        )

    def unpacked(self) -> Segment:
        """Return a packed segment as it was."""
        if not isinstance(self.token_ids, array):
            return self
        return self._replace(
            token_ids=tuple(self.token_ids),
            rollout_logprobs=tuple(self.rollout_logprobs),
            kept=split_bytes(self.kept[0], len(self.token_ids)) if self.kept else (),
            routes=split_bytes(self.routes[0], len(self.token_ids)) if self.routes else (),
        )


def _joined(values: Sequence[Any], later: Sequence[Any]) -> Sequence[Any]:
    """Return both, one after the other; a range stands for as many tokens that are not there."""
    if isinstance(values, range) and isinstance(later, range):
        return range(len(values) + len(later))
    return (*values, *later)


def append_segment(segments: list[Segment], segment: Segment) -> None:
    """Append ``segment``, joined to the last one if nothing separates them."""
    if segments and segments[-1].continues_into(segment):
        segment = segments.pop().joined(segment)
    segments.append(segment)


class Observation(NamedTuple):
    """The answer of an episode's environment to a turn: tokens that the model reads and nobody has sampled.

    Examples:
        A calculator's result, which another turn follows:

        >>> observation = Observation((19, 6), "46", start_s=3.6, end_s=3.7)
        >>> observation.end is None
        True
    """

    token_ids: Sequence[int]
    """Tokens between the end of the turn and the beginning of the next one; none at the end of an episode."""
    text: str = ""
    """The answer in words, without the chat template's part."""
    reward: float | None = None
    """Reward of the turn, if the environment gives any."""
    end: FinishReason | None = None
    """``STOP`` if the episode is over, ``LENGTH`` if its tokens or turns are used up; otherwise another turn
    follows."""
    start_s: float = 0.0
    end_s: float = 0.0
    """Run clock when the environment began to act, and when its answer came."""
    state: str = ""
    """State of the environment after the answer, in JSON, for an environment that goes on from there after a crash."""
    parent: int | None = None
    """Number of the turn that the next turn goes on from, counted from 0; ``None`` for the latest one. Requests of a
    program can branch, and then the turns of an episode form a tree."""

    def packed(self) -> Observation:
        return self._replace(token_ids=array("i", self.token_ids)) if isinstance(self.token_ids, tuple) else self

    def unpacked(self) -> Observation:
        return self._replace(token_ids=tuple(self.token_ids)) if isinstance(self.token_ids, array) else self


MAX_REWARD = 1e15
"""Largest size of a reward. Advantages are float32, which can still square and sum a batch of this size."""


NO_COMPONENTS: Mapping[str, float] = {}


class Score(float):
    """A reward with what is known about it: its components, and whether the response solved its prompt.

    Examples:
        >>> score = Score(1.05, components={"exact": 1.0, "format": 0.5}, solved=True)
        >>> score > 1, score.components["format"], Score(0.25).components
        (True, 0.5, {})
    """

    components: Mapping[str, float]
    """The numbers that the reward is the weighted sum of, by name; empty for a reward without parts."""
    solved: bool | None
    """``None`` if that is not known."""

    def __new__(
        cls, reward: float, *, components: Mapping[str, float] = NO_COMPONENTS, solved: bool | None = None
    ) -> Score:
        score = super().__new__(cls, reward)
        score.components, score.solved = components, solved
        return score


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A prompt and the response so far. Segments tile the tokens that were sampled; in an episode, an observation
    follows each turn.

    Examples:
        A response that was parked after three tokens and resumed under newer weights:

        >>> prompt = Prompt(prompt_id="sums/4@0", token_ids=(15, 10, 22), text="1+8", source="sums")
        >>> parked = Segment(6, (7, 3, 9), (-0.1, -0.4, -0.2), FinishReason.ABORT, 6, 0.0, 1.0)
        >>> resumed = Segment(7, (2,), (-0.3,), FinishReason.STOP, 7, 2.0, 2.5)
        >>> trajectory = Trajectory(sample_id=SampleId(0, 0), prompt=prompt, segments=(parked, resumed), reward=1.0)
        >>> trajectory.token_ids, trajectory.policy_versions
        ((7, 3, 9, 2), (6, 6, 6, 7))
        >>> trajectory.oldest_version, trajectory.num_resumes
        (6, 1)

        An episode of two turns, between which a calculator answered:

        >>> asked = Segment(6, (7, 3), (-0.1, -0.4), FinishReason.TURN, 6, 0.0, 1.0)
        >>> replied = Segment(6, (8,), (-0.2,), FinishReason.TURN, 6, 2.0, 2.1)
        >>> answers = (Observation((19, 6)), Observation((), end=FinishReason.STOP))
        >>> parts = {"segments": (asked, replied), "observations": answers}
        >>> episode = Trajectory(sample_id=SampleId(0, 1), prompt=prompt, **parts)
        >>> episode.token_ids, episode.response_ids
        ((7, 3, 8), (7, 3, 19, 6, 8))
        >>> episode.finish_reason.value, episode.num_turns
        ('stop', 2)

        A program that asked for two alternatives, of which it took up the first. The opening turn is empty:

        >>> start = Segment(6, (), (), FinishReason.TURN, 6, 0.0, 0.0)
        >>> asked = (Observation((19, 6)), Observation((19, 6), parent=0), Observation((4,), parent=1))
        >>> parts = {"segments": (start, replied, replied, replied), "observations": (*asked, answers[1])}
        >>> tree = Trajectory(sample_id=SampleId(0, 2), prompt=prompt, **parts)
        >>> tree.paths, tree.before(3)
        (((0, 2), (0, 1, 3)), (15, 10, 22, 19, 6, 8, 4))
    """

    sample_id: SampleId
    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=lambda: NO_COMPONENTS)
    """See ``Score``."""
    solved: bool | None = None
    observations: tuple[Observation, ...] = ()
    """The environment's answer to each turn of an episode that it has answered."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of the response, exactly as sampled."""
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Return all tokens that follow the prompt: of each turn, and of the observation after it."""
        parts = zip_longest(self.turns, (o.token_ids for o in self.observations), fillvalue=())
        return tuple(t for part in parts for ids in part for t in ids)

    @property
    def parents(self) -> tuple[int, ...]:
        """Return for each turn after the first the number of the turn that it goes on from."""
        return tuple(turn if o.parent is None else o.parent for turn, o in enumerate(self.observations))

    def path(self, turn: int) -> tuple[int, ...]:
        """Return the turns from the first one to ``turn``, each of which goes on from the one before it."""
        parents, path = self.parents, [turn]
        while path[-1]:
            path.append(parents[path[-1] - 1])
        return tuple(reversed(path))

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return the path to each turn from which no other goes on, in the order of these turns; one unless requests
        branched. Each is a row to train."""
        num_turns = len(self.turns)
        followed = {*self.parents[: max(num_turns - 1, 0)]}
        return tuple(self.path(turn) for turn in range(num_turns) if turn not in followed)

    def before(self, turn: int) -> tuple[int, ...]:
        """Return the tokens that the model reads before a turn: the prompt, and all on the path to the turn."""
        turns, ids = self.turns if turn else (), [*self.prompt.token_ids]
        for earlier, later in pairwise(self.path(turn)):
            ids += (*turns[earlier], *self.observations[later - 1].token_ids)
        return tuple(ids)

    @property
    def num_turns(self) -> int:
        """Return the number of turns that have ended; 0 if it is no episode."""
        return sum(s.finish_reason is FinishReason.TURN for s in self.segments)

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens sampled in each turn, of which the last need not be over."""
        turns, turn = list[tuple[int, ...]](), tuple[int, ...]()
        for segment in self.segments:
            turn += tuple(segment.token_ids)
            if segment.finish_reason is FinishReason.TURN:
                turns.append(turn)
                turn = ()
        return (*turns, turn) if turn else tuple(turns)

    @property
    def has_opening(self) -> bool:
        """Return whether its first turn sampled nothing and only asked the environment for the prompt."""
        return self.turns[:1] == ((),)

    @property
    def turn_ids(self) -> tuple[int, ...]:
        """Return the tokens sampled since the last observation: of the turn that goes on or is to be answered."""
        return (*self.turns, ())[len(self.observations)] if self.turns else ()

    @property
    def rollout_logprobs(self) -> tuple[float, ...]:
        return tuple(p for s in self.segments for p in s.rollout_logprobs)

    @property
    def kept(self) -> tuple[bytes, ...]:
        """Return the kept set of each response token; nothing if all were drawn from the whole vocabulary."""
        return in_order((s.kept, len(s.token_ids)) for s in self.segments)

    @property
    def routes(self) -> tuple[bytes, ...]:
        """Return the route of each response token; nothing if none was recorded."""
        return in_order((s.routes, len(s.token_ids)) for s in self.segments)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Return the version that sampled each response token."""
        return tuple(s.policy_version for s in self.segments for _ in s.token_ids)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def limited_tokens(self) -> int:
        """Return the number of tokens that the limit of a response counts: those of an episode's longest path with what
        was observed on it, or all that were sampled if these are more."""
        parents, ends = self.parents, list[int]()
        for turn, ids in enumerate(self.turns):
            before = ends[parents[turn - 1]] + len(self.observations[turn - 1].token_ids) if turn else 0
            ends.append(before + len(ids))
        return max(self.num_tokens, *ends, 0)

    @property
    def oldest_version(self) -> int | None:
        """Return the version of the oldest sampled token; ``None`` while there is none."""
        return min((s.policy_version for s in self.segments if s.token_ids), default=None)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why the last segment ended; for an episode that is over, why it ended."""
        reason = self.segments[-1].finish_reason if self.segments else None
        if reason is FinishReason.TURN and self.observations and len(self.observations) == self.num_turns:
            return self.observations[-1].end
        return reason

    @property
    def num_resumes(self) -> int:
        """Return how often the rollout was stopped and resumed."""
        return sum(s.finish_reason is FinishReason.ABORT for s in self.segments[:-1])

    def extended(self, segment: Segment) -> Trajectory:
        """Return the trajectory with ``segment`` appended, as ``append_segment`` does."""
        segments = [*self.segments]
        append_segment(segments, segment)
        return replace(self, segments=tuple(segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """The adapters that engines must have room for."""

    rank: int
    targets: tuple[str, ...]
    """The matrices that have an adapter, by the last part of their names."""
