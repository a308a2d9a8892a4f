"""Defines what all kinds of environment share: their settings, a turn of the model and the answer to it."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, Protocol

from rollover.errors import RewardError
from rollover.settings.changes import Changeable
from rollover.types import MAX_REWARD

MOST_CHARACTERS = 1_000_000
"""Longest answer of an environment."""
_MOST_IN_LOOP = 10_000
"""Characters that are tokenised in the event loop: they take 10 ms."""

_starting = threading.Lock()
_WANTED = "return a text, messages, a table with messages, reward and done, or None"

Messages = list[dict[str, Any]]
Recovery = Literal["none", "replay", "snapshot", "live"]


class RefusedAnswer(RewardError):
    """The environment has given an answer that cannot be used. Examples: a reward of NaN, an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A turn of the model, as an environment gets it."""

    text: str
    """The turn, decoded without special tokens."""
    token_ids: Sequence[int] = ()
    turn: int = 0
    """Number of turns of the episode before this one. A turn may be asked again after a crash, with the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An environment's answer to a turn.

    Examples:
        A move that earns a tenth and leaves the game open:

        >>> answer = Outcome(messages=[{"role": "user", "content": "#####"}], reward=0.1)
        >>> answer.done, answer.text
        (False, '#####')
    """

    messages: Messages = field(default_factory=list)
    """The messages that the model reads next; none are needed if the episode is done."""
    done: bool = False
    reward: float | None = None
    """Reward of the turn, if there is any."""

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


def read_outcome(value: Any, role: str) -> Outcome:
    """Return what an environment has returned as an outcome: a text, a message, a list of them, a table with
    ``messages``, ``reward`` and ``done``, or ``None`` for the end of the episode. ``role``: of a message that is given
    as a text.

    Raises:
        RefusedAnswer: it is none of these.
    """
    if isinstance(value, Outcome):
        given: Mapping[str, Any] = {"messages": value.messages, "done": value.done, "reward": value.reward}
    elif isinstance(value, Mapping) and "content" not in value:
        given = value
    else:
        given = {"messages": [] if value is None else value, "done": value is None}
    if unknown := given.keys() - {"messages", "done", "reward"}:
        raise RefusedAnswer(f"its answer has {min(unknown)!r}; it may have messages, reward and done")
    done = given.get("done", False)
    if not isinstance(done := done.item() if hasattr(done, "item") else done, bool):  # NumPy's truths
        raise RefusedAnswer(f"done is {done!r:.80}: it must be True or False")
    messages = _messages(given.get("messages", []), role)
    if not messages and not done:
        raise RefusedAnswer("its answer has no message although the episode is not done")
    return Outcome(messages=messages, done=done, reward=_reward(given.get("reward")))


def _reward(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise RefusedAnswer(f"its reward is {reward!r:.80}, which is no number of 64 bits") from None
    if not abs(number) <= MAX_REWARD:
        raise RefusedAnswer(f"its reward is {number}: not a finite number within {MAX_REWARD:g}")
    return number


def _messages(given: Any, role: str) -> Messages:
    listed = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(listed, Sequence):
        raise RefusedAnswer(f"it returned {type(given).__name__}: {_WANTED}")
    messages = [_message(message, role) for message in listed]
    if sum(len(str(value)) for message in messages for value in message.values()) > MOST_CHARACTERS:
        raise RefusedAnswer(f"its answer has more than {MOST_CHARACTERS:,} characters")
    return messages


def _message(message: Any, role: str) -> dict[str, Any]:
    """Return a message with all that it has beside role and text, for a template to read."""
    given: Any = {"content": message} if isinstance(message, str) else message
    if isinstance(given, Mapping):
        given = {key: value for key, value in given.items() if value is not None}
        given = {"role": role, **({"content": ""} if given.get("tool_calls") else {}), **given}
    if not isinstance(given, Mapping) or not isinstance(given.get("content"), str):
        raise RefusedAnswer(f"a message of its answer is no text and has none: {message!r:.80}: {_WANTED}")
    try:
        text = json.dumps({**given, "role": str(given["role"])}, ensure_ascii=False, allow_nan=False)
        found: dict[str, Any] = json.loads(whole(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedAnswer(f"a message of its answer has what JSON does not have ({error}): {message!r:.80}") from None
    return found


def whole(text: str) -> str:
    """Return a text without halves of characters, which no tokenizer takes: each is replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


async def written(size: int, write: Callable[..., tuple[int, ...]], *given: Any) -> tuple[int, ...]:
    """Call a function that tokenises ``size`` characters: in a thread if they are many, as it does not hold the
    interpreter."""
    return await asyncio.to_thread(write, *given) if size > _MOST_IN_LOOP else write(*given)


class LiveEpisode(Protocol):
    """The environment of one episode, in the process that holds it.

    Example: ``step(Action(text="up"))`` returns ``"####\\n#@ #\\n####"``.
    """

    def step(self, action: Action) -> Any | Awaitable[Any]:
        """Outcome a turn; see ``read_outcome`` for what may be returned."""
        ...

    def snapshot(self) -> Any:
        """Return the state in JSON values, if the environment keeps one."""
        return None

    def close(self) -> Any:
        return None


def step(live: LiveEpisode, action: Action, role: str) -> Outcome:
    """Have an episode answer a turn, outside any event loop. ``role``: see ``read_outcome``, whose errors it raises."""
    return read_outcome(awaited(live.step(action)), role)


def awaited(value: Any) -> Any:
    """Return what the user's code has returned, once it is there if that code is ``async``. All of it is awaited in one
    event loop, which goes on between two turns: what ``async`` code keeps, such as a connection, belongs to its
    loop."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    with _starting:
        loop = _shared_loop()
    return asyncio.run_coroutine_threadsafe(wait(), loop).result()


@cache
def _shared_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def serve() -> None:
        while True:  # the user's code may stop the loop, or exit in it
            with suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=serve, daemon=True).start()
    return loop


class EnvironmentTimeout(RewardError):
    """An environment that did not answer a turn within ``turn_timeout_s``. ``earned`` is the reward so far that no
    earlier answer had."""

    def __init__(self, message: str, earned: float = 0.0) -> None:
        super().__init__(message)
        self.earned = earned


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings(ABC):
    """Holds the settings that all kinds of environment share. Each kind adds its own, and ``begin``.

    Example: ``ToolsConfig(functions=("mine:calc",), max_turns=4)`` ends an episode after its fourth turn.
    """

    has_state: ClassVar[bool] = True
    """True if an answer depends on earlier turns."""

    kind: str
    max_turns: int = 16
    """Turns of the model after which an episode ends as truncated."""
    max_turn_tokens: int | None = None
    """Tokens after which a turn, and with it the episode, ends as truncated. Unset: as many as the response may still
    have. ``rollout.max_new_tokens`` limits the whole episode, with what the environment has answered."""
    turn_timeout_s: Changeable[float] = 60.0
    """Seconds that the environment may take to answer a turn. Then its process is killed with everything that it has
    started, and ``on_timeout`` says what becomes of the sample."""
    on_timeout: Changeable[Literal["fail", "end"]] = "fail"
    """Outcome if the answer to a turn of the model is late. With ``fail`` the sample fails and is not trained. With
    ``end`` the episode ends there as truncated, with the reward that it has earned so far, which teaches the model to
    avoid whatever takes long."""
    max_memory_gib: Changeable[int | None] = None
    """GiB of addresses that each process of the environment, or of its program, may have (``RLIMIT_AS``). They are more
    than the memory that a process uses. Unset: no limit."""
    workers: Changeable[int] = 2
    """Number of processes in which environments run. Sources whose environments have equal settings share them."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_memory_gib", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"environment.{name} must be at least 1, got {value}")
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
    def recovers_by(self) -> Recovery:
        """Return how an episode comes back that was lost with its process."""
        return "replay"

    @property
    def keeps_state(self) -> bool:
        """Return whether the state of an episode is recorded with each answer."""
        return self.recovers_by in ("snapshot", "live")

    @property
    def demonstrates(self) -> bool:
        """Return whether its episodes have ``demonstrate(row)``, which returns the turns that a warm-up teaches."""
        return False

    @property
    def writes_prompts(self) -> bool:
        """Return whether the environment writes the prompts. An episode then begins with an answer to an empty turn."""
        return False

    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return the descriptions of tools for the chat template."""
        return ()

    @abstractmethod
    def check(self) -> None:
        """Raise ``DataError`` for mistakes that can be found before the first episode."""

    @abstractmethod
    def begin(self, columns: Mapping[str, Any], seed: int, state: str = "") -> LiveEpisode:
        """Begin an episode in this process, or take it up where its state was recorded. Raises what the user's code
        raises."""
