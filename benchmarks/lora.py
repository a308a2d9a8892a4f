"""What a publication of adapters takes, merged and alone, for each kind of engine: bytes and seconds.

    python benchmarks/lora.py --kinds embedded --out benchmarks/results/lora-DATE.json
    VLLM_PYTHON=.venv-vllm/bin/python SGLANG_PYTHON=.venv-sglang/bin/python \\
        python benchmarks/lora.py --kinds embedded embedded_server vllm sglang --out benchmarks/results/lora-DATE.json

A model from nothing with adapters beside all matrices of its layers is published so often to one engine on this
machine's CPU, each time with other adapters, once as full weights and once as adapters, in turns. *Bytes* are those of
the tensors that the engine is given. *Stage* is what passes before the engine hears of it (merging and writing a
folder, where the engine reads one), *load* what passes while it is paused, *decode* the seconds for as many greedy
tokens under either: what is computed beside the model costs time at every token. The log-probs are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from engine import machine  # noqa: E402

from rollover.clock import SystemClock  # noqa: E402
from rollover.engine.base import Engine, GenerateRequest  # noqa: E402
from rollover.engine.config import EngineConfig  # noqa: E402
from rollover.engine.embedded.config import EmbeddedConfig  # noqa: E402
from rollover.engine.kind import EngineSetup  # noqa: E402
from rollover.engine.servers.embedded.config import EmbeddedServerConfig  # noqa: E402
from rollover.engine.servers.sglang.config import SGLangConfig  # noqa: E402
from rollover.engine.servers.vllm.config import VLLMConfig  # noqa: E402
from rollover.run.kinds import open_engine  # noqa: E402
from rollover.types import SamplingParams  # noqa: E402
from rollover.weights.adapters import (  # noqa: E402
    AdapterShape,
    AdapterSource,
    LowRank,
    MergedWeights,
)
from rollover.weights.base import WeightSource  # noqa: E402
from rollover.weights.folders import WeightFolders  # noqa: E402
from rollover.weights.publisher import Publisher  # noqa: E402
from rollover.weights.sources import FolderWeights, MemoryWeights  # noqa: E402

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUNNING, TOKENS = 8, 48
KINDS = ("embedded", "embedded_server", "vllm", "sglang")


def model_folder(folder: Path, hidden: int, layers: int) -> Path:
    from tests.real.models import real_model

    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_layers": layers, "num_heads": hidden // 64}
    return real_model(folder, num_kv_heads=2, max_position=512, **shape)


def adapters(base: Mapping[str, torch.Tensor], rank: int, seed: int) -> dict[str, LowRank]:
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, weight in base.items():
        if name.split(".")[-2] in TARGETS:
            rows, columns = weight.shape
            a_RI = torch.randn(rank, columns, generator=generator) / columns**0.5
            made[name] = LowRank(a_RI=a_RI, b_OR=0.1 * torch.randn(rows, rank, generator=generator), scale=2.0)
    return made


def config_of(kind: str) -> EngineConfig:
    from tests.real import sglang_server, test_vllm

    shared: dict[str, Any] = {"launch": True, "max_running": RUNNING, "stream_interval_tokens": 16}
    arguments: tuple[str, ...]
    match kind:
        case "embedded":
            return EmbeddedConfig(device="cpu", max_running=RUNNING, kv_cache_bytes=2**28)
        case "embedded_server":
            return EmbeddedServerConfig(**shared, launch_args=("--device", "cpu"), kv_cache_bytes=2**28)
        case "vllm":
            command = (test_vllm.PYTHON, "-m", "vllm.entrypoints.cli.main", "serve")
            arguments = ("--enforce-eager", "--max-model-len", "512")
            return VLLMConfig(**shared, launch_command=command, launch_args=arguments, launch_env=test_vllm.ENV)
        case "sglang":
            arguments = (*sglang_server.ARGUMENTS, "--lora-backend", "torch_native")
            env = sglang_server.ENV
            return SGLangConfig(**shared, launch_command=sglang_server.COMMAND, launch_args=arguments, launch_env=env)
    raise AssertionError(kind)


async def decode(engine: Engine, version: int) -> tuple[float, list[float]]:
    """Return the seconds of some greedy responses and their log-probs."""

    async def one(number: int) -> list[float]:
        request = GenerateRequest(
            request_id=f"v{version}-{number}",
            sample_key=f"v{version}-{number}",
            prompt_key=str(number),
            prompt_ids=tuple(range(5 + number, 37 + number)),
            params=SamplingParams(max_new_tokens=TOKENS, temperature=0.0),
            seed=number,
        )
        return [p async for chunk in engine.generate(request) for p in chunk.logprobs]

    started_s = time.perf_counter()
    found = await asyncio.gather(*map(one, range(RUNNING)))
    return time.perf_counter() - started_s, [p for own in found for p in own]


async def measure(kind: str, folder: Path, root: Path, *, rank: int, rounds: int) -> dict[str, Any]:
    """Publish in turns and return what each way took, the median of the rounds."""
    base = dict(FolderWeights(0, folder).tensors())
    shape, found = AdapterShape(rank=rank, targets=TARGETS), []
    setup = EngineSetup(folder=folder, run=f"lora-{kind}", root=root, clock=SystemClock(), adapters=shape)
    opened = await open_engine(config_of(kind), setup)
    engine = opened.engine
    try:
        publisher = Publisher(opened.weights, folders=WeightFolders(root / kind, like=folder))
        version = 0
        for number in range(rounds + 1):  # the first is not counted
            own = adapters(base, rank, seed=number)
            for way in ("merged", "adapter"):
                version += 1
                source: WeightSource = AdapterSource(version, own)
                if way == "merged":
                    source = MemoryWeights(version, MergedWeights(base, own))
                began_s = time.perf_counter()
                staged = await publisher.stage(source)
                staged_s = time.perf_counter()
                await publisher.publish(staged)
                loaded_s = time.perf_counter()
                decode_s, logprobs = await decode(engine, version)
                row: dict[str, Any] = {
                    "way": way,
                    "round": number,
                    "bytes": source.manifest.num_bytes,
                    "logprobs": logprobs,
                }
                times = {"stage_s": staged_s - began_s, "load_s": loaded_s - staged_s, "decode_s": decode_s}
                found.append(row | times)
    finally:
        await engine.close()
    counted = [row for row in found if row["round"]]
    pairs = zip(counted[::2], counted[1::2], strict=True)
    distance = max(abs(a - b) for one, other in pairs for a, b in zip(one["logprobs"], other["logprobs"], strict=True))
    ways = {way: _medians([row for row in counted if row["way"] == way]) for way in ("merged", "adapter")}
    return {**ways, "largest distance of log-probs": distance}


def _medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("bytes", "stage_s", "load_s", "decode_s")
    return {key: statistics.median(row[key] for row in rows) for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["embedded"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = model_folder(Path(place) / "model", arguments.hidden, arguments.layers)
        measured = {
            kind: asyncio.run(measure(kind, folder, Path(place), rank=arguments.rank, rounds=arguments.rounds))
            for kind in arguments.kinds
        }
    settings = {key: getattr(arguments, key) for key in ("hidden", "layers", "rank", "rounds")}
    text = json.dumps({"machine": machine(), **settings, "kinds": measured}, indent=2) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
