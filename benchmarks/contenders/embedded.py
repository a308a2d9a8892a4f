"""The embedded engine as a run uses it: streams on an event loop, the core in its thread."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path

import torch
from workload import Load, read_load

from rollover import __version__
from rollover.engine.base import GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.types import SamplingParams


def requests(load: Load, tag: str) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{tag}.{i}",
            sample_key=f"{tag}.{i}",
            prompt_key=f"{tag}.{i}",
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_new_tokens=length),
            seed=i,
        )
        for i, (prompt, length) in enumerate(zip(load.prompts, load.num_new_tokens, strict=True))
    ]


async def decode(engine: EmbeddedEngine, asked: list[GenerateRequest]) -> int:
    async def one(request: GenerateRequest) -> int:
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    return sum(await asyncio.gather(*map(one, asked)))


async def measure(load: Load, repeats: int, kernels: str, kv_cache_bytes: int) -> dict[str, object]:
    config = EmbeddedConfig(
        device="cpu",
        dtype=load.dtype,  # type: ignore[arg-type]
        max_running=load.max_running,
        max_context_tokens=load.max_context_tokens,
        kv_cache_bytes=kv_cache_bytes,
        cpu_kernels=kernels,  # type: ignore[arg-type]
    )
    engine = EmbeddedEngine.from_folder(Path(load.model), config)
    await decode(engine, requests(load, "warm")[: load.max_running])
    seconds, peak_kv_bytes = [], 0
    for repeat in range(repeats):
        start_s = time.perf_counter()
        task = asyncio.create_task(decode(engine, requests(load, str(repeat))))
        while not task.done():
            peak_kv_bytes = max(peak_kv_bytes, engine.stats().kv_bytes)
            await asyncio.wait([task], timeout=0.1)
        seconds.append(time.perf_counter() - start_s)
        assert task.result() == load.num_tokens
    await engine.close()
    return {
        "seconds": seconds,
        "versions": {"rollover": __version__, "torch": torch.__version__},
        "peak_kv_bytes": peak_kv_bytes,
        "kv_cache_bytes": kv_cache_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", default="compiled")
    parser.add_argument("--kv-cache-bytes", type=int, default=2**30)
    args = parser.parse_args()
    result = asyncio.run(measure(read_load(args.load), args.repeats, args.kernels, args.kv_cache_bytes))
    print(json.dumps(result))
