"""The kill campaign: runs of every strategy, killed with SIGKILL at random moments and resumed, until they are done.

    python benchmarks/kills.py                       # 196 kills, five minutes on two cores
    python benchmarks/kills.py --kills 28            # one kill for each case
    python benchmarks/kills.py --cases april-group,sync-group-deterministic --kills 20

A case is a strategy x the unit that is trained x deterministic or not, at default settings but for sizes; which laws
are checked stands in ``tests/kills.py``. The moments are a function of ``--seed``, the clock's as far as a machine
repeats itself. The result, a row for each case, goes to ``--out``; a law that does not hold ends the campaign with
exit code 1 and leaves the run where it was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from engine import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # reward workers
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import runs  # noqa: E402
from tests.kills import STEPS, Case, Record, cases, kill_and_resume  # noqa: E402


def campaign(chosen: Sequence[Case], folder: Path, *, num_kills: int, seed: int, jobs: int) -> Iterable[Record]:
    """The records as they come in; ``num_kills`` are divided among the cases as evenly as can be."""
    model = runs.save_model(folder / "model")
    shares = [num_kills // len(chosen) + (i < num_kills % len(chosen)) for i in range(len(chosen))]
    with ThreadPoolExecutor(jobs) as pool:
        work = [
            pool.submit(kill_and_resume, case, model, folder / case.name, num_kills=share, seed=seed)
            for case, share in zip(chosen, shares, strict=True)
            if share
        ]
        try:
            for done in as_completed(work):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def row(record: Record) -> dict[str, Any]:
    return {
        "strategy": record.case.strategy,
        "unit": record.case.unit,
        "deterministic": record.case.deterministic,
        "kills": record.num_kills,
        "kills_by_way": dict(sorted(record.kills.items())),
        "runs": record.num_runs,
        "steps_repeated": record.num_repeated_steps,
        "decoded_tokens": record.decoded_tokens,
        "tokens_decoded_again": record.lost_tokens if record.case.deterministic else None,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {case.name: case for case in cases()}
    parser.add_argument("--kills", type=int, default=7 * len(known), help="in all (%(default)s)")
    parser.add_argument("--cases", default=",".join(known), help="between commas; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time (%(default)s)")
    parser.add_argument("--out", type=Path, help="the JSON file; none is written when left out")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.cases.split(",") if name not in known]:
        parser.error(f"no case {unknown[0]!r}; known: {', '.join(known)}")
    chosen = [known[name] for name in options.cases.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="rollover-kills-"))
    began_s, rows, ways = time.monotonic(), [], Counter[str]()
    print(
        f"{'strategy':14} {'unit':7} {'deterministic':14} {'kills':>5} {'runs':>5} {'steps repeated':>15}", flush=True
    )
    for record in campaign(chosen, folder, num_kills=options.kills, seed=options.seed, jobs=options.jobs):
        c = record.case
        print(
            f"{c.strategy:14} {c.unit:7} {'yes' if c.deterministic else 'no':14} {record.num_kills:5}"
            f" {record.num_runs:5} {record.num_repeated_steps:15}",
            flush=True,
        )
        rows.append(row(record))
        ways += record.kills
    wall_s = time.monotonic() - began_s
    print(f"{ways.total()} kills ({', '.join(f'{n} by {w}' for w, n in sorted(ways.items()))}) in {wall_s:.0f} s:"
          " every law held")  # fmt: skip
    if options.out is not None:
        result = {
            "date": date.today().isoformat(),
            "command": f"python benchmarks/kills.py --kills {options.kills} --seed {options.seed}"
            + (f" --cases {options.cases}" if len(chosen) < len(known) else ""),
            "machine": machine(),
            "steps_of_a_run": STEPS,
            "kills": ways.total(),
            "kills_by_way": dict(sorted(ways.items())),
            "wall_s": round(wall_s, 1),
            "cases": sorted(rows, key=lambda r: (r["strategy"], r["unit"], r["deterministic"])),
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
