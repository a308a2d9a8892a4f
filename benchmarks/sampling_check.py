"""What the sampling check costs and finds: the embedded engine's seconds for it, and the share of 100 simulated starts
that are refused, for honest engines and for each of some wrong settings. Prints one JSON line.

    python benchmarks/sampling_check.py MODEL --out benchmarks/results/sampling-check-DATE.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.logprob_check import Reference, check_prompts
from rollover.engine.sampling_check import Expected, check_sampling

STARTS = 100
Rows = NDArray[np.float64]


def truncated(p_PV: Rows, keep_PV: NDArray[np.bool_]) -> Rows:
    left_PV = p_PV * keep_PV
    return left_PV / left_PV.sum(1, keepdims=True)


def top_p(p_PV: Rows, mass: float) -> Rows:
    order_PV = np.argsort(-p_PV, axis=1)
    before_PV = np.cumsum(np.take_along_axis(p_PV, order_PV, 1), axis=1) - np.take_along_axis(p_PV, order_PV, 1)
    keep_PV = np.zeros(p_PV.shape, bool)
    np.put_along_axis(keep_PV, order_PV, before_PV < mass, 1)
    return truncated(p_PV, keep_PV)


def top_k(p_PV: Rows, k: int) -> Rows:
    return truncated(p_PV, p_PV >= np.sort(p_PV, axis=1)[:, -k, None])


def found(expected: Expected, drawn_from_PV: Rows) -> dict[str, float]:
    """Return the means over some starts whose tokens are drawn from these distributions, and the share refused."""
    uniform, num_draws = np.random.default_rng(0).random, expected.draws_per_prompt()
    starts = []
    for _ in range(STARTS):
        rows = [np.searchsorted(s := np.cumsum(p), uniform(num_draws) * s[-1], side="right") for p in drawn_from_PV]
        starts.append(expected.judged(np.array(rows)))
    return {
        "tokens": starts[0].num_tokens,
        "z": round(statistics.fmean(start.z for start in starts), 1),
        "tail": round(statistics.fmean(start.num_tail for start in starts), 1),
        "expected_tail": round(starts[0].expected_tail, 1),
        "refused": sum(start.complaint() is not None for start in starts) / STARTS,
    }


async def seconds(folder: Path, reference: Reference) -> list[float]:
    engine = EmbeddedEngine.from_folder(folder, EmbeddedConfig(max_running=384, kv_cache_bytes=2**27))
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        await check_sampling(engine, reference, temperature=1.0)
        times.append(round(time.perf_counter() - start_s, 3))
    await engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model).float().eval()
    prompts = check_prompts(model.config.vocab_size, 512)
    with torch.no_grad():
        logits_PV = np.stack([model(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts])
    reference = Reference(version=0, prompts=prompts, logits_PV=logits_PV)
    p_PV = np.exp(reference.logprobs(1.0))
    cases = {"honest": p_PV, "greedy": (p_PV == p_PV.max(1, keepdims=True)).astype(float)}
    cases |= {f"temperature {t}": np.exp(reference.logprobs(t)) for t in (0.7, 0.85, 0.9, 1.1, 1.15, 1.3)}
    cases |= {f"top_p {mass}": top_p(p_PV, mass) for mass in (0.9, 0.95, 0.99)}
    cases |= {f"top_k {k}": top_k(p_PV, k) for k in (5, 20)}
    expected = Expected.of(reference, 1.0)
    result: dict[str, Any] = {"seconds": asyncio.run(seconds(options.model, reference))}
    result |= {name: found(expected, rows) for name, rows in cases.items()}
    line = json.dumps(result)
    print(line)
    if options.out:
        options.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
