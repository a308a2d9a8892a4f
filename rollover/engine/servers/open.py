"""Turns a config into a pool of servers: found or started, checked, opened and watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollover.engine.background import cancel
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.calls.dialect import ServerDialect
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.start.places import C, ServerPlaces, ServerProgram, StartedServer, ThisMachine
from rollover.engine.servers.weights.ownership import Ownership
from rollover.errors import EngineError, EngineTimeout
from rollover.weights.sources import FolderWeights

T = TypeVar("T")

_NOT_THERE = ("No module named", "cannot be started")
"""Texts in the log of a program that is not installed where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """The way servers of one kind are started and spoken to."""

    name: str
    """Its name in messages."""
    dialect: Callable[[HTTPClient], ServerDialect]
    program: ServerProgram
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Advice when the program does not start, by a text in its log."""


async def open_servers(
    config: C, setup: EngineSetup, model: ModelFolder, kind_for: Callable[[C], ServerKind]
) -> EnginePool:
    """Open a pool of the servers of ``config``, all with the weights of ``model`` as version 0.

    Args:
        kind_for: gives the kind of servers, given the settings of a server.

    Raises ``EngineError`` when a server cannot be used; the servers that were started are stopped then.
    """
    places: ServerPlaces = ThisMachine(setup.root / "logs")
    if setup.places is not None:
        places = await setup.places(config, setup.folder)
    async with AsyncExitStack() as stack:
        if config.launch:
            starting = []
            for number, own in enumerate(places.configs(config)):
                kind = kind_for(own)
                server = places.server(number, kind.program, own)
                stack.push_async_callback(server.stop)
                starting.append(_start(server, kind, own, model, setup.run))
            engines = await _all(starting)
        else:
            kind, engines = kind_for(config), []
            for url in config.urls:
                ownership = Ownership.on_this_machine(url, setup.run)
                stack.callback(ownership.release)
                client = HTTPClient(url, config)
                engines.append(ServerEngine(client, config, model, kind.dialect(client), ownership=ownership))
        for engine in engines:
            stack.push_async_callback(engine.close)
        if config.weight_transfer == "folder":
            await _all([engine.open() for engine in engines])
        else:  # each has a group of its own by then, with buckets in the memory of the sender
            for engine in engines:
                await engine.open()
        pool = EnginePool(engines, FolderWeights(0, model.path), setup.clock, config)
        await pool.open()
        stack.pop_all()
        return pool


async def _start(
    server: StartedServer, kind: ServerKind, config: ServerConfig, model: ModelFolder, run: str
) -> ServerEngine:
    try:
        await server.start()
    except EngineTimeout:
        raise
    except EngineError as e:
        if remedy := next((told for said, told in kind.remedies.items() if said in str(e)), None):
            raise EngineError(f"{e}\n{remedy}") from None
        if not any(sign in str(e) for sign in _NOT_THERE):
            raise
        raise EngineError(
            f"{e}\n{kind.name} may be installed in another environment: engine.launch_command names the program that"
            f" starts it, [{config.launch_command[0]!r}, ...] now (docs/engines.md)"
        ) from None
    client = server.client
    return ServerEngine(client, config, model, kind.dialect(client), process=server, ownership=Ownership(run))


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, or raise the first error once nothing is under way any more."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)
