"""What the dispatch rule of a swarm gains over dealing evenly, in virtual time.

    python benchmarks/swarm_dispatch.py                  # 1,000 members, some minutes
    python benchmarks/swarm_dispatch.py --members 100 --batch 1000

A thousand members differ in speed by up to 50 times, in room, and in the bandwidth over which they fetch new weights;
they leave and come back. Both rules are given the same members, responses and failures. *Even* gives a call to the
member with the least calls for its room, as a pool of like servers does. *Rule* is the rule of
``rollover.swarm.coordinator.machine.dispatch`` as the coordinator applies it, by its ``Ranking`` of ``SwarmMember``.

Two loads: a batch of responses that is waited for (sequential pull), and members that are never out of work
(asynchronous push-pull).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Protocol

import numpy as np

from rollover.swarm.coordinator.machine.dispatch import Work
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.coordinator.machine.ranking import Ranking
from rollover.swarm.coordinator.machine.remaining import RemainingTokens
from rollover.swarm.wire.messages import Ready

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

    def choose(self, work: Work, now_s: float) -> int | None: ...

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

    def choose(self, work: Work, now_s: float) -> int | None:
        loads = np.where(self._versions >= work.least_version, self._loads, math.inf)
        place = int(loads.argmin())
        return place if loads[place] < math.inf else None

    def published(self, version: int, now_s: float) -> None:
        """It looks at what is served alone."""

    def drain_s(self, num_tokens: float) -> float:
        return math.inf


class BySpeed:
    """The coordinator's rule, over members as the coordinator knows them."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._ranking = Ranking(checks=False)
        self._head, self._published_s = 0, 0.0
        self._members = {
            m.name: SwarmMember(
                m.name,
                ready=Ready(max_running=m.room, max_context_tokens=2 * LIMIT, seeded=True, number_format="bfloat16"),
                reserved=m.calls,  # the same dict: it is asked for its length alone
            )
            for m in machines
        }
        self._places = {m.name: m.place for m in machines}

    def changed(self, machine: Machine) -> None:
        member = self._members[machine.name]
        member.is_connected, member.version = machine.is_up, machine.version
        if machine.version > 0:
            member.prepare_s = machine.fetch_s
        if machine.is_measured:
            member.call_tokens_per_s = machine.speed
        self._ranking.changed(member)

    def choose(self, work: Work, now_s: float) -> int | None:
        name = self._ranking.choose(work, self._head, now_s - self._published_s)
        return None if name is None else self._places[name]

    def published(self, version: int, now_s: float) -> None:
        self._head, self._published_s = version, now_s

    def drain_s(self, num_tokens: float) -> float:
        return self._ranking.drain_s(num_tokens)


RULES: dict[str, type[Rule]] = {"even": Even, "rule": BySpeed}


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
        self.now_s, self.num_running, self.num_decoded = 0.0, 0, 0.0
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

    def work(self, call: str, least_version: int) -> Work:
        """As the coordinator has it."""
        typical = self.remaining.expected(0, LIMIT)
        num_calls = self.num_running / 2 + len(self.fresh) + len(self.resumed)
        return Work(
            least_version=least_version,
            remaining_tokens=self.remaining.expected(int(self.total[call] - self.left[call]), LIMIT),
            mean_remaining_tokens=typical / 2,
            horizon_s=math.inf if least_version == 0 else self.rule.drain_s(num_calls * typical),
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
            self.num_decoded += self.left.pop(call)
            self.remaining.ended(self.total.pop(call))
            self.done.append(call)
        elif kind == "down":
            machine.is_up = False
            for call, since_s in list(machine.calls.items()):
                decoded = min(self.left[call] - 1, (self.now_s - since_s) * machine.speed)
                self.left[call] -= decoded
                self.num_decoded += decoded
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


def pull(machines: Sequence[Machine], rule: type[Rule], seed: int, *, num_batches: int, batch: int) -> list[float]:
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


def push(machines: Sequence[Machine], rule: type[Rule], seed: int, *, until_s: float) -> dict[str, float]:
    """Tokens per second, and how long responses take, with work for everybody."""
    swarm = Swarm(machines, rule(machines), random.Random(seed))
    drawn, began_s, took, number = random.Random(seed + 1), dict[str, float](), list[float](), 0
    backlog = sum(machine.room for machine in machines) // 4
    while swarm.now_s < until_s:
        for length in lengths(backlog - len(swarm.fresh), drawn):
            swarm.add(str(number), length)
            began_s[str(number)] = swarm.now_s
            number += 1
        swarm.place(0)
        swarm.step()
        took += [swarm.now_s - began_s.pop(call) for call in swarm.done]
        swarm.done.clear()
    took.sort()
    return {
        "tokens_per_s": swarm.num_decoded / swarm.now_s,
        "median_s": statistics.median(took),
        "p99_s": took[int(len(took) * 0.99)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8192, help="responses in a batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--horizon-s", type=float, default=1800.0, help="of the asynchronous load")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {name: {"pull_s": []} for name in RULES}
    for seed in range(args.seeds):
        for name, rule in RULES.items():
            members = machines(args.members, random.Random(1000 + seed))
            took = pull(members, rule, seed, num_batches=args.batches, batch=args.batch)
            rows[name]["pull_s"].append(statistics.mean(took[1:] or took))
            print(
                f"seed {seed}  {name:5s}  a batch of {args.batch} takes {rows[name]['pull_s'][-1]:8.1f} s", flush=True
            )
    pushed: dict[str, list[dict[str, float]]] = {name: [] for name in RULES}
    for seed in range(args.seeds):
        for name, rule in RULES.items():
            found = push(machines(args.members, random.Random(1000 + seed)), rule, seed, until_s=args.horizon_s)
            pushed[name].append(found)
            print(
                f"seed {seed}  {name:5s}  {found['tokens_per_s']:9.0f} tokens/s; a response takes"
                f" {found['median_s']:6.1f} s, 1% take over {found['p99_s']:7.1f} s",
                flush=True,
            )
    ratios = [e / r for e, r in zip(rows["even"]["pull_s"], rows["rule"]["pull_s"], strict=True)]
    print(f"sequential pull: even / rule = {statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    result: dict[str, object] = {
        "date": str(date.today()),
        "members": args.members,
        "batch": args.batch,
        "pull": rows,
        "ratios": ratios,
    }
    result["push_pull"] = pushed
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
