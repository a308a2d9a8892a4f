"""Measures what a version of the weights takes to publish where adapters are trained: alone, or merged into a delta.

    python benchmarks/adapters.py                 # about five minutes on one core

A Qwen3 in bfloat16 with adapters of rank 16 beside all matrices takes steps of GRPO on random responses with random
rewards, so the directions mean nothing; how far AdamW moves a value in a step depends on the learning rate alone. After
every step the same weights are published twice: as adapters, and merged, when what has changed since the version before
is sent (or everything, where that is less). Each way a worker on this machine fetches them from a web server and puts
them together. Printed are bytes on the wire and seconds of publisher and worker, means over the versions after the
second, and the ratio of merged to adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from datetime import date
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from engine import machine

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.batch import Batch, Group
from rollover.swarm.publication.fetch import WeightFetcher
from rollover.swarm.publication.publisher import SwarmPublisher
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.local import LocalTrainer
from rollover.types import FinishReason, Prompt, SampleId, Segment, Trajectory
from rollover.weights.sources import MemoryWeights

HERE = Path(__file__).parent
SHAPES = {"3M": (192, 6), "28M": (512, 10)}
"""Width and number of layers."""
LEARNING_RATES = (1e-5, 1e-4)
VOCAB, STEPS = 512, 6


def make_folder(folder: Path, width: int, layers: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    config = AutoConfig.for_model("qwen3", **shape, **heads, vocab_size=VOCAB, tie_word_embeddings=True, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_batch(step: int) -> Batch:
    rng = random.Random(step)
    groups = []
    for g in range(4):
        prompt = Prompt(
            prompt_id=f"{g}", token_ids=tuple(rng.randrange(2, VOCAB) for _ in range(8)), text="", source="s"
        )
        trajectories = []
        for i in range(4):
            ids = tuple(rng.randrange(2, VOCAB) for _ in range(24))
            segment = Segment(
                policy_version=step,
                token_ids=ids,
                rollout_logprobs=(-6.2,) * len(ids),
                finish_reason=FinishReason.LENGTH,
                kv_version=step,
                start_s=0.0,
                end_s=1.0,
            )
            trajectories.append(
                Trajectory(sample_id=SampleId(g, i), prompt=prompt, segments=(segment,), reward=rng.random())
            )
        groups.append(Group(group_id=g, prompt=prompt, trajectories=tuple(trajectories)))
    return Batch(step=step, groups=tuple(groups))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Way:
    """One way to publish, with the worker that fetches."""

    def __init__(self, root: Path, model: Path) -> None:
        self.publisher = SwarmPublisher(root / "swarm", run_id="run", run_epoch=1, model=model, anchor_every=1000)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root / "swarm" / "blobs")))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.fetcher = WeightFetcher(root / "worker", self.publisher.public_key, run_id="run")
        self.rows: list[dict[str, float]] = []

    async def publish(self, source: Any) -> Any:
        started_s = time.perf_counter()
        head = self.publisher.publish(source).head
        publish_s = time.perf_counter() - started_s
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        fetched = await self.fetcher.fetch(head, [url], run_epoch=1, deadline_s=600)
        self.rows.append({"bytes": fetched.wire_bytes, "publish_s": publish_s, "worker_s": fetched.prepare_s})
        return fetched

    def means(self) -> dict[str, float]:
        later = self.rows[2:]
        return {key: statistics.mean(row[key] for row in later) for key in later[0]}

    async def close(self) -> None:
        self.server.shutdown()
        await self.fetcher.close()


async def measure(name: str, learning_rate: float) -> dict[str, Any]:
    width, layers = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(Path(folder) / "model", width, layers)
        lora, rank = LoraConfig(rank=16), 16
        trainer = LocalTrainer(
            TrainerConfig(learning_rate=learning_rate, lora=lora, device="cpu"),
            resolve(AlgorithmConfig(name="grpo")),
            model,
            temperature=1.0,
            max_response_tokens=24,
            num_steps=STEPS,
        )
        alone, merged = Way(Path(folder) / "alone", model), Way(Path(folder) / "merged", model)
        for step in range(STEPS + 1):
            await alone.publish(trainer.weight_source())
            await merged.publish(MemoryWeights(step, dict(trainer.weights())))
            if step < STEPS:
                trainer.step(make_batch(step))
        row: dict[str, Any] = {"model": name, "rank": rank, "learning_rate": learning_rate}
        row["full_bytes"] = merged.rows[0]["bytes"]
        row |= {"alone": alone.means(), "merged": merged.means()}
        await alone.close()
        await merged.close()
    row["ratio"] = {key: row["merged"][key] / row["alone"][key] for key in row["alone"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args()
    rows = []
    for name in SHAPES:
        for learning_rate in LEARNING_RATES:
            rows.append(asyncio.run(measure(name, learning_rate)))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.record:
        path = HERE / "results" / f"adapters-{date.today()}.json"
        path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
