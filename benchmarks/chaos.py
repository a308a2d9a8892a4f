"""The chaos campaign: runs of a swarm through real processes behind a bad network, killed until they are done.

    python benchmarks/chaos.py --parts parts.jsonl                # 500 kills; an hour or two on two cores
    python benchmarks/chaos.py --parts parts.jsonl --minutes 10   # continue for ten minutes where it stopped
    python benchmarks/chaos.py --parts parts.jsonl --out benchmarks/results/chaos-2026-11-25.json

The cast of a run: a trainer, four members of unequal speed, an nginx for blobs as docs/how-to/ shows it, and
between them a proxy that delays frames, cuts connections and damages blobs. Each of them
is killed with SIGKILL or stopped with SIGSTOP, and disks are filled; ``tests/swarm/chaos/laws.py`` says which laws must
hold. Each run is paired with an undisturbed one of the same seed, so that rewards can be compared; in pull mode that is
a run without a swarm, and the tokens must be equal.
The rows of ``--parts`` are kept from call to call; a law that does not hold ends the campaign with exit code 1 and
leaves the run where it was found. The order of events is a function of the seed, as far as a machine repeats itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from engine import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos_summary import summary  # noqa: E402

from tests import runs  # noqa: E402
from tests.swarm.chaos.campaign import CALM, Case, Survivor, survive  # noqa: E402
from tests.swarm.chaos.disks import can_mount  # noqa: E402
from tests.swarm.chaos.faults import WITH_DISKS, Blows  # noqa: E402
from tests.swarm.chaos.laws import mean_rewards, sampled  # noqa: E402
from tests.swarm.chaos.stage import LEASE_S, SPEEDS  # noqa: E402
from tests.swarm.nginx_kit import NGINX  # noqa: E402

STEPS = 20
KILLS_A_RUN = 40
_TASK: tuple[str, ...] = (
    "--trainer.learning_rate",
    "1e-2",
    "--rollout.rollout_batch_size",
    "16",
    "--rollout.group_size",
    "4",
)
_TASK += ("--rollout.max_new_tokens", "24")
"""With these the mean reward of an undisturbed run rises from .04 to some .2 in twenty steps."""
_SETTINGS = (*_TASK, "--engine.max_running", "32")
_PUSH_PULL = (*_SETTINGS, "--rollout.max_staleness", "2")
_STRATEGIES = ("bounded_async", "april", "inflight", "rollover", "token_budget", "oversample")


def cases(seed: int) -> list[Case]:
    """Return all cases with a seed, in the order in which they are run."""
    blows = Blows(gap_s=0.8)
    if can_mount():
        blows = replace(blows, ways=WITH_DISKS)
    common: dict[str, Any] = {"steps": STEPS, "num_kills": KILLS_A_RUN, "seed": seed, "blows": blows}
    first, *others = (Case(strategy=name, argv=_PUSH_PULL, **common) for name in _STRATEGIES)
    return [first, Case(strategy="sync", mode="pull", argv=_SETTINGS, **common), *others]


def one(case: Case, model: Path, root: Path) -> dict[str, Any]:
    """Run a case and its undisturbed fellow, and return the row of them."""
    folder = root / f"{case.name}-{case.seed}"
    hit, calm = folder / "hit", folder / "calm"
    for place in (hit, calm):
        place.mkdir(parents=True)
        runs.write_experiment(place, model)
    survivor = asyncio.run(survive(case, hit))
    made = row(survivor)
    if case.mode == "pull":
        rewards, lag = _co_located(case, calm), 0.0
        assert survivor.trained == sampled(calm / "out"), f"{folder}: other tokens than without a swarm"
    else:
        quiet = replace(case, num_kills=0, wire=CALM, blows=Blows())
        held = asyncio.run(survive(quiet, calm)).held
        rewards, lag = held.rewards, held.mean_lag
    shutil.rmtree(folder)
    return {**made, "undisturbed_mean_lag": round(lag, 2), "undisturbed_rewards": _rounded(rewards)}


def _co_located(case: Case, folder: Path) -> tuple[float, ...]:
    argv = ("--rollout.strategy", case.strategy, "--steps", str(case.steps), "--seed", str(case.seed), *_TASK)
    outcome = runs.Processes(folder).run("train", "run.toml", "--run-dir", "out", *argv)
    assert outcome.code == 0, outcome.err
    return mean_rewards(runs.batches(folder / "out"))


def row(survivor: Survivor) -> dict[str, Any]:
    wire, toll = survivor.wire, survivor.toll
    return {
        "case": survivor.case.name,
        "seed": survivor.case.seed,
        "kills": dict(toll.kills),
        "others": dict(toll.others),
        "coordinators": toll.num_starts,
        "ended_by_a_full_disk": toll.num_full_disk_ends,
        "faults": {name: count for name, count in wire.faults.items() if count},
        "frames": dict(wire.frames),
        "decoded_tokens": survivor.held.decoded_tokens,
        "acknowledged_tokens": survivor.held.acked_tokens,
        "max_lag": survivor.held.max_lag,
        "mean_lag": round(survivor.held.mean_lag, 2),
        "rewards": _rounded(survivor.held.rewards),
        "wall_s": round(survivor.wall_s, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]


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
    shutil.rmtree(root)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="in all, those of --parts included (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time (%(default)s)")
    parser.add_argument("--parts", type=Path, required=True, help="rows, a line each; those that are there are kept")
    parser.add_argument("--out", type=Path, help="the JSON file of the whole; none is written when left out")
    options = parser.parse_args(argv)
    if NGINX is None:
        parser.error("nginx is one of the cast, and is not installed: apt install nginx-light")
    lines = options.parts.read_text().splitlines() if options.parts.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def keep(made: dict[str, Any]) -> None:
        rows.append(made)
        with options.parts.open("a") as file:
            file.write(json.dumps(made) + "\n")

    left = options.kills - sum(sum(made["kills"].values()) for made in rows)
    if left > 0:
        known = {(made["case"], made["seed"]) for made in rows}
        end_s = time.monotonic() + 60 * options.minutes
        for made in campaign(known, num_kills=left, end_s=end_s, jobs=options.jobs):
            keep(made)
            total = sum(sum(one_["kills"].values()) for one_ in rows)
            print(
                f"{made['case']:26} seed {made['seed']}: {sum(made['kills'].values()):3} kills, {total} in all",
                flush=True,
            )
    whole = summary(rows) if rows else {}
    print(json.dumps(whole, indent=1))
    if options.out is not None:
        result = {**_circumstances(options), **whole, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "command": _command(options),
        "machine": machine(),
        "kills_demanded": options.kills,
        "nginx": subprocess.run([str(NGINX), "-v"], capture_output=True, text=True).stderr.strip(),
        "disks_are_filled": can_mount(),
        "steps_of_a_run": STEPS,
        "settings": shlex.join(_SETTINGS),
        "settings_of_push_pull": shlex.join(_PUSH_PULL),
        "lease_s": LEASE_S,
        "tokens_per_s_of_members": dict(SPEEDS),
    }


def _command(options: argparse.Namespace) -> str:
    """Return the command that makes the whole result at once."""
    numbers = {"kills": options.kills, "jobs": options.jobs}
    given = " ".join(f"--{name} {number}" for name, number in numbers.items() if number)
    return f"python benchmarks/chaos.py --parts {options.parts.name} {given}"


if __name__ == "__main__":
    main()
