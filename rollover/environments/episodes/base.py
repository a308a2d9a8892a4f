"""Defines what all kinds of environment share: their settings, a turn of the model and the answer to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollover.errors import RewardError
from rollover.settings.changes import Changeable
from rollover.types import MAX_REWARD

MOST_CHARACTERS = 1_000_000
"""Longest answer of an environment."""

Messages = list[dict[str, str]]


class RefusedAnswer(RewardError):
    """The environment has given an answer that cannot be used. Examples: a reward of NaN, an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model did in its turn.

    Example: ``Action(text="Let me see. <tool_call>...</tool_call>", token_ids=(9, 12))``.
    """

    text: str
    """The turn, decoded without special tokens."""
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An environment's answer to a turn.

    Examples:
        A move that earns a tenth and leaves the game open:

        >>> answer = Answer(messages=[{"role": "user", "content": "#####"}], reward=0.1)
        >>> answer.done, answer.text
        (False, '#####')
    """

    messages: Messages = field(default_factory=list)
    """What the model reads next. Not needed if the episode is done."""
    done: bool = False
    reward: float | None = None
    """Reward of the turn, if there is any."""

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


def read_answer(value: Any, role: str) -> Answer:
    """Return what an environment has returned as an answer: a text, a list of messages, an ``Answer``, or ``None`` for
    the end of the episode. ``role``: of a message that is given as a text.

    Raises:
        RefusedAnswer: it is none of these.
    """
    answer = value if isinstance(value, Answer) else Answer(messages=value or [], done=value is None)
    if (reward := answer.reward) is not None:
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise RefusedAnswer(f"its reward is {reward!r}, which is no number") from None
        if not abs(reward) <= MAX_REWARD:
            raise RefusedAnswer(f"its reward is {reward}: not a finite number within {MAX_REWARD:g}")
    given = [answer.messages] if isinstance(answer.messages, str | Mapping) else answer.messages
    if not isinstance(given, Sequence):
        raise RefusedAnswer(f"it returned {type(given).__name__}: return a text, messages, an Answer or None")
    messages = [_message(message, role) for message in given]
    if sum(len(message["content"]) for message in messages) > MOST_CHARACTERS:
        raise RefusedAnswer(f"its answer has more than {MOST_CHARACTERS:,} characters")
    if not messages and not answer.done:
        raise RefusedAnswer("its answer has no message although the episode is not done")
    return Answer(messages=messages, done=bool(answer.done), reward=reward)


def _message(message: Any, role: str) -> dict[str, str]:
    if isinstance(message, str):
        return {"role": role, "content": message}
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise RefusedAnswer(f"a message of its answer is no text and has none: {message!r:.80}")
    return {"role": str(message.get("role", role)), "content": message["content"]}


class LiveEpisode(Protocol):
    """The environment of one episode, in the process that holds it.

    Example: ``step(Action(text="up"))`` returns ``"####\\n#@ #\\n####"``.
    """

    def step(self, action: Action) -> Any | Awaitable[Any]:
        """Answer a turn; see ``read_answer`` for what may be returned."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings(ABC):
    """Holds the settings that all kinds of environment share. Each kind adds its own, and ``begin``.

    Example: ``ToolsConfig(functions=("mine:calc",), max_turns=4)`` ends an episode after its fourth turn.
    """

    kind: str
    max_turns: int = 16
    """Turns of the model after which an episode ends as truncated."""
    max_turn_tokens: int | None = None
    """Tokens after which a turn, and with it the episode, ends as truncated. Unset: as many as the response may still
    have. ``rollout.max_new_tokens`` limits the whole episode, with what the environment has answered."""
    turn_timeout_s: Changeable[float] = 60.0
    """Seconds that the environment may take to answer a turn. Then its process is killed with everything that it has
    started, and the sample fails."""
    workers: Changeable[int] = 2
    """Number of processes in which environments run; the sources share them, as many as the largest number
    requested."""

    def __post_init__(self) -> None:
        for name, value in (("max_turns", self.max_turns), ("max_turn_tokens", self.max_turn_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"environment.{name} must be at least 1, got {value}")
        if self.workers < 1:
            raise ValueError(f"environment.workers must be at least 1, got {self.workers}")
        if not 0 < self.turn_timeout_s < math.inf:
            raise ValueError(f"environment.turn_timeout_s must be above 0 and finite, got {self.turn_timeout_s}")

    @property
    def role(self) -> str:
        """Return the role of messages that are given as text."""
        return "user"

    @property
    def concurrency(self) -> int:
        """Return how many turns a process answers at the same time."""
        return 1

    @property
    def has_state(self) -> bool:
        """Return whether an answer depends on earlier turns."""
        return True

    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptions of tools for the chat template."""
        return ()

    @abstractmethod
    def check(self) -> None:
        """Raise ``DataError`` for mistakes that can be found before the first episode."""

    @abstractmethod
    def begin(self, columns: Mapping[str, Any], seed: int) -> LiveEpisode:
        """Begin an episode in this process. Raises what the user's code raises."""
