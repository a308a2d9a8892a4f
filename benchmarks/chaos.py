"""The chaos campaign: runs of a swarm through real processes behind a bad network, killed until they are done.

    python benchmarks/chaos.py --parts parts.jsonl                # 500 kills; minutes on two idle cores
    python benchmarks/chaos.py --parts parts.jsonl --minutes 10   # go on for ten minutes where it was left
    python benchmarks/chaos.py --parts parts.jsonl --out benchmarks/results/chaos-2026-11-23.json --kills 0

The cast of a run: a trainer, four members of unequal speed, an nginx for blobs, and between them a proxy that loses,
doubles, delays and reorders frames, cuts connections and damages blobs. Anybody is killed with SIGKILL or stopped with
SIGSTOP; which laws must hold stands in ``tests/swarm/chaos/laws.py``. Each run has an undisturbed one of the same seed
beside it, so that rewards can be compared; in pull mode that is a run without a swarm, and the tokens must be equal.
The rows of ``--parts`` are kept from call to call; a law that does not hold ends the campaign with exit code 1 and
leaves the run where it was found. What is done when is a function of the seed, as far as a machine repeats itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from engine import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rollover.engine.servers.launch import free_port  # noqa: E402
from tests import runs  # noqa: E402
from tests.swarm.chaos.campaign import CALM, Case, Survivor, survive  # noqa: E402
from tests.swarm.chaos.faults import Blows  # noqa: E402
from tests.swarm.chaos.laws import sampled  # noqa: E402
from tests.swarm.chaos.stage import LEASE_S, SPEEDS, answers  # noqa: E402

STEPS = 20
LAST = 8
"""Steps at the end of a run over which the reward is compared."""
_SETTINGS = ("--trainer.learning_rate", "1e-2", "--rollout.group_size", "4", "--engine.max_running", "32")
_ALWAYS = 10**9
_STRATEGIES = ("bounded_async", "april", "inflight", "rollover", "token_budget", "oversample")


def cases(seed: int) -> list[Case]:
    """Return all cases with a seed; a run is hit until its end."""
    common: dict[str, Any] = {"steps": STEPS, "num_kills": _ALWAYS, "seed": seed, "blows": Blows(gap_s=1.2)}
    pull = Case(strategy="sync", mode="pull", argv=_SETTINGS, **common)
    return [*(Case(strategy=name, argv=_SETTINGS, **common) for name in _STRATEGIES), pull]


def one(case: Case, model: Path, root: Path) -> dict[str, Any]:
    """Run a case and its undisturbed fellow, and return the row of them."""
    folder = root / f"{case.name}-{case.seed}"
    hit, calm = folder / "hit", folder / "calm"
    for place in (hit, calm):
        place.mkdir(parents=True)
        runs.write_experiment(place, model)
    survivor = asyncio.run(survive(case, hit))
    if case.mode == "pull":
        rewards = _co_located(case, calm)
        assert sampled(hit / "out") == sampled(calm / "out"), f"{folder}: other tokens than without a swarm"
    else:
        rewards = asyncio.run(survive(replace(case, num_kills=0, wire=CALM), calm)).held.rewards
    shutil.rmtree(folder)
    return row(survivor, rewards)


def _co_located(case: Case, folder: Path) -> tuple[float, ...]:
    argv = ("--rollout.strategy", case.strategy, "--steps", str(case.steps), "--seed", str(case.seed), *_SETTINGS[:4])
    outcome = runs.Processes(folder).run("train", "run.toml", "--run-dir", "out", *argv)
    assert outcome.code == 0, outcome.err
    return tuple(
        sum(t.reward or 0.0 for t in b.trajectories) / len(b.trajectories) for b in runs.batches(folder / "out")
    )


def row(survivor: Survivor, undisturbed: Sequence[float]) -> dict[str, Any]:
    wire, toll = survivor.wire, survivor.toll
    return {
        "case": survivor.case.name,
        "seed": survivor.case.seed,
        "kills": dict(toll.kills),
        "others": dict(toll.others),
        "coordinators": toll.num_starts,
        "returns": [asdict(back) for back in toll.returns],
        "faults": {name: count for name, count in wire.faults.items() if count},
        "frames": dict(wire.frames),
        "repeated_tokens": wire.repeated_tokens,
        "decoded_tokens": survivor.held.decoded_tokens,
        "acknowledged_tokens": survivor.held.acked_tokens,
        "max_lag": survivor.held.max_lag,
        "rewards": [round(reward, 5) for reward in survivor.held.rewards],
        "undisturbed_rewards": [round(reward, 5) for reward in undisturbed],
        "wall_s": round(survivor.wall_s, 1),
    }


def campaign(known: set[tuple[str, int]], *, num_kills: int, end_s: float, jobs: int) -> Iterator[dict[str, Any]]:
    """Yield rows as they come in, until there were so many kills or the time is over."""
    root = Path(tempfile.mkdtemp(prefix="rollover-chaos-"))
    model = runs.save_model(root / "model")
    todo = (case for seed in range(1000) for case in cases(seed) if (case.name, case.seed) not in known)
    # Processes, each with a server of its own to fork from: whose children have ended is not known twice.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(one, next(todo), model, root) for _ in range(jobs)}
        try:
            while running:
                done = next(as_completed(running))
                running.discard(done)
                made = done.result()
                num_kills -= sum(made["kills"].values())
                yield made
                if num_kills > 0 and time.monotonic() < end_s:
                    running.add(pool.submit(one, next(todo), model, root))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def cold_starts(count: int) -> list[float]:
    """Seconds from the start of a process that has imported nothing to the first answer of a resumed coordinator."""
    folder = Path(tempfile.mkdtemp(prefix="rollover-cold-"))
    runs.write_experiment(folder, runs.save_model(folder.parent / f"{folder.name}-model"))
    asyncio.run(survive(Case(steps=2, num_kills=0, wire=CALM), folder))
    taken = []
    for _ in range(count):
        port, began_s = free_port(), time.monotonic()
        argv = ("train", "--resume", "out", "--steps", "100", "--engine.listen", f"127.0.0.1:{port}")
        with subprocess.Popen(
            [sys.executable, "-m", "rollover", *argv],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while not asyncio.run(answers(port)):
                assert process.poll() is None and time.monotonic() < began_s + 120.0, "the coordinator does not start"
                time.sleep(0.01)
            taken.append(round(time.monotonic() - began_s, 2))
            process.kill()
    shutil.rmtree(folder)
    return taken


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rows come to. A row is written when all laws have held: of its acknowledged tokens each was found
    in the journal, and no group was trained twice."""
    kills = _summed(rows, "kills")
    roles: Counter[str] = Counter()
    for name, count in kills.items():
        who, way = name.split("/")
        roles[f"{who if who in ('coordinator', 'nginx') else 'member'}/{way}"] += count
    returns = [back for row in rows for back in row["returns"]]
    members = {name: [b["seconds"] for b in returns if b["name"] == name and b["is_alone"]] for name in SPEEDS}
    push = [row for row in rows if row["case"].startswith("push_pull")]
    return {
        "runs": len(rows),
        "kills": kills.total(),
        "kills_by_role_and_way": dict(sorted(roles.items())),
        "others": dict(sorted(_summed(rows, "others").items())),
        "faults": dict(sorted(_summed(rows, "faults").items())),
        "decoded_tokens": sum(row["decoded_tokens"] for row in rows),
        "acknowledged_tokens": sum(row["acknowledged_tokens"] for row in rows),
        "runs_in_pull_mode_with_the_tokens_of_no_swarm": sum(row["case"].startswith("pull") for row in rows),
        "coordinator_serves_after_s": _spread([b["seconds"] for b in returns if b["name"] == "coordinator"]),
        "member_serves_after_s": _spread([s for seconds in members.values() for s in seconds]),
        "two_leases_s": 2 * LEASE_S,
        "reward_difference_in_push_pull": _difference(push),
    }


def _summed(rows: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for made in rows:
        total.update(made[key])
    return total


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {"count": len(seconds)}
    cuts = statistics.quantiles(seconds, n=20)
    return {
        "count": len(seconds),
        "median": round(statistics.median(seconds), 2),
        "p95": round(cuts[-1], 2),
        "max": round(max(seconds), 2),
    }


def _difference(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean reward of the last steps, disturbed less undisturbed, paired by case and seed, with its 95% interval."""
    pairs = [
        (statistics.mean(row["rewards"][-LAST:]), statistics.mean(row["undisturbed_rewards"][-LAST:])) for row in rows
    ]
    if len(pairs) < 3:
        return {"pairs": len(pairs)}
    differences = [hit - calm for hit, calm in pairs]
    half = 2.1 * statistics.stdev(differences) / math.sqrt(len(differences))  # t of some twenty pairs
    mean = statistics.mean(differences)
    return {
        "pairs": len(pairs),
        "steps": LAST,
        "undisturbed": round(statistics.mean(calm for _, calm in pairs), 4),
        "disturbed": round(statistics.mean(hit for hit, _ in pairs), 4),
        "difference": round(mean, 4),
        "interval": [round(mean - half, 4), round(mean + half, 4)],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="in all, those of --parts included (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time (%(default)s)")
    parser.add_argument("--parts", type=Path, required=True, help="rows, a line each; those that are there are kept")
    parser.add_argument("--cold", type=int, default=0, help="cold starts of the coordinator to be timed, alone")
    parser.add_argument("--out", type=Path, help="the JSON file of the whole; none is written when left out")
    options = parser.parse_args(argv)
    lines = options.parts.read_text().splitlines() if options.parts.exists() else []
    found = [json.loads(line) for line in lines]
    rows, colds = [r for r in found if "case" in r], [r["cold_s"] for r in found if "cold_s" in r]
    if options.cold:
        colds += [seconds for seconds in cold_starts(options.cold)]
        with options.parts.open("a") as file:
            file.writelines(json.dumps({"cold_s": seconds}) + "\n" for seconds in colds[-options.cold :])
        print(f"cold starts of the coordinator: {colds[-options.cold :]} s", flush=True)
    left = options.kills - sum(sum(made["kills"].values()) for made in rows)
    known = {(made["case"], made["seed"]) for made in rows}
    end_s = time.monotonic() + 60 * options.minutes
    for made in campaign(known, num_kills=left, end_s=end_s, jobs=options.jobs) if left > 0 else ():
        rows.append(made)
        with options.parts.open("a") as file:
            file.write(json.dumps(made) + "\n")
        total = sum(sum(one_["kills"].values()) for one_ in rows)
        print(
            f"{made['case']:26} seed {made['seed']}: {sum(made['kills'].values()):3} kills, {total} in all", flush=True
        )
    whole = summary(rows)
    print(json.dumps(whole, indent=1))
    if options.out is not None:
        result = {
            "date": date.today().isoformat(),
            "command": f"python benchmarks/chaos.py --parts parts.jsonl --kills {options.kills} --jobs {options.jobs}",
            "machine": machine(),
            "steps_of_a_run": STEPS,
            "lease_s": LEASE_S,
            "tokens_per_s_of_members": dict(SPEEDS),
            **whole,
            "coordinator_serves_after_s_cold": colds,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
