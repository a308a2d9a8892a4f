"""Measures draft tokens in the embedded engine: rollout time with ``draft_rows`` over that without, in one process.

The same requests, in groups of siblings, with each number of rows in turn, as often as ``--repeats`` says; the least of
the times counts. Three models of the quickstart's shape: after its warm-up (or the one in ``--model``), with the
quickstart's prompts, where responses end by themselves and most are short; with random weights, where next to no draft
token is accepted and what drafting costs is seen; and one that repeats itself, where most are accepted. The last two
have long-tailed lengths. Checked on the way: every setting samples the same tokens.

    python benchmarks/drafts.py --out benchmarks/results/drafts-DATE.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from engine import machine
from safetensors.torch import load_file, save_file
from workload import lognormal_lengths

from rollover.engine.base import GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore
from rollover.hf.tokenizer import load_tokenizer, stop_token_ids
from rollover.report.metrics import MetricsWriter
from rollover.report.progress import Progress
from rollover.run.config import RunConfig
from rollover.run.loading import load
from rollover.run.prepare import initial_policy
from rollover.tasks.open import train_source
from rollover.types import SamplingParams

Tokens = dict[str, list[int]]
MEDIAN_TOKENS = 24
"""Of the lengths that random weights are given; that of the quickstart's responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rollout of all requests."""

    wall_s: float
    cpu_s: float
    iterations: int
    decoded_tokens: int
    drafted_tokens: int
    accepted_tokens: int

    @property
    def acceptance(self) -> float:
        return self.accepted_tokens / max(1, self.drafted_tokens)

    @property
    def tokens_per_iteration(self) -> float:
        """Of each sequence, over the iterations that decoded it."""
        return self.decoded_tokens / (self.decoded_tokens - self.accepted_tokens)


def quickstart(folder: Path, *, warm_up: bool, steps: int) -> tuple[RunConfig, Path]:
    """Its config, and its policy before training; made anew."""
    config = load("quickstart")
    assert config.sft is not None
    config = replace(config, sft=replace(config.sft, num_steps=steps) if warm_up else None)
    folder.mkdir()
    with MetricsWriter(folder) as metrics, Progress(total_steps=0, mode="off") as progress:
        return config, initial_policy(config, folder / "model", progress, metrics)


def repeating(folder: Path) -> Path:
    """Takes the model's layers out of effect. Its input and output matrices are tied: mostly it says its last token
    again."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def requests(
    config: RunConfig, folder: Path, num_prompts: int, group_size: int, *, ends: bool
) -> list[GenerateRequest]:
    """Groups of the quickstart's first prompts: to their end tokens, or to lengths drawn beforehand."""
    tokenizer = load_tokenizer(folder)
    source = train_source(config.tasks, tokenizer, seed=config.seed)
    prompts = [source.prompt(i) for i in range(num_prompts)]
    cap = config.rollout.max_new_tokens
    lengths = [cap] * num_prompts * group_size
    if not ends:
        lengths = lognormal_lengths(num_prompts * group_size, MEDIAN_TOKENS, cap)
    return [
        GenerateRequest(
            request_id=f"{p}.{i}",
            sample_key=f"{p}.{i}",
            prompt_key=str(p),
            prompt_ids=prompt.token_ids,
            params=SamplingParams(
                max_new_tokens=lengths[p * group_size + i],
                stop_token_ids=stop_token_ids(folder, tokenizer) if ends else (),
            ),
            seed=p * group_size + i,
        )
        for p, prompt in enumerate(prompts)
        for i in range(group_size)
    ]


def measure(folder: Path, asked: Sequence[GenerateRequest], draft_rows: int) -> tuple[Measured, Tokens]:
    settings = EmbeddedConfig(
        device="cpu", max_running=max(len(asked), draft_rows), kv_cache_bytes=2**28, draft_rows=draft_rows
    )
    core = EngineCore(folder, settings)
    for request in asked:
        core.add(request)
    tokens: Tokens = {request.request_id: [] for request in asked}
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    while core.has_work:
        for name, chunk in core.step():
            tokens[name] += chunk.token_ids
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    stats = core.stats()
    return Measured(
        wall_s=wall_s,
        cpu_s=cpu_s,
        iterations=stats.decode_iterations,
        decoded_tokens=stats.decoded_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
    ), tokens


def compare(folder: Path, asked: Sequence[GenerateRequest], all_rows: Sequence[int], repeats: int) -> dict[str, Any]:
    """Each number of rows against the first, of the same repeat."""
    runs: dict[int, list[Measured]] = {rows: [] for rows in all_rows}
    expected: Tokens | None = None
    for turn in range(repeats + 1):
        for rows in all_rows:
            measured, tokens = measure(folder, asked, rows)
            expected = tokens if expected is None else expected
            if tokens != expected:
                raise SystemExit(f"draft_rows = {rows} sampled other tokens than draft_rows = {all_rows[0]}")
            if turn:  # the first round warms up
                runs[rows].append(measured)
    base = runs[all_rows[0]]
    return {str(rows): _entry(found, base) for rows, found in runs.items()}


def _entry(found: list[Measured], base: list[Measured]) -> dict[str, Any]:
    one = found[0]  # counts are the same in every repeat
    ratios = [a.wall_s / b.wall_s for a, b in zip(found, base, strict=True)]
    return {
        "time_ratio": min(m.wall_s for m in found) / min(m.wall_s for m in base),
        "time_ratios": [min(ratios), max(ratios)],
        "cpu_time_ratio": min(m.cpu_s for m in found) / min(m.cpu_s for m in base),
        "wall_s": min(m.wall_s for m in found),
        "iterations": one.iterations,
        "decoded_tokens": one.decoded_tokens,
        "drafted_tokens": one.drafted_tokens,
        "accepted_tokens": one.accepted_tokens,
        "acceptance": one.acceptance,
        "tokens_per_iteration": one.tokens_per_iteration,
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}\n{'rows':>5} {'time':>6} {'from..to':>12} {'CPU':>6} {'iter.':>6} {'accepted':>9} {'tok/iter':>9}")
    for rows, e in found.items():
        low, high = e["time_ratios"]
        print(
            f"{rows:>5} {e['time_ratio']:6.3f} {low:6.3f}..{high:.3f} {e['cpu_time_ratio']:6.3f} {e['iterations']:6d}"
            f" {e['acceptance']:9.1%} {e['tokens_per_iteration']:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a model of the quickstart's, instead of a warm-up")
    parser.add_argument("--rows", default="0,4,8,16,32")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="tiny load: whether it works, not how fast it is")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.small:
        vars(args).update(prompts=3, group=4, repeats=1)
    all_rows = [int(rows) for rows in args.rows.split(",")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("quickstart", "random weights", "repeating"):
            trained = name == "quickstart"
            warm_up = trained and args.model is None
            config, folder = quickstart(Path(temporary) / name, warm_up=warm_up, steps=20 if args.small else 1000)
            folder = args.model if trained and args.model else repeating(folder) if name == "repeating" else folder
            asked = requests(config, folder, args.prompts, args.group, ends=trained)
            found[name] = compare(folder, asked, all_rows, args.repeats)
            show(name, found[name])
    if args.out:
        record = {
            "command": sys.argv,
            "date": str(date.today()),
            "threads": torch.get_num_threads(),
            "machine": machine() | {"load_average": os.getloadavg()},
            "versions": {"torch": torch.__version__},
            "samples": {"prompts": args.prompts, "group_size": args.group},
            "repeats": args.repeats,
            "ratios_to_no_rows": found,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"recorded in {args.out}")


if __name__ == "__main__":
    main()
