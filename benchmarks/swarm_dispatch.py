"""What the dispatch rule of a swarm gains over dealing evenly, in virtual time.

    python benchmarks/swarm_dispatch.py --only pull      # 1,000 members, some minutes
    python benchmarks/swarm_dispatch.py --only push-pull --members 100

A thousand members differ in speed by up to 50 times, in room, and in the bandwidth over which they fetch new weights;
they leave and come back. All ways of dealing are given the same members, responses and failures. *Even* gives a call to
the member with the least calls for its room, as a pool of like servers does. *Rule* is the rule of
``rollover.swarm.coordinator.machine.placing.rule``.

Two loads: a batch of responses that is waited for (sequential pull), dealt by the rule alone; and
asynchronous push-pull, where each group is due at some step, by the scheduler and the coordinator of production
(``swarm_push_pull.py``).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Protocol

import numpy as np
from swarm_push_pull import DEALINGS, Load, PushPull, Worker

from rollover.swarm.coordinator.machine.placing import rule as placing
from rollover.swarm.coordinator.machine.placing.forecast import RemainingTokens
from rollover.swarm.coordinator.machine.placing.rule import CallFacts

LIMIT = 8192
WEIGHTS_BYTES = 1e9
HEARTBEAT_S = 5.0
"""A member's speed is known from the first heartbeat after its first call."""
UP_S, DOWN_S = 1800.0, 300.0
"""Mean times for which a member stays and stays away."""


@dataclass
class Machine:
    name: str
    speed: float
    """Tokens per second of each call."""
    room: int
    fetch_s: float
    place: int
    """Among all machines."""
    calls: dict[str, float] = field(default_factory=dict)
    """Call to when it was given."""
    version: int = 0
    is_up: bool = True
    is_measured: bool = False


class Rule(Protocol):
    """Places calls on machines of which it is told when they change."""

    def changed(self, machine: Machine) -> None: ...

    def choose(self, work: CallFacts, now_s: float) -> int | None: ...

    def published(self, version: int, now_s: float) -> None: ...

    def drain_s(self, num_tokens: float) -> float: ...


class Even:
    """Gives a call to the machine with the least calls for its room."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._loads = np.zeros(len(machines))
        """Infinite where there is no room."""
        self._versions = np.zeros(len(machines), dtype=np.int64)

    def changed(self, machine: Machine) -> None:
        has_room = machine.is_up and len(machine.calls) < machine.room
        self._loads[machine.place] = len(machine.calls) / machine.room if has_room else math.inf
        self._versions[machine.place] = machine.version

    def choose(self, work: CallFacts, now_s: float) -> int | None:
        loads = np.where(self._versions >= work.least_version, self._loads, math.inf)
        place = int(loads.argmin())
        return place if loads[place] < math.inf else None

    def published(self, version: int, now_s: float) -> None:
        """It looks at what is served alone."""

    def drain_s(self, num_tokens: float) -> float:
        return math.inf


class BySpeed:
    """The coordinator's rule."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._crowd = placing.Crowd()
        self._head, self._published_s = 0, 0.0
        self._places = {m.name: m.place for m in machines}

    def changed(self, machine: Machine) -> None:
        facts = placing.MemberFacts(
            version=machine.version,
            num_running=len(machine.calls),
            max_running=machine.room,
            tokens_per_s=machine.speed if machine.is_measured else None,
            prepare_s=machine.fetch_s if machine.version > 0 else None,
        )
        self._crowd.put(machine.name, facts if machine.is_up else None)

    def choose(self, work: CallFacts, now_s: float) -> int | None:
        name = placing.choose(self._crowd, work, newest=self._head, age_s=now_s - self._published_s)
        return None if name is None else self._places[name]

    def published(self, version: int, now_s: float) -> None:
        self._head, self._published_s = version, now_s

    def drain_s(self, num_tokens: float) -> float:
        return self._crowd.drain_s(num_tokens)


RULES: dict[str, Callable[[Sequence[Machine]], Rule]] = {"even": Even, "rule": BySpeed}


def machines(num: int, rng: random.Random) -> list[Machine]:
    made = []
    for i in range(num):
        speed = 2.0 * 50 ** rng.random()
        bandwidth = 2.5e6 * 50 ** rng.random()
        room = max(2, round(speed / 100 * 48 * rng.uniform(0.5, 1.5)))
        made.append(Machine(f"m{i:04d}", speed, room, WEIGHTS_BYTES / bandwidth, i))
    return made


def lengths(num: int, rng: random.Random) -> list[int]:
    """Log-normal with a long tail, cut at the limit: median 700, one in 40 at the limit."""
    return [min(LIMIT, max(8, round(rng.lognormvariate(math.log(700), 1.25)))) for _ in range(num)]


class Swarm:
    """Runs calls on machines in virtual time; a call that loses its machine goes on elsewhere behind its tokens."""

    def __init__(self, machines: Sequence[Machine], rule: Rule, rng: random.Random) -> None:
        self.machines, self.rule, self.rng = machines, rule, rng
        self.now_s, self.num_running = 0.0, 0
        self.agenda: list[tuple[float, int, str, int, str]] = []
        self.serial = 0
        self.left: dict[str, float] = {}
        self.total: dict[str, int] = {}
        self.fresh: deque[str] = deque()
        """Calls that nobody has begun, and those that have lost their machine, in order of arrival."""
        self.resumed: dict[str, None] = {}
        self.ends: dict[str, int] = {}
        """The entry in the agenda at which a running call ends."""
        self.remaining = RemainingTokens()
        self.done: list[str] = []
        for machine in machines:
            rule.changed(machine)
            self.at(rng.expovariate(1 / UP_S), "down", machine)

    def at(self, delay_s: float, kind: str, machine: Machine, call: str = "") -> int:
        self.serial += 1
        heapq.heappush(self.agenda, (self.now_s + delay_s, self.serial, kind, machine.place, call))
        return self.serial

    def add(self, call: str, length: int) -> None:
        self.left[call], self.total[call] = float(length), length
        self.fresh.append(call)

    def publish(self, version: int) -> None:
        self.rule.published(version, self.now_s)
        for machine in self.machines:
            self.at(machine.fetch_s, f"serves {version}", machine)
            self.at(HEARTBEAT_S, "beat", machine)

    def work(self, call: str, least_version: int) -> CallFacts:
        """As the coordinator has it."""
        typical = self.remaining.expected(0, LIMIT)
        num_calls = self.num_running / 2 + len(self.fresh) + len(self.resumed)
        return CallFacts(
            least_version=least_version,
            tokens_left=self.remaining.expected(int(self.total[call] - self.left[call]), LIMIT),
            mean_tokens_left=typical / 2,
            horizon_s=self.rule.drain_s(num_calls * typical),
        )

    def place(self, least_version: int) -> None:
        """Give calls away. Of those that nobody has begun one that has to wait speaks for all."""
        for call in list(self.resumed):
            if self.is_given(call, least_version):
                del self.resumed[call]
        while self.fresh and self.is_given(self.fresh[0], least_version):
            self.fresh.popleft()

    def is_given(self, call: str, least_version: int) -> bool:
        place = self.rule.choose(self.work(call, least_version), self.now_s)
        if place is None:
            return False
        machine = self.machines[place]
        machine.calls[call] = self.now_s
        self.num_running += 1
        self.ends[call] = self.at(self.left[call] / machine.speed, "end", machine, call)
        self.rule.changed(machine)
        return True

    def take_away(self, call: str, machine: Machine) -> None:
        del machine.calls[call], self.ends[call]
        self.num_running -= 1

    def step(self) -> None:
        self.now_s, serial, kind, place, call = heapq.heappop(self.agenda)
        machine = self.machines[place]
        if kind == "end":
            if self.ends.get(call) != serial:
                return
            self.take_away(call, machine)
            machine.is_measured = True
            del self.left[call]
            self.remaining.ended(self.total.pop(call))
            self.done.append(call)
        elif kind == "down":
            machine.is_up = False
            for call, since_s in list(machine.calls.items()):
                self.left[call] -= min(self.left[call] - 1, (self.now_s - since_s) * machine.speed)
                self.take_away(call, machine)
                self.resumed[call] = None
            self.at(self.rng.expovariate(1 / DOWN_S), "up", machine)
        elif kind == "beat":
            if machine.calls:
                machine.is_measured = True
            elif not machine.is_measured:
                self.at(HEARTBEAT_S, "beat", machine)
        elif kind == "up":
            machine.is_up = True
            self.at(self.rng.expovariate(1 / UP_S), "down", machine)
        else:
            machine.version = max(machine.version, int(kind.split()[1]))
        self.rule.changed(machine)


def pull(
    machines: Sequence[Machine], rule: Callable[[Sequence[Machine]], Rule], seed: int, *, num_batches: int, batch: int
) -> list[float]:
    """Seconds for each batch, all of whose responses are waited for, after new weights were published."""
    swarm, took = Swarm(machines, rule(machines), random.Random(seed)), []
    drawn = random.Random(seed + 1)
    for step in range(num_batches):
        start_s = swarm.now_s
        swarm.publish(step + 1)
        for number, length in enumerate(lengths(batch, drawn)):
            swarm.add(f"{step}.{number}", length)
        while len(swarm.done) < batch:
            swarm.place(step + 1)
            swarm.step()
        swarm.done.clear()
        took.append(swarm.now_s - start_s)
    return took


def push_pull(members: int, seed: int, load: Load, dealing: str) -> dict[str, float]:
    """What is trained in push-pull mode, where each group is due."""
    made = machines(members, random.Random(1000 + seed))
    workers = [Worker(m.name, m.speed, m.room, m.fetch_s, random.Random(f"{seed}/{m.name}")) for m in made]
    return PushPull(workers, load, DEALINGS[dealing], seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=4, help="of sequential pull")
    parser.add_argument("--batch", type=int, default=8192, help="responses in a batch of sequential pull")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4], help="bounds of push-pull")
    parser.add_argument("--dealings", nargs="+", choices=DEALINGS, default=list(DEALINGS), help="of push-pull")
    parser.add_argument("--from-s", type=float, default=600.0, help="where push-pull is counted from")
    parser.add_argument("--until-s", type=float, default=2400.0, help="and until when")
    parser.add_argument("--only", choices=("pull", "push-pull"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, object] = {"date": str(date.today()), "members": args.members}
    if args.only != "push-pull":
        result |= pull_of(args.members, args.seeds, num_batches=args.batches, batch=args.batch)
    if args.only != "pull":
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
                    found = push_pull(args.members, seed, load, dealing)
                    rows.append({"dealing": dealing, "seed": seed, "load": asdict(load), **found})
                    said = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                    print(f"S = {max_staleness}  seed {seed}  {dealing}: {said}", flush=True)
        result["push_pull"] = rows
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def pull_of(members: int, seeds: Sequence[int], *, num_batches: int, batch: int) -> dict[str, object]:
    """Seconds for a batch of sequential pull by each rule, and how many times as long dealing evenly takes."""
    took: dict[str, list[float]] = {name: [] for name in RULES}
    for seed in seeds:
        for name, rule in RULES.items():
            made = machines(members, random.Random(1000 + seed))
            each = pull(made, rule, seed, num_batches=num_batches, batch=batch)
            took[name].append(statistics.mean(each[1:] or each))
            print(f"seed {seed}  {name:5s}  a batch of {batch} takes {took[name][-1]:8.1f} s", flush=True)
    ratios = [even / by_rule for even, by_rule in zip(took["even"], took["rule"], strict=True)]
    print(f"sequential pull: even / rule = {statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return {"batch": batch, "pull": took, "ratios": ratios}


if __name__ == "__main__":
    main()
