"""``kind = "class"``: an object of the user's for each episode."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollover.environments.episodes.base import (
    Action,
    EnvironmentSettings,
    LiveEpisode,
    Outcome,
    Recovery,
    awaited,
    read_outcome,
)
from rollover.environments.episodes.tools import describe
from rollover.environments.user_function import PATH, import_function, import_in_run
from rollover.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig(EnvironmentSettings):
    """Has an object of a class of yours answer the turns of each episode.

    ``reset(row, seed)`` begins the episode of a row; siblings get the same seed. ``step(action)`` answers a turn: with
    a text, a list of messages, a table ``{"messages": ..., "reward": ..., "done": ...}``, or ``None`` at the end of
    the episode. ``close()``, if there is one, is called afterwards. Each may be ``async``.

    An object that is lost, as when its process was killed or the run was resumed, is made again; ``recovery`` says how
    it comes back. Global random numbers (``random``, NumPy) are the episode's own, so they repeat too.

    The chat template offers the functions that ``offered_tools(**params)`` returns, if there is this static method.

    A supervised warm-up teaches the turns that ``demonstrate(row)`` returns, if there is this method.

    Example: ``factory = "mine:Maze"`` calls ``Maze()``, then ``reset({"size": 4}, seed=7)``, then ``step`` for each
    turn.
    """

    kind: Literal["class"] = "class"
    """``"class"`` chooses an object per episode."""
    factory: str
    """``"module:Class"``, or a function that returns the object."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``factory``."""
    recovery: Recovery = "replay"
    """Way in which a lost episode comes back. ``replay``: ``reset`` and the recorded turns are repeated, and each
    answer has to be what it was. ``none``: ``reset`` alone, for environments whose answers depend on nothing else.
    ``snapshot``: ``restore(state)`` in place of ``reset``, with what ``snapshot()`` returned after the last recorded
    answer: JSON values of up to a million characters, which are journaled with every answer. ``live``: as ``snapshot``,
    for an environment that outlives this process, such as a server's; its state names the session. ``close`` is then
    called at the end of the episode only, and a turn that was open may come a second time (``action.turn``)."""
    reset_in_prompt: bool = False
    """The prompt is the row's and what ``reset`` returns: a text is added to the row's last message, and messages come
    after it. ``rollout.max_new_tokens`` then limits the prompt too."""

    def __post_init__(self) -> None:
        EnvironmentSettings.__post_init__(self)
        if not PATH.fullmatch(self.factory):
            raise ValueError(f"environment.factory must read 'module:Class', got {self.factory!r}")

    @property
    def demonstrates(self) -> bool:
        return callable(getattr(import_in_run(self.factory), "demonstrate", None))

    @property
    def recovers_by(self) -> Recovery:
        return self.recovery

    @property
    def writes_prompts(self) -> bool:
        return self.reset_in_prompt

    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        offered = getattr(import_in_run(self.factory), "offered_tools", lambda **params: ())
        try:
            functions = tuple(offered(**self.params))
        except Exception as error:  # the user's code may raise anything
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"environment.factory: offered_tools of {self.factory} failed ({problem})") from error
        return tuple(describe(function) for function in functions)

    def check(self) -> None:
        factory = import_in_run(self.factory)
        needed = ("reset", "step", *(("snapshot", "restore") if self.keeps_state else ()))
        missing = [name for name in needed if not callable(getattr(factory, name, None))]
        if inspect.isclass(factory) and missing:
            raise DataError(f"environment.factory: {self.factory} has no method {missing[0]!r}")
        try:
            inspect.signature(factory).bind(**self.params)
        except TypeError as error:
            raise DataError(f"environment.params do not fit {self.factory}: {error}") from None
        except ValueError:  # some builtins have no signature
            pass

    def begin(self, columns: Mapping[str, Any], seed: int, state: str = "") -> LiveEpisode:
        episode = import_function(self.factory)(**self.params)
        if state:
            awaited(episode.restore(json.loads(state)))
            return _Episode(episode)
        found = awaited(episode.reset(dict(columns), seed))
        if self.reset_in_prompt:
            role = "" if found is None or isinstance(found, str) else self.role
            return _Episode(episode, read_outcome("" if found is None else found, role))
        if found is not None:
            raise DataError("reset returned something that no model would read; set environment.reset_in_prompt = true")
        return _Episode(episode)


class _Episode:
    """An object of the user's, whether or not it has ``close`` and ``demonstrate``.

    Args:
        opening: answers the empty turn that an episode begins with if ``reset`` writes a part of the prompt.
    """

    def __init__(self, inner: Any, opening: Outcome | None = None) -> None:
        self._inner, self._opening = inner, opening
        self.close = getattr(inner, "close", lambda: None)
        self.demonstrate = getattr(inner, "demonstrate", None)

    def snapshot(self) -> Any:
        return self._inner.snapshot()

    def step(self, action: Action) -> Any:
        opening, self._opening = self._opening, None
        return opening or self._inner.step(action)
