"""Compares what training takes of memory with what ``rollover train --dry-run`` says before.

    python benchmarks/memory.py --out benchmarks/results/memory-DATE.json     # about four minutes on two idle cores

For each shape and each way to train, a process of its own takes two steps of GRPO over a full row. Its resident memory
at its height, less what it was before (weights, gradients and moments are there by then), is set against the estimate
of activations and logits. Memory that is freed goes back to the system at once (``MALLOC_MMAP_THRESHOLD_``), since the
estimate leaves out what an allocator keeps. Printed is measured over estimated.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine import machine

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.local import LocalTrainer
from rollover.trainer.memory import training_memory
from rollover.types import Batch, FinishReason, Group, Prompt, SampleId, Segment, Trajectory

RESPONSE, SAMPLES = 256, 6
SHAPES = {
    "narrow, large vocabulary": (256, 4, 16384),
    "wide, small vocabulary": (768, 4, 512),
    "deep": (256, 12, 2048),
}
"""Width, number of layers, vocabulary."""
PLAIN = TrainerConfig(micro_batch_tokens=RESPONSE * SAMPLES, device="cpu", learning_rate=1e-4)
WAYS = {
    "all weights": PLAIN,
    "layers recomputed": replace(PLAIN, gradient_checkpointing=True),
    "bfloat16": replace(PLAIN, dtype="bfloat16"),
    "adapters": replace(PLAIN, lora=LoraConfig(rank=8)),
}


def model_of(shape: str) -> dict[str, Any]:
    width, layers, vocab = SHAPES[shape]
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "head_dim": 32}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": vocab}
    return {"model_type": "qwen3", **sizes, **heads, "tie_word_embeddings": True, "eos_token_id": 1}


def make_batch(step: int, samples: int, response: int) -> Batch:
    prompt = Prompt(prompt_id="a", token_ids=(5,), text="", source="benchmark")
    segment = Segment(
        policy_version=step,
        token_ids=(7,) * response,
        rollout_logprobs=(-9.0,) * response,
        finish_reason=FinishReason.STOP,
        kv_version=step,
        start_s=0.0,
        end_s=1.0,
    )
    trajectories = tuple(
        Trajectory(sample_id=SampleId(step, i), prompt=prompt, segments=(segment,), reward=float(i % 2))
        for i in range(samples)
    )
    return Batch(step=step, groups=(Group(group_id=step, prompt=prompt, trajectories=trajectories),))


def memory_now(key: str) -> int:
    """Return a line of ``/proc/self/status`` in bytes: ``VmRSS`` is resident memory, ``VmHWM`` its height so far."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(folder: str, way: str) -> int:
    """Take the steps in this process, and return what they take beyond what stays."""
    trainer = LocalTrainer(
        WAYS[way],
        resolve(AlgorithmConfig()),
        folder,
        temperature=1.0,
        max_response_tokens=RESPONSE,
        num_steps=9,
    )
    trainer.step(make_batch(0, 2, 16))
    gc.collect()
    before = memory_now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the height begins anew
    for step in (1, 2):
        trainer.step(make_batch(step, SAMPLES, RESPONSE))
    return memory_now("VmHWM") - before


def compare(shape: str, way: str) -> dict[str, float | str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = model_of(shape)
    estimated = training_memory(
        WAYS[way],
        model,
        max_prompt_tokens=1,
        max_response_tokens=RESPONSE,
        batch_samples=SAMPLES,
        base_dtype=torch.float32,
    )
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(folder)
        done = subprocess.run(
            [sys.executable, __file__, "--measure", folder, "--way", way],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
            capture_output=True,
            text=True,
            check=True,
        )
    measured, expected = int(done.stdout) / 2**20, (estimated.activations + estimated.logits) / 2**20
    return {"shape": shape, "way": way, "measured_mib": measured, "estimated_mib": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(measure(args.measure, args.way))
        return
    rows = []
    for shape in args.shapes:
        for way in args.ways:
            row = compare(shape, way)
            ratio = float(row["measured_mib"]) / float(row["estimated_mib"])
            row["ratio"] = ratio
            print(
                f"{shape:26s} {way:18s} measured {row['measured_mib']:6.0f} MiB, estimated {row['estimated_mib']:6.0f},"
                f" ratio {ratio:.2f}",
                flush=True,
            )
            rows.append(row)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
