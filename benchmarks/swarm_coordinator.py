"""How much one coordinator of a swarm bears: trajectories, tokens and members on one core of this machine.

    OMP_NUM_THREADS=1 python benchmarks/swarm_coordinator.py             # some minutes on a quiet machine
    OMP_NUM_THREADS=1 python benchmarks/swarm_coordinator.py --quick     # half a minute, numbers of no account

The real gateway, coordinator, engine and journal in this process; light members in another (``swarm_load.py``), one
WebSocket each, which answer every call at once. Nothing else is left out: what is counted is acknowledged, and so in
the journal, written as a run writes it.

*Coordinator*: callers that ask for responses and write them down, one transaction for each turn of the event loop, as
the driver does. *Run*: the driver itself with its ledger, scheduler and strategy (``bounded_async``), rewards at once.
Exits with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollover.clock import SystemClock
from rollover.engine.base import Chunk, FirstCall, GenerateRequest
from rollover.garbage import rare_collections
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.events import CheckpointSaved, SegmentEnded
from rollover.rollout.generation import sample_key
from rollover.rollout.journal import Journal
from rollover.rollout.scheduler import EachSample
from rollover.rollout.state import RolloutState
from rollover.sim.strategies import SimulatedRollout
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.gateway import Gateway
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.wire.messages import Head
from rollover.types import Prompt, SampleId, SamplingParams, Segment, Trajectory

LEAST_TRAJECTORIES_PER_S, LEAST_TOKENS_PER_S, MOST_GIB = 2000, 100_000, 1.0
PROMPT = tuple(range(100, 228))
CHECKPOINT_EVERY = 20
"""Steps: the default of runs."""


@dataclass(frozen=True)
class Case:
    """A load: so many members with so much room, and responses of a length, sent piece by piece."""

    name: str
    members: int
    room: int
    tokens: int
    piece: int = 16
    """Tokens of a message: ``stream_interval_tokens`` of the engines."""


CASES = (
    Case("short responses, few members", members=16, room=64, tokens=16),
    Case("long responses, few members", members=16, room=64, tokens=512),
    Case("short responses, 1,000 members", members=1000, room=4, tokens=16),
    Case("long responses, 1,000 members", members=1000, room=4, tokens=512),
)


def head(version: int) -> Head:
    return Head(version=version, manifest=sha256(f"{version}".encode()).hexdigest())


@asynccontextmanager
async def swarm(case: Case, folder: Path) -> AsyncIterator[SwarmEngine]:
    config = SwarmConfig(listen="127.0.0.1:0", max_running=case.members * case.room)
    identity = RunIdentity(run_id="load", run_epoch=1, vocab_size=32000, max_context_tokens=8192)
    coordinator = Coordinator(identity, head(0), ttl_s=config.lease_s, exact=False, checks=False)
    engine = SwarmEngine(config, coordinator, lambda version, source: head(version), SystemClock(), number_format="x")
    engine.gateway = Gateway(config, engine.shell, member_of=lambda header: (header or "")[7:], blobs=folder)
    await engine.start()
    try:
        yield engine
    finally:
        engine.placement.run_ended()
        await engine.close()


class Members:
    """The process of the members, and what it has counted last."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.counts: dict[str, Any] = {"num_members": 0, "num_over": 0}

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.counts = json.loads(line)


@asynccontextmanager
async def members(case: Case, engine: SwarmEngine) -> AsyncIterator[Members]:
    settings = {"members": case.members, "room": case.room, "tokens": case.tokens, "piece": case.piece}
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "swarm_load.py"),
        f"--port={engine.url.rpartition(':')[2]}",
        "--context=8192",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    found = Members(process)
    reading = asyncio.create_task(found.read())
    try:
        while engine.coordinator.max_running < case.members * case.room:
            if process.returncode is not None:
                raise RuntimeError("the members have died")
            await asyncio.sleep(0.05)
        yield found
    finally:
        reading.cancel()
        if process.returncode is None:
            process.kill()
        await process.wait()


class Callers:
    """Ask for responses and write them down, many events to a transaction."""

    def __init__(self, engine: SwarmEngine, journal: Journal, case: Case) -> None:
        self.engine, self.journal, self.case = engine, journal, case
        self.unwritten: list[SegmentEnded] = []
        self.params = SamplingParams(max_new_tokens=case.tokens)
        self.number = 0
        self.name = secrets.token_hex(4)

    async def call_for_ever(self) -> None:
        while True:
            self.number += 1
            sample_id = SampleId(self.number, 0)
            request = GenerateRequest(
                request_id=f"{self.name}.{sample_id}#{self.number}.",
                sample_key=sample_key(sample_id),
                prompt_key=f"p{self.number}.",
                prompt_ids=PROMPT,
                params=self.params,
                seed=self.number,
                is_journaled=True,
            )
            while self.engine.placement.reserve(request.sample_key, FirstCall(0, self.case.tokens)) is None:
                await asyncio.sleep(0.1)  # its member tells how fast it is with its first heartbeat
            chunks = [chunk async for chunk in self.engine.generate(request)]
            self.write(sample_id, chunks)

    def write(self, sample_id: SampleId, chunks: list[Chunk]) -> None:
        segment = Segment(
            policy_version=chunks[-1].policy_version,
            kv_version=chunks[-1].kv_version,
            token_ids=tuple(t for c in chunks for t in c.token_ids),
            rollout_logprobs=tuple(p for c in chunks for p in c.logprobs),
            finish_reason=chunks[-1].finish_reason,
            start_s=0.0,
            end_s=0.0,
            num_prefilled_tokens=0,
            engine=chunks[-1].engine,
        )
        if not self.unwritten:
            asyncio.get_running_loop().call_soon(self.flush)
        self.unwritten.append(SegmentEnded(0.0, sample_id, segment))

    def flush(self) -> None:
        written, self.unwritten = self.unwritten, []
        self.journal.append(written)
        self.journal.sync()
        self.engine.placement.journaled((sample_key(e.sample_id), len(e.segment.token_ids)) for e in written)


async def coordinator_alone(case: Case, engine: SwarmEngine, journal: Journal, seconds: float) -> None:
    callers = Callers(engine, journal, case)
    tasks = [asyncio.create_task(callers.call_for_ever()) for _ in range(case.members * case.room)]
    try:
        await asyncio.sleep(seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"load/{index}@0", token_ids=PROMPT, text="", source="load", columns={})


class Rewards:
    async def score(self, trajectory: Trajectory) -> float:
        return float(trajectory.sample_id.index % 2)


async def whole_run(case: Case, engine: SwarmEngine, journal: Journal, seconds: float) -> None:
    rollout = SimulatedRollout.of(
        "bounded_async",
        max_staleness=8,
        rollout_batch_size=max(8, case.members * case.room // 32),
        group_size=8,
        max_new_tokens=case.tokens,
    )
    strategy, clock = rollout.build_strategy(engine.capabilities), SystemClock()
    driver = RolloutDriver(
        engine=engine,
        strategy=strategy,
        source=EachSample(Prompts(), strategy.num_siblings),
        scorer=Rewards(),
        sampling=rollout.sampling(()),
        seed=0,
        clock=clock,
        state=RolloutState(),
        journal=journal,
        placement=engine.placement,
    )
    until_s = clock.now_s() + seconds
    while clock.now_s() < until_s:
        batch = await driver.next_batch()

        async def load(version: int = batch.step + 1) -> None:
            engine.shell.perform(engine.coordinator.published(head(version), clock.now_s()))

        await driver.update_weights(batch.step + 1, load)
        if (batch.step + 1) % CHECKPOINT_EVERY == 0:
            driver.record(CheckpointSaved(clock.now_s(), batch.step + 1))
    await driver.stop()


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def memory_gib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def new_journal() -> Iterator[Journal]:
    with tempfile.TemporaryDirectory(prefix="rollover-coordinator-") as folder:
        journal = Journal(Path(folder) / "journal.sqlite")
        try:
            yield journal
        finally:
            journal.close()


async def measure(case: Case, kind: str, seconds: float) -> dict[str, Any]:
    """Return what was acknowledged between the first and the last quarter of the time."""
    gc.collect()
    before_gib = memory_gib()
    work = {"coordinator": coordinator_alone, "run": whole_run}[kind]
    with new_journal() as journal:
        async with swarm(case, journal.path.parent) as engine, members(case, engine) as load:
            joined_gib = memory_gib()
            task = asyncio.create_task(work(case, engine, journal, seconds))
            await asyncio.sleep(seconds / 4)
            first, cpu_s = dict(load.counts), time.process_time()
            await asyncio.sleep(seconds / 2)
            last, cpu_s = dict(load.counts), time.process_time() - cpu_s
            await task
            counters, peak_gib = engine.coordinator.counters, memory_gib()
    wall_s = last["time_s"] - first["time_s"]
    over = last["num_over"] - first["num_over"]
    if not over:
        raise RuntimeError(f"nothing was acknowledged in {wall_s:.0f} s: {last}")
    frames = {way: last[f"num_frames_{way}"] - first[f"num_frames_{way}"] for way in ("up", "down")}
    tokens = over * case.tokens
    assert not counters["workers_sent_away"], counters
    return {
        "kind": kind,
        **vars(case),
        "trajectories_per_s": over / wall_s,
        "tokens_per_s": tokens / wall_s,
        "frames_per_s": sum(frames.values()) / wall_s,
        "cpu_s_per_s": cpu_s / (seconds / 2),
        "cpu_us_per_trajectory": 1e6 * cpu_s / over,
        "cpu_us_per_token": 1e6 * cpu_s / tokens,
        "load_cpu_s_per_s": (last["cpu_s"] - first["cpu_s"]) / wall_s,
        "bytes_up_per_token": (last["bytes_up"] - first["bytes_up"]) / tokens,
        "gib_before": before_gib,
        "gib_joined": joined_gib,
        "gib_at_work": peak_gib,
        "out_of_order": counters["out_of_order"],
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['kind']:11s}  {row['name']:31s} {row['trajectories_per_s']:6.0f} trajectories/s"
        f" {row['tokens_per_s']:8.0f} tokens/s {row['frames_per_s']:6.0f} frames/s"
        f" {row['cpu_us_per_trajectory']:6.0f} us each, {row['cpu_us_per_token']:6.2f} us/token"
        f"  CPU {row['cpu_s_per_s']:.2f} (members {row['load_cpu_s_per_s']:.2f})"
        f"  {row['gib_joined']:.2f} then {row['gib_at_work']:.2f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement; the middle half counts")
    parser.add_argument("--quick", action="store_true", help="8 s each")
    parser.add_argument("--only", default="", help="measure cases whose kind and name contain this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for kind in ("coordinator", "run"):
        for case in CASES:
            if args.only not in f"{kind}: {case.name}":
                continue
            with rare_collections(20_000):  # as in a run
                row = asyncio.run(measure(case, kind, 8.0 if args.quick else args.seconds))
            rows.append(row)
            show(row)
    missed = [
        f"{row['kind']}, {row['name']}"
        for row in rows
        if (row["trajectories_per_s"] < LEAST_TRAJECTORIES_PER_S and row["tokens_per_s"] < LEAST_TOKENS_PER_S)
        or row["gib_at_work"] > MOST_GIB
    ]
    print("every limit is kept" if not missed else f"missed: {'; '.join(missed)}")
    if args.out is not None:
        command = "python benchmarks/swarm_coordinator.py"
        result = {"date": str(date.today()), "command": command, "machine": machine(), "rows": rows, "missed": missed}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
