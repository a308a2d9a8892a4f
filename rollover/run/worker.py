"""The settings of a worker as its command line gives them, and how its engine is opened. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rollover.clock import SystemClock
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.kind import EngineSetup, OpenedEngine
from rollover.run.kinds import AnyEngineConfig, open_engine
from rollover.settings.shape import ByKind
from rollover.swarm.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(WorkerConfig):
    """The settings of a worker with an engine of any kind."""

    engine: Annotated[AnyEngineConfig, ByKind()] = field(default_factory=EmbeddedConfig)


def opener(config: WorkerConfig, *, name: str, root: Path) -> Callable[[Path], Awaitable[OpenedEngine]]:
    """Return how engines of ``config`` are opened. ``name``: the worker's, by which its servers know it."""

    async def open_on(folder: Path) -> OpenedEngine:
        setup = EngineSetup(folder=folder, run=name, root=root, clock=SystemClock(), lockstep=config.deterministic)
        opening = open_engine(config.engine, setup)
        if config.engine.declared.in_process:  # it reads the weights without giving way to heartbeats
            return await asyncio.to_thread(asyncio.run, opening)
        return await opening

    return open_on
