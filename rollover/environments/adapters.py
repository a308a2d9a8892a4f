"""Environments written for other libraries, each as a ``factory`` of ``environment.kind = "class"``. A library is
imported when an episode begins, in the environment's process."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollover.environments.episodes.base import Action, Outcome, awaited
from rollover.environments.episodes.tools import Tools
from rollover.environments.user_function import import_function, import_in_run


class Trl:
    """An environment of TRL's ``environment_factory``: a class whose documented public methods are tools.

    ``reset`` gets the columns of the row as keywords, and ``get_reward``, if there is one, is called when a turn calls
    no tool.

    Args:
        factory: ``"module:Class"``.
        parser: the way in which calls are read; see ``ToolsConfig``.
    """

    def __init__(self, factory: str, parser: str = "hermes", tool_role: str = "tool") -> None:
        self._inner = import_function(factory)()
        self._tools = Tools(_methods(self._inner), parser=parser, role=tool_role)

    @staticmethod
    def offered_tools(factory: str, **options: Any) -> list[Callable[..., Any]]:
        return [*_methods(import_in_run(factory)()).values()]

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return self._inner.reset(**row)

    def step(self, action: Action) -> Outcome:
        outcome = self._tools.step(action)
        if outcome.done and hasattr(self._inner, "get_reward"):
            outcome = replace(outcome, reward=awaited(self._inner.get_reward()))
        return outcome


def _methods(inner: Any) -> dict[str, Callable[..., Any]]:
    names = [name for name, _ in inspect.getmembers(type(inner), inspect.isfunction)]
    return {name: getattr(inner, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"}


class TextArena:
    """A game of TextArena for one player. Its reward comes with its end.

    Args:
        game: ``"GuessTheNumber-v0"``, say.
        options: of ``textarena.make``.
    """

    def __init__(self, game: str, **options: Any) -> None:
        self._game = importlib.import_module("textarena").make(f"{game}-raw", **options)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._news()

    def step(self, action: Action) -> Any:
        done, _ = self._game.step(action.text)
        if not done:
            return self._news()
        rewards, _ = self._game.close()
        return {"messages": self._news(), "reward": rewards[0], "done": True}

    def _news(self) -> str:
        """Return what the game has said since the last time, without what the player said."""
        player, said = self._game.get_observation()
        return "\n".join(text for speaker, text, _ in said if speaker != player)


class OpenEnv:
    """An environment behind a server of OpenEnv.

    Args:
        base_url: of the server.
        sends: the field of its action that gets the turn.
        reads: the field of its observation that the model reads; all of it as JSON when left out.
    """

    def __init__(self, base_url: str, sends: str, reads: str | None = None) -> None:
        client: Any = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        self._client = client(base_url=base_url).sync()
        self._sends, self._reads = sends, reads

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return self._text(self._client.reset(seed=seed % 2**31).observation)

    def step(self, action: Action) -> Any:
        result = self._client.step({self._sends: action.text})
        return {"messages": self._text(result.observation), "reward": result.reward, "done": result.done}

    def close(self) -> None:
        self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        return json.dumps(observation) if self._reads is None else str(observation[self._reads])
