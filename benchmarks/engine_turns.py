"""The embedded engine of two or more checkouts, in turns: tokens per second of processor time, on one thread.

    python benchmarks/engine_turns.py --trees ../before,. --kinds qwen3,qwen2,llama --rounds 6

Each turn is a process that imports ``rollover`` from its checkout and decodes three times; who goes first rotates. On a
shared machine, processor time differs by 10% from turn to turn, so only medians over many turns mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024},
    **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
}


def decode(kind: str, kernels: Any, num_calls: int, length: int) -> list[float]:
    """Decode three times in this process; tokens per second of processor time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollover.engine.base import GenerateRequest
    from rollover.engine.embedded import EmbeddedConfig
    from rollover.engine.embedded.core import EngineCore
    from rollover.types import SamplingParams

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **({} if kind == "qwen2" else {"head_dim": 32}))
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
        sizes: dict[str, Any] = {"max_running": num_calls, "kv_cache_bytes": 2**28, "max_context_tokens": 512}
        core = EngineCore(Path(folder), EmbeddedConfig(device="cpu", cpu_kernels=kernels, **sizes))

    def rate(name: str, num: int, length: int) -> float:
        for i in range(num):
            prompt, key = tuple((7 * i + j) % 4000 for j in range(16)), f"{name}{i}"
            params = SamplingParams(max_new_tokens=length)
            core.add(
                GenerateRequest(
                    request_id=key, sample_key=key, prompt_key=key, prompt_ids=prompt, params=params, seed=i
                )
            )
        start_s = time.process_time()
        while core.has_work:
            core.step()
        return num * length / (time.process_time() - start_s)

    rate("warm", 8, 16)
    return [rate(f"m{i}.", num_calls, length) for i in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", default=".", help="checkouts, separated by commas")
    parser.add_argument("--kinds", default="qwen3,qwen2,llama")
    parser.add_argument("--kernels", default="compiled")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--one", help="decode this kind here, and print the rates")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(decode(args.one, args.kernels, 64, 96)))
        return
    trees = [str(Path(tree).resolve()) for tree in args.trees.split(",")]
    for kind in args.kinds.split(","):
        rates: dict[str, list[float]] = {tree: [] for tree in trees}
        for number in range(args.rounds):
            for tree in trees[number % len(trees) :] + trees[: number % len(trees)]:
                command = [sys.executable, __file__, "--one", kind, "--kernels", args.kernels]
                environment = os.environ | {"PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
                rates[tree] += json.loads(done.stdout.splitlines()[-1])
        for tree in trees:
            found = sorted(rates[tree])
            print(f"{kind:8s} {tree}: median {statistics.median(found):.0f} tok/s ({found[0]:.0f} to {found[-1]:.0f})")


if __name__ == "__main__":
    main()
