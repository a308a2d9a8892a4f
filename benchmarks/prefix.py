"""Measures what sharing prefixes among prompts saves: seconds and prefilled tokens, with and without it.

    python benchmarks/prefix.py                            # a minute
    python benchmarks/prefix.py --baseline ../before       # against another checkout, in turns

Cases: ``system`` (prompts of 64 tokens after a system prompt of 512), ``turns`` (episodes whose next prompt is all that
was said so far and 32 tokens more) and ``nothing`` (prompts that have nothing in common, where sharing can only cost),
each with short responses, so that prefill is most of the work; ``fixed`` and ``tail`` are the loads of ``engine.py``,
where decoding is. Seconds are those of one CPU, which other work on the machine changes little. The baseline shares the
cache of a prompt with its siblings alone; without another checkout it is the same engine with ``isolate_prompts``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from workload import make_load, make_model

HERE = Path(__file__).parent
CASES = ("system", "turns", "nothing", "fixed", "tail")
NUM_PROMPTS, NUM_SYSTEM, NUM_OWN, NUM_NEW = 64, 512, 64, 16
NUM_TURNS, NUM_SAID = 6, 32


def measure(folder: Path, case: str, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds, and the tokens prefilled and decoded, of each repeat in an engine of its own."""
    from rollover.engine.embedded import EmbeddedConfig
    from rollover.engine.embedded.core import EngineCore

    torch.set_num_threads(1)
    config = EmbeddedConfig(device="cpu", max_running=64, max_context_tokens=2048, kv_cache_bytes=2**29)
    found: dict[str, Any] = {"seconds": [], "prefilled_tokens": [], "decoded_tokens": []}
    for repeat in range(repeats + 1):  # the first one warms up
        core = EngineCore(folder, config, **options)
        rng = random.Random(repeat)
        start_s = time.process_time()
        if case == "turns":
            play(core, rng)
        elif case in ("fixed", "tail"):
            load = make_load(case, folder.parent)
            answer(core, list(map(tuple, load.prompts)), case, load.num_new_tokens)
        else:
            system = tokens(rng, NUM_SYSTEM)
            start = [system if case == "system" else tokens(rng, NUM_SYSTEM) for _ in range(NUM_PROMPTS)]
            answer(core, [(*first, *tokens(rng, NUM_OWN)) for first in start], "turn0")
        stats, cpu_s = core.stats(), time.process_time() - start_s
        for name, value in zip(found, (cpu_s, stats.prefilled_tokens, stats.decoded_tokens), strict=True):
            found[name] += [value] * (repeat > 0)
    return found


def tokens(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, 2000) for _ in range(n))


def play(core: Any, rng: random.Random) -> None:
    """Episodes of several turns over one system prompt."""
    system = tokens(rng, NUM_OWN)
    said = [(*system, *tokens(rng, NUM_SAID)) for _ in range(NUM_PROMPTS)]
    for turn in range(NUM_TURNS):
        answers = answer(core, said, f"turn{turn}")
        said = [(*before, *new, *tokens(rng, NUM_SAID)) for before, new in zip(said, answers, strict=True)]


def answer(
    core: Any, prompts: list[tuple[int, ...]], tag: str, lengths: list[int] | None = None
) -> list[tuple[int, ...]]:
    from rollover.engine.base import GenerateRequest
    from rollover.types import SamplingParams

    answers: dict[str, tuple[int, ...]] = {}
    for i, prompt in enumerate(prompts):
        name = f"{tag}.{i}"
        answers[name] = ()
        params = SamplingParams(max_new_tokens=lengths[i] if lengths else NUM_NEW)
        core.add(
            GenerateRequest(request_id=name, sample_key=name, prompt_key=name, prompt_ids=prompt, params=params, seed=i)
        )
    while core.has_work:
        for name, chunk in core.step():
            answers[name] += chunk.token_ids
    return list(answers.values())


def run(checkout: Path, model: Path, case: str, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", model, "--cases", case, "--repeats", repeats]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(checkout)])}
    done = subprocess.run(
        [*map(str, command), "--options", json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(model: Path, case: str, baseline: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    """Run both in turns."""
    options = {} if baseline else {"isolate_prompts": True}
    results: dict[str, dict[str, Any]] = {"baseline": {}, "shared": {}}
    for _ in range(args.rounds):
        for name, checkout, given in (("baseline", baseline or HERE.parent, options), ("shared", HERE.parent, {})):
            for key, values in run(checkout, model, case, args.repeats, given).items():
                results[name].setdefault(key, []).extend(values)
    before, after = (statistics.median(results[name]["seconds"]) for name in results)
    most, least = (statistics.median(results[name]["prefilled_tokens"]) for name in results)
    print(
        f"{case:8s} {before:7.3f} s -> {after:7.3f} s ({before / after:.2f}x)   "
        f"prefilled {most:7.0f} -> {least:7.0f} tokens ({most / least:.2f}x)",
        flush=True,
    )
    return {"results": results, "seconds_ratio": before / after, "prefilled_ratio": most / least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="a checkout to compare with")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="3M")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"prefix-{date.today()}.json")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        print(json.dumps(measure(args.model, args.cases, args.repeats, args.options)))
        return
    from engine import machine

    record: dict[str, Any] = {"command": sys.argv, "date": str(date.today()), "machine": machine(), "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args.shape, Path(folder) / args.shape, "float32")
        for case in args.cases.split(","):
            record["cases"][case] = compare(model, case, args.baseline, args)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"recorded in {args.out}")


if __name__ == "__main__":
    main()
