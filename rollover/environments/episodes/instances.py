"""``kind = "class"``: an object of the user's for each episode."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollover.environments.episodes.base import EnvironmentSettings, LiveEpisode
from rollover.environments.user_function import check_import, load_function
from rollover.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig(EnvironmentSettings):
    """Has an object of a class of yours answer the turns of each episode.

    ``reset(row, seed)`` begins the episode of a row; siblings get the same seed. ``step(action)`` answers a turn: with
    a text, a list of messages, a table ``{"messages": ..., "reward": ..., "done": ...}``, or ``None`` at the end of
    the episode. ``close()``, if there is one, is called afterwards. ``step`` may be ``async``.

    An object that is lost, as when its process was killed or the run was resumed, is made again: ``reset`` and the
    recorded turns are repeated, and each answer has to be what it was. Global random numbers (``random``, NumPy) are
    the episode's own, so they repeat too.

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

    def __post_init__(self) -> None:
        EnvironmentSettings.__post_init__(self)
        if not re.fullmatch(r"[\w.]+:\w+", self.factory):
            raise ValueError(f"environment.factory must read 'module:Class', got {self.factory!r}")

    @property
    def demonstrates(self) -> bool:
        return callable(getattr(load_function(self.factory), "demonstrate", None))

    def check(self) -> None:
        check_import(self.factory)
        factory = load_function(self.factory)
        missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
        if inspect.isclass(factory) and missing:
            raise DataError(f"environment.factory: {self.factory} has no method {missing[0]!r}")
        try:
            inspect.signature(factory).bind(**self.params)
        except TypeError as error:
            raise DataError(f"environment.params do not fit {self.factory}: {error}") from None
        except ValueError:  # some builtins have no signature
            pass

    def begin(self, columns: Mapping[str, Any], seed: int) -> LiveEpisode:
        episode = load_function(self.factory)(**self.params)
        episode.reset(dict(columns), seed)
        return _WithClose(episode)


class _WithClose:
    """An object of the user's, whether or not it has ``close`` and ``demonstrate``."""

    def __init__(self, inner: Any) -> None:
        self.step = inner.step
        self.close = getattr(inner, "close", lambda: None)
        self.demonstrate = getattr(inner, "demonstrate", None)
