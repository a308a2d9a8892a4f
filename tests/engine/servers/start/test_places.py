"""Servers that come up somewhere else when they are started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.ownership import Ownership
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, update
from tests.engine.servers.pool.kit import new_pool
from tests.engine.servers.scripted_server import ScriptedTransport, ScriptedVLLM
from tests.engine.servers.vllm.kit import engine_over, settings


class Movable:
    """A server that is at ``here`` until it goes, and then at ``there``."""

    def __init__(self, client: HTTPClient, transport: ScriptedTransport) -> None:
        self.client = client
        self._servers = transport.servers

    async def start(self) -> None:
        self._servers["there"] = ScriptedVLLM()
        self.client.move("http://there:8001")

    async def gone(self) -> bool:
        return "here" not in self._servers and "there" not in self._servers

    async def stop(self) -> None:
        self._servers.clear()


async def test_a_server_that_moves_gets_current_weights_under_its_old_name(folder: Path, new: Path) -> None:
    transport = ScriptedTransport({"here": ScriptedVLLM()})
    client = HTTPClient("http://here", config := settings("http://here"), name="engine-0", transport=transport)
    engine = engine_over(client, config, folder, Ownership("r"))
    engine._process = Movable(client, transport)
    await engine.open()
    pool = new_pool([engine], FolderWeights(0, folder))
    await pool.open()
    await update(pool, FolderWeights(3, new))
    assert (await collect(pool, request("a")))[-1].engine == "engine-0"
    del transport.servers["here"]
    async with asyncio.timeout(60.0):
        while "there" not in transport.servers or not transport.servers["there"].weights.endswith("v1"):
            await asyncio.sleep(0.5)
        await pool.until_up()
    chunks = await collect(pool, request("b"))
    assert {chunk.policy_version for chunk in chunks} == {3} and chunks[-1].engine == "engine-0"
    assert repr(client) == "engine-0" and client.url == "http://there:8001"
    assert transport.servers["there"].version == "rollover:r:3"
    await pool.close()
