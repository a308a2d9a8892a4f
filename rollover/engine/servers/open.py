"""From a config to a pool of servers: found or started, checked, opened, watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollover.clock import Clock
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.dialect import Dialect
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.launch import ServerProcess, free_port
from rollover.engine.servers.ownership import Ownership
from rollover.engine.servers.pool import EnginePool
from rollover.errors import EngineError, EngineTimeout
from rollover.weights.sources import FolderWeights

T = TypeVar("T")

_NOT_THERE = ("No module named", "cannot be started")
"""In the log of a program that is not installed where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """The way servers of one kind are started and spoken to."""

    dialect: Callable[[HTTPClient], Dialect]
    arguments: Callable[[int], list[str]]
    """Arguments with which the command serves the model on a port of the loopback interface."""
    env: Mapping[str, str]
    """Variables that its environment needs."""
    program: str
    """Its name in messages."""


async def open_servers(
    config: ServerConfig, kind: ServerKind, model: ModelFolder, *, run: str, logs: Path, clock: Clock
) -> EnginePool:
    """A pool of the servers of ``config``, all with the weights of ``model`` as version 0.

    Args:
        run: the run's name among all runs, to which the servers belong while the pool is open.

    Raises ``EngineError`` when one of them cannot be used; those that were started are stopped then.
    """
    async with AsyncExitStack() as stack:
        if config.launch:
            starting = [_start(config, kind, model, number, run, logs, stack) for number in range(config.num_servers)]
            engines = await _all(starting)
        else:
            engines = []
            for url in config.urls:
                ownership = Ownership.on_this_machine(url, run)
                stack.callback(ownership.release)
                client = HTTPClient(url, config)
                engines.append(ServerEngine(client, config, model, kind.dialect(client), ownership=ownership))
        for engine in engines:
            stack.push_async_callback(engine.close)
        await _all([engine.open() for engine in engines])
        pool = EnginePool(engines, FolderWeights(0, model.path), clock, config)
        await pool.open()
        stack.pop_all()
        return pool


async def _start(
    config: ServerConfig, kind: ServerKind, model: ModelFolder, number: int, run: str, logs: Path, stack: AsyncExitStack
) -> ServerEngine:
    port = free_port()
    client = HTTPClient(f"http://127.0.0.1:{port}", config)
    devices = {"CUDA_VISIBLE_DEVICES": config.launch_devices[number]} if config.launch_devices else {}
    process = ServerProcess(
        [*config.launch_command, *kind.arguments(port), *config.launch_args],
        env={**kind.env, **devices, **config.launch_env},
        log=logs / f"server-{number}.log",
        ready=lambda: client.call("GET", "/health", timeout_s=config.health_timeout_s),
        config=config,
    )
    stack.push_async_callback(process.stop)
    try:
        await process.start()
    except EngineTimeout:
        raise
    except EngineError as e:
        if not any(sign in str(e) for sign in _NOT_THERE):
            raise
        raise EngineError(
            f"{e}\n{kind.program} may be installed in another environment: engine.launch_command names the program that"
            f" starts it, [{config.launch_command[0]!r}, ...] now (docs/engines.md)"
        ) from None
    return ServerEngine(client, config, model, kind.dialect(client), process=process, ownership=Ownership(run))


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first error once nothing is under way any more."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
