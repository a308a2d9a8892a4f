"""Compares what training takes of memory with what ``rollover train --dry-run`` says before.

    python benchmarks/memory.py --out benchmarks/results/memory-DATE.json     # six minutes on two cores with AVX-512
    python benchmarks/memory.py --large --out benchmarks/results/memory-large-DATE.json             # half a minute

``--large`` measures nothing: it writes the estimates for large models on one GPU, in passes of 8,192 tokens.

For each shape and each way to train, a process of its own takes a step of GRPO over two full rows: with the second
one, gradients are there already. Its resident memory at its height, less what it was before (weights, gradients and
moments are there by then), is set against the estimate of activations and gathered weights. Of several devices,
it is that of the rank that takes most. Memory that is freed goes back to the system at once
(``MALLOC_MMAP_THRESHOLD_``), since the estimate leaves out what an allocator keeps. Printed is measured over estimated.
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
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine import machine

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.batch import Batch, Group
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.fleet import FleetTrainer
from rollover.trainer.local import LocalTrainer
from rollover.trainer.memory import training_memory
from rollover.trainer.setup import TrainingSetup
from rollover.types import FinishReason, Prompt, SampleId, Segment, Trajectory

RESPONSE, SAMPLES = 256, 6
SHAPES = {
    "narrow, large vocabulary": (256, 4, 16384),
    "wide, small vocabulary": (768, 4, 512),
    "deep": (256, 12, 2048),
    "small": (256, 2, 8192),
}
"""Width, number of layers, vocabulary."""
PLAIN = TrainerConfig(micro_batch_tokens=RESPONSE * SAMPLES, device="cpu", learning_rate=1e-4)
BFLOAT16 = replace(PLAIN, dtype="bfloat16")
ADAPTERS = replace(PLAIN, lora=LoraConfig(rank=8))
WAYS = {
    "all weights": PLAIN,
    "layers recomputed": replace(PLAIN, gradient_checkpointing=True),
    "bfloat16": BFLOAT16,
    "adapters": ADAPTERS,
    "two devices": replace(PLAIN, num_devices=2),
    "two devices, shared rows": replace(PLAIN, num_devices=2, context_parallel=2),
    "four devices, shared rows": replace(PLAIN, num_devices=4, context_parallel=4),
    "shared rows, recomputed": replace(PLAIN, num_devices=2, context_parallel=2, gradient_checkpointing=True),
    "two devices, bfloat16": replace(BFLOAT16, num_devices=2),
    "two devices, bfloat16, recomputed": replace(BFLOAT16, num_devices=2, gradient_checkpointing=True),
    "two devices, adapters": replace(ADAPTERS, num_devices=2),
    "two devices, adapters, bfloat16": replace(ADAPTERS, num_devices=2, dtype="bfloat16"),
    "two devices, adapters, bfloat16 base": replace(ADAPTERS, num_devices=2, dtype="bfloat16"),
}
BASES = {"two devices, adapters, bfloat16 base": torch.bfloat16}
"""Number formats of models that are not in float32."""

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
GPU = TrainerConfig(device="cuda", dtype="bfloat16", gradient_checkpointing=True)
ATTENTION = LoraConfig(targets=("q_proj", "k_proj", "v_proj", "o_proj"))
LARGE = [
    ("Qwen2.5-7B", "all weights", QWEN_7B, GPU),
    ("Qwen2.5-7B", 'all weights, `optimizer = "adamw_8bit"`', QWEN_7B, replace(GPU, optimizer="adamw_8bit")),
    ("Qwen2.5-7B", "all weights, `offload = true`", QWEN_7B, replace(GPU, offload=True)),
    ("Qwen2.5-7B", "adapters of rank 16", QWEN_7B, replace(GPU, lora=LoraConfig())),
    ("Qwen3-30B-A3B", "adapters of rank 16 beside the attention", QWEN_30B_A3B, replace(GPU, lora=ATTENTION)),
]


def large() -> list[dict[str, Any]]:
    """Estimate what large models take on a GPU and in the machine, in GiB."""
    rows = []
    for name, way, model, config in LARGE:
        found = training_memory(config, model, max_prompt_tokens=1024, max_response_tokens=3072, batch_samples=256)
        sizes = {"gpu_gib": found.total / 2**30, "machine_gib": found.offloaded / 2**30}
        rows.append({"model": name, "way": way, "parameters": found.num_parameters, **sizes})
    return rows


def model_of(shape: str) -> dict[str, Any]:
    width, layers, vocab = SHAPES[shape]
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "head_dim": 32}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": vocab}
    return {"model_type": "qwen3", **sizes, **heads, "tie_word_embeddings": True, "eos_token_id": 1}


def make_batch(step: int, samples: int, response: int, groups: int) -> Batch:
    segment = Segment(
        policy_version=step,
        token_ids=(7,) * response,
        rollout_logprobs=(-9.0,) * response,
        finish_reason=FinishReason.STOP,
        kv_version=step,
        start_s=0.0,
        end_s=1.0,
    )
    return Batch(step=step, groups=tuple(make_group(number, segment, samples) for number in range(groups)))


def make_group(number: int, segment: Segment, samples: int) -> Group:
    prompt = Prompt(prompt_id=str(number), token_ids=(5 + number,), text="", source="benchmark")
    trajectories = tuple(
        Trajectory(sample_id=SampleId(number, i), prompt=prompt, segments=(segment,), reward=float(i % 2))
        for i in range(samples)
    )
    return Group(group_id=number, prompt=prompt, trajectories=trajectories)


def memory_now(key: str, pid: int) -> int:
    """Return a line of ``/proc/PID/status`` in bytes: ``VmRSS`` is resident memory, ``VmHWM`` its height so far."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(folder: str, way: str) -> int:
    """Take the step, and return what it takes beyond what stays in this process, or in one of its ranks."""
    config = WAYS[way]
    groups = 2 * config.num_devices // config.context_parallel
    algorithm = resolve(AlgorithmConfig())
    setup = TrainingSetup(
        config=config, algorithm=algorithm, temperature=1.0, max_response_tokens=RESPONSE, num_steps=9
    )
    with tempfile.TemporaryDirectory() as place:
        trainer: LocalTrainer | FleetTrainer
        if config.num_devices == 1:
            trainer, pids = LocalTrainer(setup, folder), [os.getpid()]
        else:
            staging = Path(place)
            trainer = FleetTrainer(setup, folder, fallback=staging, logs=staging)
            pids = list(trainer.pids)
        with closing(trainer):
            trainer.step(make_batch(0, 2, 16, groups))
            gc.collect()
            before = [memory_now("VmRSS", pid) for pid in pids]
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the height begins anew
            trainer.step(make_batch(1, SAMPLES, RESPONSE, groups))
            return max(memory_now("VmHWM", pid) - held for pid, held in zip(pids, before, strict=True))


def compare(shape: str, way: str) -> dict[str, float | str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    model, dtype = model_of(shape), BASES.get(way, torch.float32)
    estimated = training_memory(
        WAYS[way],
        model,
        max_prompt_tokens=1,
        max_response_tokens=RESPONSE,
        batch_samples=SAMPLES,
        base_dtype=dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=dtype).save_pretrained(folder)
        done = subprocess.run(
            [sys.executable, __file__, "--measure", folder, "--way", way],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
            capture_output=True,
            text=True,
            check=True,
        )
    measured = int(done.stdout) / 2**20
    expected = (estimated.activations + estimated.gathered) / 2**20
    return {"shape": shape, "way": way, "measured_mib": measured, "estimated_mib": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--large", action="store_true", help="estimate large models instead of measuring small ones")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(measure(args.measure, args.way))
        return
    rows: list[dict[str, Any]] = []
    if args.large:
        rows, args.shapes = large(), []
        print(*rows, sep="\n")
    for shape in args.shapes:
        for way in args.ways:
            row = compare(shape, way)
            ratio = float(row["measured_mib"]) / float(row["estimated_mib"])
            row["ratio"] = ratio
            print(
                f"{shape:26s} {way:36s} measured {row['measured_mib']:6.0f} MiB, estimated {row['estimated_mib']:6.0f},"
                f" ratio {ratio:.2f}",
                flush=True,
            )
            rows.append(row)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
