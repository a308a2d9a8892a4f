"""What the dispatch rule of a swarm gains over dealing evenly, in virtual time.

    python benchmarks/swarm_dispatch.py                  # 1,000 members, about an hour
    python benchmarks/swarm_dispatch.py --members 100 --batch 1000    # a minute

A thousand members differ in speed by up to 50 times, in room, and in the bandwidth over which they fetch new weights;
they leave and come back. Both rules are given the same members, responses and failures. *Even* gives a call to the
member with the least calls for its room, as a pool of like servers does. *Rule* is ``choose`` in
``rollover.swarm.coordinator.machine.dispatch``.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rollover.swarm.coordinator.machine.dispatch import Candidate, Work, choose
from rollover.swarm.coordinator.machine.remaining import RemainingTokens

LIMIT = 8192
WEIGHTS_BYTES = 1e9
HEARTBEAT_S = 5.0
"""A member's speed is known from the first heartbeat after its first call."""
Rule = Callable[[Sequence[Candidate], Work], str | None]


@dataclass
class Machine:
    name: str
    speed: float
    """Tokens per second of each call."""
    room: int
    fetch_s: float
    calls: dict[int, float] = field(default_factory=dict)
    """Call to its tokens left when it was given."""
    version: int = 0
    is_up: bool = True
    is_measured: bool = False
    ready_at_s: float = math.inf
    """When it will serve the weights that it is fetching."""

    def candidate(self, now_s: float) -> Candidate:
        return Candidate(
            name=self.name,
            version=self.version,
            num_running=len(self.calls),
            max_running=self.room,
            call_tokens_per_s=self.speed if self.is_measured else None,
            ready_s=max(0.0, self.ready_at_s - now_s),
        )


def even(candidates: Sequence[Candidate], work: Work) -> str | None:
    free = [c for c in candidates if c.version >= work.least_version and c.num_running < c.max_running]
    return min(free, key=lambda c: (c.num_running / c.max_running, c.name)).name if free else None


def machines(num: int, rng: random.Random) -> list[Machine]:
    made = []
    for i in range(num):
        speed = 2.0 * 50 ** rng.random()
        bandwidth = 2.5e6 * 50 ** rng.random()
        room = max(2, round(speed / 100 * 48 * rng.uniform(0.5, 1.5)))
        made.append(Machine(f"m{i:04d}", speed, room, WEIGHTS_BYTES / bandwidth))
    return made


def lengths(num: int, rng: random.Random) -> list[int]:
    """Log-normal with a long tail, cut at the limit: median 700, one in 40 at the limit."""
    return [min(LIMIT, max(8, round(rng.lognormvariate(math.log(700), 1.25)))) for _ in range(num)]


class Swarm:
    """Runs calls on machines in virtual time; a call that loses its machine goes on elsewhere behind its tokens."""

    def __init__(self, members: Sequence[Machine], rule: Rule, rng: random.Random, *, churn: bool) -> None:
        self.members = {m.name: m for m in members}
        self.rule, self.rng = rule, rng
        self.now_s = 0.0
        self.agenda: list[tuple[float, int, str, str, int]] = []
        self.serial = 0
        self.left: dict[int, float] = {}
        self.total: dict[int, int] = {}
        self.began: dict[int, tuple[float, float]] = {}
        """When a call was given to its machine, and at which speed."""
        self.waiting: deque[int] = deque()
        self.remaining = RemainingTokens()
        self.done: list[int] = []
        self.num_decoded = 0.0
        self.stamp: dict[int, int] = {}
        if churn:
            for m in members:
                self.at(rng.expovariate(1 / 1800), "down", m.name)

    def at(self, delay_s: float, kind: str, member: str, call: int = 0) -> None:
        self.serial += 1
        heapq.heappush(self.agenda, (self.now_s + delay_s, self.serial, kind, member, call))

    def add(self, call: int, length: int) -> None:
        self.left[call], self.total[call] = float(length), length
        self.waiting.append(call)

    def publish(self, version: int) -> None:
        for m in self.members.values():
            m.ready_at_s = self.now_s + m.fetch_s
            self.at(m.fetch_s, f"serves {version}", m.name)
            self.at(HEARTBEAT_S, "beat", m.name)

    def horizon_s(self) -> float:
        """The time in which all members together would do what there is to do."""
        speed = sum(m.speed * m.room for m in self.members.values() if m.is_up)
        running = sum(len(m.calls) for m in self.members.values())
        tokens = running * self.remaining.expected(0, LIMIT) / 2 + len(self.waiting) * self.remaining.expected(0, LIMIT)
        return tokens / speed

    def place(self, least_version: int) -> None:
        while self.waiting:
            up = [m.candidate(self.now_s) for m in self.members.values() if m.is_up]
            if not any(c.room > 0 for c in up):
                return
            call = self.waiting[0]
            decoded = self.total[call] - self.left[call]
            work = Work(
                least_version=least_version,
                remaining_tokens=self.remaining.expected(int(decoded), LIMIT),
                mean_remaining_tokens=self.remaining.expected(0, LIMIT) / 2,
                horizon_s=math.inf if least_version == 0 else self.horizon_s(),
            )
            name = self.rule(up, work)
            if name is None:
                return
            self.waiting.popleft()
            member = self.members[name]
            member.calls[call] = self.left[call]
            self.began[call] = (self.now_s, member.speed)
            self.at(self.left[call] / member.speed, "end", name, call)
            self.stamp[call] = self.serial

    def step(self) -> None:
        self.now_s, serial, kind, name, call = heapq.heappop(self.agenda)
        member = self.members[name]
        if kind == "end":
            if self.stamp.get(call) != serial:
                return
            del member.calls[call], self.stamp[call]
            member.is_measured = True
            self.num_decoded += self.left.pop(call)
            self.remaining.ended(self.total[call])
            self.done.append(call)
        elif kind == "down":
            member.is_up = False
            for call in list(member.calls):
                begun_s, speed = self.began[call]
                decoded = min(self.left[call] - 1, (self.now_s - begun_s) * speed)
                self.left[call] -= decoded
                self.num_decoded += decoded
                del member.calls[call], self.stamp[call]
                self.waiting.appendleft(call)
            self.at(self.rng.expovariate(1 / 300), "up", name)
        elif kind == "beat":
            if member.calls:
                member.is_measured = True
            elif not member.is_measured:
                self.at(HEARTBEAT_S, "beat", name)
        elif kind == "up":
            member.is_up = True
            self.at(self.rng.expovariate(1 / 1800), "down", name)
        else:
            member.version = max(member.version, int(kind.split()[1]))
            member.ready_at_s = math.inf


def pull(members: Sequence[Machine], rule: Rule, seed: int, *, num_batches: int, batch: int) -> list[float]:
    """Seconds for each batch, all of whose responses are waited for, after new weights were published."""
    swarm, took = Swarm(members, rule, random.Random(seed), churn=True), []
    drawn = random.Random(seed + 1)
    for step in range(num_batches):
        start_s = swarm.now_s
        swarm.publish(step + 1)
        ids = range(step * batch, (step + 1) * batch)
        for call, length in zip(ids, lengths(batch, drawn), strict=True):
            swarm.add(call, length)
        while len(swarm.done) < (step + 1) * batch:
            swarm.place(step + 1)
            swarm.step()
        took.append(swarm.now_s - start_s)
    return took


def push(members: Sequence[Machine], rule: Rule, seed: int, *, horizon_s: float) -> dict[str, float]:
    """Tokens per second, and how long responses take, with work for everybody."""
    swarm = Swarm(members, rule, random.Random(seed), churn=True)
    drawn, call, begun, took = random.Random(seed + 1), 0, {}, []
    backlog = sum(m.room for m in members) // 4
    while swarm.now_s < horizon_s:
        while len(swarm.waiting) < backlog:
            (length,) = lengths(1, drawn)
            swarm.add(call, length)
            call += 1
        before = len(swarm.waiting)
        swarm.place(0)
        for c in range(call - before, call):
            begun.setdefault(c, swarm.now_s)
        swarm.step()
        took += [swarm.now_s - begun[c] for c in swarm.done if c in begun]
        for c in swarm.done:
            begun.pop(c, None)
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
    rules: dict[str, Rule] = {"even": even, "rule": choose}
    rows: dict[str, dict[str, list[float]]] = {name: {"pull_s": []} for name in rules}
    for seed in range(args.seeds):
        for name, rule in rules.items():
            members = machines(args.members, random.Random(1000 + seed))
            took = pull(members, rule, seed, num_batches=args.batches, batch=args.batch)
            rows[name]["pull_s"].append(statistics.mean(took[1:] or took))
            print(
                f"seed {seed}  {name:5s}  a batch of {args.batch} takes {rows[name]['pull_s'][-1]:8.1f} s", flush=True
            )
    pushed: dict[str, list[dict[str, float]]] = {name: [] for name in rules}
    for seed in range(args.seeds):
        for name, rule in rules.items():
            found = push(machines(args.members, random.Random(1000 + seed)), rule, seed, horizon_s=args.horizon_s)
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
