"""What the dispatch rule of a swarm gains over dealing evenly, in virtual time: asynchronous push-pull training, where
each group is due at some step, by the scheduler and the coordinator of production (``swarm_push_pull.py``).

    python benchmarks/swarm_dispatch.py --members 100

The members differ in speed by up to 50 times, in room, and in the bandwidth over which they fetch new weights; they
leave and come back. All ways of dealing are given the same members, responses and failures. *Even* gives a call to the
member with the least calls for its room, as a pool of like servers does. *Rule* is the rule of
``rollover.swarm.coordinator.machine.placing.rule``.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from datetime import date
from pathlib import Path

from swarm_push_pull import DEALINGS, Load, PushPull, Worker

LIMIT = 8192
WEIGHTS_BYTES = 1e9
UP_S, DOWN_S = 1800.0, 300.0
"""Mean times for which a member stays and stays away."""


def workers(num: int, seed: int) -> list[Worker]:
    made, rng = [], random.Random(1000 + seed)
    for i in range(num):
        speed = 2.0 * 50 ** rng.random()
        bandwidth = 2.5e6 * 50 ** rng.random()
        room = max(2, round(speed / 100 * 48 * rng.uniform(0.5, 1.5)))
        name = f"m{i:04d}"
        made.append(Worker(name, speed, room, WEIGHTS_BYTES / bandwidth, random.Random(f"{seed}/{name}")))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4], help="bounds")
    parser.add_argument("--dealings", nargs="+", choices=DEALINGS, default=list(DEALINGS))
    parser.add_argument("--from-s", type=float, default=600.0, help="counted from here")
    parser.add_argument("--until-s", type=float, default=2400.0, help="and until here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for max_staleness in args.staleness:
        load = Load(
            groups=round(2.56 * args.members),
            max_staleness=max_staleness,
            train_s=20.0,
            from_s=args.from_s,
            until_s=args.until_s,
            limit=LIMIT,
            up_s=UP_S,
            down_s=DOWN_S,
        )
        for seed in args.seeds:
            for dealing in args.dealings:
                found = PushPull(workers(args.members, seed), load, DEALINGS[dealing], seed).run()
                rows.append({"dealing": dealing, "seed": seed, "load": asdict(load), **found})
                said = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                print(f"S = {max_staleness}  seed {seed}  {dealing}: {said}", flush=True)
    if args.out is not None:
        result = {"date": str(date.today()), "members": args.members, "push_pull": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
