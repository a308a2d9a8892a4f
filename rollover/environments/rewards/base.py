"""Defines what all kinds of reward share: their settings, the spec that they are built from, and the response that they
score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Protocol, runtime_checkable

from rollover.environments.reward_value import COMPONENT_NAME, RewardValue
from rollover.settings.changes import Changeable


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings(ABC):
    """Holds the settings that all kinds of reward share. Each kind adds its own, and ``build``.

    Example: ``ExactConfig(timeout_s=2.0, retries=0)`` scores a response in one attempt of at most 2 seconds.
    """

    compares_answer: ClassVar[bool] = False
    """True if each response is compared with a reference answer."""
    needs_verifier: ClassVar[bool] = False
    """True if the source must have its own verifier, as reasoning-gym's datasets do."""
    reads_question: ClassVar[bool] = False
    """True if it reads the prompt as it stands in the row, without a chat template."""
    late_scores_zero: ClassVar[bool] = True
    """If true, a response that cannot be judged by the deadline scores 0; otherwise its sample fails."""

    kind: str
    name: str = ""
    """Name of the reward among the ``rewards`` of its source, and of its curve. Unset: the name of the function, or
    else the kind."""
    weight: float = 1.0
    """Weight of the reward in the sum of the ``rewards`` of its source. 0 only draws its curve."""
    timeout_s: Changeable[float] = 10.0
    """Seconds that one scoring may take; then its process is killed, with everything it has started. A ``function``,
    ``judge`` or ``environment`` that is late is retried, and then fails its sample. Every other kind scores 0 at once:
    a response that cannot be judged is not right, and excluding it would favour easy ones. After several late ones it
    has a tenth of the time."""
    workers: Changeable[int] = 2
    """Number of processes that score; the sources share one pool, as large as the largest number requested. 0 scores
    on the event loop, which suits verifiers that take a few microseconds and cannot hang. A ``function`` must be
    ``async`` for that."""
    retries: Changeable[int] = 1
    """Number of times that a scoring that raised, or a ``function`` or ``environment`` that was late, is retried before
    its sample counts as failed."""
    pass_score: Changeable[float] = 1.0
    """A response with at least this reward counts as solved in pass@k and in pass rates. Of several ``rewards``, the
    first one decides."""

    def __post_init__(self) -> None:
        if self.name and not COMPONENT_NAME.fullmatch(self.name):
            raise ValueError(f"reward.name must be letters, digits, '_', '-' and '.', got {self.name!r}")
        if not isfinite(self.weight):
            raise ValueError(f"reward.weight must be a finite number, got {self.weight}")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"reward.timeout_s must be above 0 and finite, got {self.timeout_s}")
        if not isfinite(self.pass_score):
            raise ValueError(f"reward.pass_score must be a finite number, got {self.pass_score}")
        if self.workers < 0:
            raise ValueError(f"reward.workers must be at least 0 (0: on the event loop), got {self.workers}")
        if self.retries < 0:
            raise ValueError(f"reward.retries must be at least 0, got {self.retries}")

    @property
    def needs_answer(self) -> bool:
        """Return whether each row must contain a reference answer."""
        return self.compares_answer

    @property
    def label(self) -> str:
        """Return the name of this reward in messages."""
        return self.kind

    @property
    def component(self) -> str:
        """Return its name among the rewards of a source."""
        return self.name or self.kind

    @property
    def most_at_once(self) -> int | None:
        """Return how many responses it scores at the same time on the event loop; ``None`` for any number."""
        return None

    def back_off_s(self, num_retried: int) -> float:
        """Return the seconds to wait before a scoring that failed is tried again."""
        return 0.0

    @property
    def compares_siblings(self) -> bool:
        """Return whether it scores all responses of a group at once."""
        return False

    @abstractmethod
    def build(self, spec: RewardSpec) -> Reward | GroupReward:
        """Build the reward. Raises ``DataError`` when it cannot be used: a library or function is missing, or the
        function has a wrong signature."""

    def judged_part(self, sample: RewardSample) -> str:
        """Return the part of a response that decides how long judging it takes."""
        return sample.completion

    def needed_columns(self) -> tuple[str, ...]:
        """Return the columns that this reward needs besides the reference answer. Raises ``DataError`` when they cannot
        be determined."""
        return ()

    def check(self, spec: RewardSpec) -> None:
        """Raise ``DataError`` for mistakes that can be found before the first response, at little cost."""
        del spec

    def references(self, spec: RewardSpec, columns: Mapping[str, Any]) -> list[str]:
        """Return the answers that are right; none if it compares with none. Raises ``RewardError`` if one cannot be."""
        return []

    def findings(self) -> Iterable[str]:
        """Look at what it needs besides this machine, and return a sentence about each."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Contains all that is needed to score the responses of one source, in any process.

    Example: ``RewardSpec(source="gsm8k", config=ExactConfig(), prompt_column="question", answer_column="answer")``
    compares the content of ``<answer>...</answer>`` with column ``answer``.
    """

    source: str
    config: RewardSettings
    component: str = ""
    """Name of the reward; empty if it is the only one of its source and has none."""
    gym_dataset: str | None = None
    """The reasoning-gym dataset whose verifier can score; ``None`` for other sources."""
    gym_config: Mapping[str, Any] = field(default_factory=dict)
    prompt_column: str | None = None
    """Path of the prompt; ``None`` if there is none, or several columns make it up."""
    prompt_parts: tuple[str, ...] = ()
    """Paths of the columns that are joined to make the prompt."""
    answer_column: str | None = None
    """Path of the reference answer; the prompt's path if the reply that ends its messages is the reference."""
    columns: tuple[str, ...] = ()
    """Columns that travel with the prompts, used to check a function's signature."""
    folder: str | None = None
    """Folder of the run, for what a reward remembers."""

    @property
    def key(self) -> str:
        """Return a name that no other reward of the run has."""
        return f"{self.source}/{self.component}"


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """Holds one finished response in the form that rewards receive."""

    prompt: str
    """The prompt as the model saw it."""
    columns: Mapping[str, Any]
    completion: str
    """The decoded response, without special tokens; of an episode, its last turn."""
    completion_ids: tuple[int, ...]
    """All tokens after the prompt."""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """The response as messages: one by the ``assistant`` for each turn, followed in an episode by the ``environment``'s
    answers with their ``reward``."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the response as messages with role and content."""
        turns = self.transcript or ({"role": "assistant", "content": self.completion},)
        return [{"role": turn["role"], "content": turn["content"]} for turn in turns]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RewardSample:
        lists = {name: tuple(value[name]) for name in ("completion_ids", "transcript")}
        return cls(**{**value, **lists})


class Reward(Protocol):
    """Turns a response into a finite number, or into several with names.

    Example: with the reference answer ``"42"``, ``ExactReward`` gives 1.0 for ``"<answer> 42 </answer>"`` and 0.0 for
    ``"42"``, which has no tag.
    """

    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        """Score one response, or return what awaiting scores it. Raises ``RewardError`` when it cannot be scored."""
        ...


@runtime_checkable
class RemoteReward(Reward, Protocol):
    """A reward that asks a server and counts what that costs."""

    used: Counter[str]
    ready_at_s: float
    """Time of the event loop before which the server wants no request to be tried again."""

    async def close(self) -> None: ...


class GroupReward(Protocol):
    """Turns all responses of a group into a finite number each.

    Example: a reward that ranks three siblings by length gives ``[0.0, 1.0, 0.5]`` for lengths of 12, 40 and 31.
    """

    def score_group(self, samples: Sequence[RewardSample]) -> list[RewardValue] | Awaitable[list[RewardValue]]:
        """Score the responses of a group, in their order."""
        ...
