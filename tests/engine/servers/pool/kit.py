"""Pools over members that can be ill, and over engines before scripted servers. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from rollover.engine.base import Chunk, GenerateRequest, Sleeps
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.pool.members import PoolEngine
from rollover.engine.servers.pool.pool import EnginePool
from rollover.errors import EngineError
from rollover.types import FinishReason
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests.engine.fake import FakeEngine
from tests.engine.servers.scripted_server import ScriptedTransport
from tests.virtual_time import VirtualClock
from tests.weights.kit import FakeWeights

WEIGHTS = FakeWeights(0)
FOREVER = 10**6


class Flaky(FakeEngine):
    """A fake that can be ill: ``failing`` raises from every call, ``hanging`` never returns from any."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(lambda _: FOREVER, auto=True, clock=VirtualClock(), tick_s=0.01, **settings)
        self.name = name
        self.failing: str | None = None
        self.hanging = False
        self.hanging_in: set[str] = set()
        """Names of the calls that never return, where not all do."""
        self.probe_s = self.revival_s = 0.0
        self.num_revivals = 0
        self.stopping = False
        """It ends each call after its first chunk."""

    def __repr__(self) -> str:
        return self.name

    async def _ill(self) -> None:
        if self.hanging:
            await asyncio.get_running_loop().create_future()
        if self.failing is not None:
            raise EngineError(f"{self.name}: {self.failing}")

    group = None

    @property
    def sleeper(self) -> Sleeps:
        return self

    async def probe(self, *, decode: bool = False) -> None:
        await asyncio.sleep(self.probe_s)
        try:
            async with asyncio.timeout(1.0):
                await self._ill()
        except TimeoutError:
            raise EngineError(f"{self.name}: no answer") from None

    async def revive(self) -> None:
        self.num_revivals += 1
        await asyncio.sleep(self.revival_s)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await self._ill()
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await self._ill()
                yield replace(chunk, finish_reason=FinishReason.ABORT) if self.stopping else chunk
                if self.stopping:
                    return

    async def _hang(self, call: str) -> None:
        if call in self.hanging_in:
            await asyncio.get_running_loop().create_future()

    async def pause(self) -> None:
        await self._ill()
        await self._hang("pause")
        await super().pause()

    async def resume(self) -> None:
        await self._hang("resume")
        await super().resume()

    async def load(self, version: int, source: WeightSource) -> None:
        await self._ill()
        await self._hang("load")
        await super().load(version, source)

    async def abort(self, request_ids: Any) -> None:
        if self.hanging:
            await self._ill()
        await super().abort(request_ids)

    async def close(self) -> None:
        await FakeEngine.abort(self, list(self._calls))
        self._closed = True


def new_pool(engines: Sequence[PoolEngine], source: WeightSource, **limits: float) -> EnginePool:
    limits = {"health_interval_s": 1.0, "rejoin_max_interval_s": 4.0, "all_down_timeout_s": 100.0, **limits}
    return EnginePool(engines, source, VirtualClock(), ServerConfig(launch=True, **limits))  # type: ignore[arg-type]


class Fleet:
    """Scripted servers of a kind at ``http://s0``, ``http://s1``, and a pool over them; open within ``async with``."""

    def __init__(self, kind: ModuleType, folder: Path, *, num_servers: int = 2, **settings: Any) -> None:
        limits = {"control_timeout_s": 10.0, "load_timeout_s": 40.0, "abort_timeout_s": 4.0, "health_timeout_s": 2.0}
        settings = limits | settings
        self.kind, self.folder = kind, folder
        self.servers = [kind.Server() for _ in range(num_servers)]
        transport = ScriptedTransport({f"s{i}": server for i, server in enumerate(self.servers)})
        self.engines: list[ServerEngine] = []
        for host in transport.servers:
            config = kind.settings(f"http://{host}", **settings)
            client = HTTPClient(f"http://{host}", config, transport=transport)
            self.engines.append(kind.engine_over(client, config, folder))
        times = {key: value for key, value in settings.items() if key.endswith("_s")}
        self.pool = new_pool(self.engines, FolderWeights(0, folder), **times)

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await engine.open()
        await self.pool.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()


@asynccontextmanager
async def pool_of(*members: Flaky, **limits: float) -> AsyncIterator[EnginePool]:
    limits = {"health_interval_s": 2.0, "rejoin_max_interval_s": 16.0, "all_down_timeout_s": 5.0, **limits}
    pool = new_pool(members, WEIGHTS, **limits)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def pool_of_two(**limits: float) -> AsyncIterator[tuple[Flaky, Flaky, EnginePool]]:
    one, two = Flaky("one"), Flaky("two")
    async with pool_of(one, two, **limits) as pool:
        yield one, two, pool
