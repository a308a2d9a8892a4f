"""``kind = "agent"``: a program that calls the model as it would call any OpenAI-compatible server."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollover.environments.episodes.base import EnvironmentSettings, LiveEpisode
from rollover.environments.episodes.tools import PARSERS
from rollover.environments.user_function import PATH, import_in_run
from rollover.errors import DataError, require
from rollover.settings.changes import Changeable


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig(EnvironmentSettings):
    """Runs a program for each episode, whose chat completions are the model's turns.

    The program gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, and the row as JSON in ``ROLLOVER_ROW`` and on its
    standard input. It writes its prompts itself, so ``rollout.max_new_tokens`` limits them too. A request goes on from
    an earlier one and its reply, or begins anew. The episode ends when the program does, with exit code 0.

    A program that is lost, as when the run was killed, is started again, and its first requests are answered from the
    record. They have to be what they were.

    Example: ``command = ["python", "agent.py"]``, where ``agent.py`` uses the ``openai`` client.
    """

    kind: Literal["agent"] = "agent"
    """``"agent"`` chooses a program."""
    command: Changeable[tuple[str, ...]] = ()
    """The program and its arguments."""
    function: str | None = None
    """``"module:function"``, which is called with the row in a process of its own, in place of ``command``. It may be
    ``async``."""
    parser: str = "hermes"
    """Way in which calls of the program's tools are read in a turn, as for ``kind = "tools"``. A turn with a call that
    cannot be read is a text."""
    turn_timeout_s: Changeable[float] = 60.0
    """Seconds that the program may take from its start to its first request, and from a reply to its next request or
    its end. Then it is killed with everything that it has started, and ``on_timeout`` says what becomes of the
    sample."""
    workers: Changeable[int] = 8
    """Number of programs that start at the same time. Once they have asked, they wait side by side: each unfinished
    episode has one."""

    def __post_init__(self) -> None:
        EnvironmentSettings.__post_init__(self)
        if bool(self.command) == (self.function is not None):
            raise ValueError("environment: set command or function, and not both")
        for path in (self.function, None if self.parser in PARSERS else self.parser):
            if path is not None and not PATH.fullmatch(path):
                raise ValueError(f"environment: {path!r} must read 'module:function'")

    @property
    def writes_prompts(self) -> bool:
        return True

    def check(self) -> None:
        require("uvicorn", purpose="environment.kind 'agent'")
        for path in (self.function, None if self.parser in PARSERS else self.parser):
            if path is not None:
                import_in_run(path)
        if self.command and shutil.which(self.command[0]) is None:
            raise DataError(f"environment.command: there is no executable {self.command[0]!r}; give its path")

    def begin(self, columns: Mapping[str, Any], seed: int, state: str = "") -> LiveEpisode:
        raise NotImplementedError("an agent is a program of its own")
