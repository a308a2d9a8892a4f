"""The log of an engine server on a cluster, which is fetched piece by piece."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollover.cluster.engine_actor import Look
from rollover.cluster.engine_server import ClusterServer, EngineTerms
from rollover.engine.servers.vllm.config import VLLMConfig


async def test_two_looks_at_a_log_at_a_time_write_it_once(tmp_path: Path) -> None:
    terms = EngineTerms(prefix="run", placement_timeout_s=1.0, logs=tmp_path, shared=())
    program: Any = None
    server = ClusterServer(0, program, VLLMConfig(launch=True), {}, terms)
    log = bytearray(b"one\n")

    class Keeper:
        look = SimpleNamespace(remote=lambda start: start)

    async def ask(start: Any, limit_s: float, what: str) -> Look:
        await asyncio.sleep(0)
        return Look(exited=False, story="", log=bytes(log[start:]))

    server._keeper, server._ask = Keeper, ask  # type: ignore[method-assign]
    await asyncio.gather(server._look(), server.gone())
    log += b"two\n"
    await server._look()
    assert (tmp_path / "engine-0.log").read_bytes() == log
