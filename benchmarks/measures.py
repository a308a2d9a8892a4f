"""What the embedded engine does apart from decoding at full load: iteration time against batch size, prefill, abort,
resume, weight swap, memory. Prints one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from workload import Load, read_load

from rollover.engine.base import GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.types import SamplingParams
from rollover.weights.sources import FolderWeights, MemoryWeights

CONTEXT = 160
"""Mean context of the fixed load: its prompt and half its response."""


def config_of(load: Load, **settings: object) -> EmbeddedConfig:
    config = EmbeddedConfig(
        device="cpu",
        dtype=load.dtype,  # type: ignore[arg-type]
        max_running=256,
        max_context_tokens=4096,
        kv_cache_bytes=2**30,
        stream_interval_tokens=1,
    )
    return replace(config, **settings)  # type: ignore[arg-type]


def request(name: str, num_prompt: int, num_new: int = 1000, response: tuple[int, ...] = ()) -> GenerateRequest:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return GenerateRequest(
        request_id=f"{name}#{len(response)}",
        sample_key=name,
        prompt_key=name,
        prompt_ids=tuple(int(t) for t in rng.integers(2, 2000, num_prompt)),
        response_ids=response,
        params=SamplingParams(max_new_tokens=num_new),
        seed=len(name),
    )


def seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def iteration_times(
    load: Load, batch_sizes: list[int], rounds: int = 2, timed: int = 64, context: int = CONTEXT
) -> dict[int, float]:
    """Median seconds of one decode iteration of so many samples in mid-response, with ``context`` tokens each."""
    times: dict[int, list[float]] = {batch: [] for batch in batch_sizes}
    for _ in range(rounds):
        for batch in batch_sizes:
            core = EngineCore(Path(load.model), config_of(load))
            for i in range(batch):
                core.add(request(f"b{i}", context - timed // 2 - 4))
            while core.stats().decode_iterations < 4 or any(s.num_missing for s in core.scheduler.running):
                core.step()
            times[batch] += [seconds(core.step) for _ in range(timed)]
    return {batch: statistics.median(values) for batch, values in times.items()}


def fit(times: dict[int, float]) -> dict[str, float]:
    """``t(B) = c0 (1 + B / B0)`` by least squares of the relative errors. Every B of the range counts alike, however
    many were measured near it: small ones are often crowded."""
    sizes, measured = np.array(sorted(times)), np.array([times[size] for size in sorted(times)])
    weights = np.sqrt(np.gradient(sizes.astype(float)))
    design = np.stack([1 / measured, sizes / measured], 1) * weights[:, None]
    (c0, slope), *_ = np.linalg.lstsq(design, weights, rcond=None)
    error = np.abs((c0 + slope * sizes) / measured - 1).max()
    return {"c0_s": float(c0), "B0": float(c0 / slope), "largest_relative_error": float(error)}


def prefill_rate(load: Load, num_prompts: int, num_tokens: int) -> float:
    """Tokens per second."""
    rates = []
    for repeat in range(4):
        core = EngineCore(Path(load.model), config_of(load))
        for i in range(num_prompts):
            core.add(request(f"p{repeat}.{i}", num_tokens))
        busy_s = 0.0
        while core.stats().prefilled_tokens < num_prompts * (num_tokens - 1):
            busy_s += seconds(core.step)
        rates.append(num_prompts * num_tokens / busy_s)
    return statistics.median(rates)


async def latencies(load: Load) -> dict[str, float]:
    """Milliseconds, with 64 samples decoding; a resume counts until each has its first token."""
    engine = EmbeddedEngine.from_folder(Path(load.model), config_of(load))
    responses: dict[str, tuple[int, ...]] = {}
    first_chunk_s: dict[str, float] = {}

    async def follow(asked: GenerateRequest) -> None:
        async for chunk in engine.generate(asked):
            if chunk.token_ids:
                first_chunk_s.setdefault(asked.request_id, time.perf_counter())
                responses[asked.sample_key] = responses.get(asked.sample_key, ()) + chunk.token_ids

    def ask() -> list[GenerateRequest]:
        return [request(f"s{i}", 128, response=responses.get(f"s{i}", ())) for i in range(64)]

    def start(asked: list[GenerateRequest]) -> asyncio.Future[list[None]]:
        return asyncio.gather(*map(follow, asked))

    async def decoded(asked: list[GenerateRequest], num_tokens: int) -> None:
        while any(len(responses.get(r.sample_key, ())) < len(r.response_ids) + num_tokens for r in asked):
            await asyncio.sleep(0.001)

    async def stop(asked: list[GenerateRequest], calls: asyncio.Future[list[None]]) -> float:
        start_s = time.perf_counter()
        await engine.abort([r.request_id for r in asked])
        took_s = time.perf_counter() - start_s
        await calls
        return took_s

    names = ("abort_to_parked", "resume_kept", "resume_lost", "swap_memory", "swap_folder")
    found: dict[str, list[float]] = {name: [] for name in names}
    folder = Path(load.model)
    tensors = load_file(folder / "model.safetensors")
    calls = start(asked := ask())
    await decoded(asked, 64)
    for repeat in range(5):
        found["abort_to_parked"].append(await stop(asked, calls))
        asked, start_s = ask(), time.perf_counter()
        calls = start(asked)
        await decoded(asked, 1)
        found["resume_kept"].append(max(first_chunk_s[r.request_id] for r in asked) - start_s)
        await stop(asked, calls)
        for name, source in (
            ("swap_memory", MemoryWeights(2 * repeat, tensors)),
            ("swap_folder", FolderWeights(2 * repeat + 1, folder)),
        ):
            swap_s = time.perf_counter()
            await engine.pause()
            await engine.load(source.manifest.version, source)  # drops all caches
            await engine.resume()
            found[name].append(time.perf_counter() - swap_s)
        asked, start_s = ask(), time.perf_counter()
        calls = start(asked)
        await decoded(asked, 1)
        found["resume_lost"].append(max(first_chunk_s[r.request_id] for r in asked) - start_s)
    before = engine.stats()
    await decoded(asked, 32)
    after = engine.stats()
    iteration_s = (after.busy_s - before.busy_s) / (after.decode_iterations - before.decode_iterations)
    await stop(asked, calls)
    await engine.close()
    medians = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in found.items()}
    return medians | {"iteration_ms": 1e3 * iteration_s}


def memory(load: Load) -> dict[str, int]:
    """A load that needs twice the cache it is given."""
    budget = 64 * (32 + 256) * kv_bytes_per_token(load) // 2
    core = EngineCore(Path(load.model), config_of(load, max_context_tokens=512, kv_cache_bytes=budget))
    for i in range(64):
        core.add(request(f"m{i}", 32, 256))
    before, peak_kv_bytes, peak_bytes = resident_bytes(), 0, 0
    while core.has_work:
        core.step()
        peak_kv_bytes, peak_bytes = max(peak_kv_bytes, core.stats().kv_bytes), max(peak_bytes, resident_bytes())
    return {
        "kv_cache_bytes": budget,
        "peak_kv_bytes": peak_kv_bytes,
        "process_growth_bytes": peak_bytes - before,
        "preempted": core.scheduler.num_preempted,
    }


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def kv_bytes_per_token(load: Load) -> int:
    """Of a float32 cache."""
    sizes = json.loads((Path(load.model) / "config.json").read_text())
    return int(8 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"])


def matmul_rate() -> float:
    """Floating-point operations per second of PyTorch's float32 product of two 1024 x 1024 matrices."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(seconds(lambda: torch.mm(a, b)) for _ in range(20))


def copy_rate() -> float:
    """Bytes per second of a large copy, read and written."""
    a, b = torch.randn(2**25), torch.empty(2**25)
    return 2 * a.nbytes / min(seconds(lambda: b.copy_(a)) for _ in range(10))


def decode_operations(load: Load) -> float:
    """Floating-point operations per decoded token: two per weight used, four per cached number."""
    sizes = json.loads((Path(load.model) / "config.json").read_text())
    hidden, layers, head = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["head_dim"]
    heads, kv = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    layer = hidden * head * (2 * heads + 2 * kv) + 3 * hidden * sizes["intermediate_size"]
    return 2 * (layers * layer + hidden * sizes["vocab_size"]) + layers * 4 * heads * head * CONTEXT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32,64,128")
    args = parser.parse_args()
    load = read_load(args.load)
    found: dict[str, object] = {"memory": memory(load)}
    times = iteration_times(load, [int(b) for b in args.batch_sizes.split(",")])
    largest = max(b for b in times if b <= 64)
    rate = matmul_rate()
    found |= {
        "iteration_s": times,
        "fit": fit(times),
        "context_tokens": CONTEXT,
        "prefill_tokens_per_s": {
            "64 prompts of 128": prefill_rate(load, 64, 128),
            "1 prompt of 2048": prefill_rate(load, 1, 2048),
        },
        "latency": asyncio.run(latencies(load)),
        "matmul_operations_per_s": rate,
        "copy_bytes_per_s": copy_rate(),
        "share_of_matmul_rate": largest * decode_operations(load) / times[largest] / rate,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
