"""The embedded engine behind HTTP, in one server that is started for it: as many calls are open as it decodes."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import torch
from embedded import requests
from workload import Load, read_load

from rollover import __version__
from rollover.clock import SystemClock
from rollover.engine.base import GenerateRequest
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.open import open_embedded_servers
from rollover.engine.servers.pool.pool import EnginePool


async def decode(pool: EnginePool, asked: list[GenerateRequest], num_open: int) -> int:
    room = asyncio.Semaphore(num_open)

    async def one(request: GenerateRequest) -> int:
        async with room:
            return sum([len(chunk.token_ids) async for chunk in pool.generate(request)])

    return sum(await asyncio.gather(*map(one, asked)))


async def measure(load: Load, repeats: int, kv_cache_bytes: int) -> dict[str, object]:
    config = EmbeddedServerConfig(
        launch=True,
        launch_args=("--device", "cpu"),
        dtype=load.dtype,  # type: ignore[arg-type]
        max_running=load.max_running,
        max_context_tokens=load.max_context_tokens,
        kv_cache_bytes=kv_cache_bytes,
    )
    with tempfile.TemporaryDirectory() as logs:
        setup = EngineSetup(folder=Path(load.model), run="benchmark", root=Path(logs), clock=SystemClock())
        pool = await open_embedded_servers(config, setup)
        await decode(pool, requests(load, "warm")[: load.max_running], load.max_running)
        seconds = []
        for repeat in range(repeats):
            start_s = time.perf_counter()
            num_tokens = await decode(pool, requests(load, str(repeat)), load.max_running)
            seconds.append(time.perf_counter() - start_s)
            assert num_tokens == load.num_tokens
        await pool.close()
    return {"seconds": seconds, "versions": {"rollover": __version__, "torch": torch.__version__}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-bytes", type=int, default=2**30)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(read_load(args.load), args.repeats, args.kv_cache_bytes))))
