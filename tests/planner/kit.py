"""Small planning problems: drawn ones, and shapes of models, devices and fleets with round numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog

from rollover.devices.costs.records import ReplicaKind, TrainingPart, TrainingPlan
from rollover.devices.records import Device, Efficiency, LengthBucket, Link, ModelShape, WorkloadSpec
from rollover.devices.workload import length_buckets, specify
from rollover.planner import fleet as fleets
from rollover.planner.records import Fleet, Problem, Supply
from rollover.settings import toml
from rollover.workload.source import read_lengths
from rollover.workload.trace import Trace, TracePrompt
from tests.planner.verification import devices_used

IDEAL = Efficiency(
    train=1.0, prefill=1.0, decode=1.0, bandwidth=1.0, link=1.0, memory=1.0, step_s=0.0, source="round numbers"
)
FAST = Link(bytes_per_s=400e9, latency_s=1e-5)
SLOW = Link(bytes_per_s=50e9, latency_s=2e-5)


def device(name: str = "a", **changes: Any) -> Device:
    base = Device(
        name=name,
        title=name,
        flops=400e12,
        hbm_bytes_per_s=2e12,
        hbm_bytes=80e9,
        node_size=8,
        link=FAST,
        network=SLOW,
        price_per_hour=2.0,
        efficiency=IDEAL,
    )
    return replace(base, **changes)


MODEL = ModelShape(
    name="m",
    num_layers=4,
    hidden=1024,
    num_heads=8,
    query_width=1024,
    kv_width=512,
    kv_heads=4,
    ffn_width=4096,
    vocab_size=32000,
    parameters=1_000_000_000,
    active_parameters=1_000_000_000,
    embedding_parameters=100_000_000,
)


def workload(**changes: Any) -> WorkloadSpec:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 500).astype(int) + 1
    base = WorkloadSpec(
        name="w",
        num_groups=16,
        group_size=4,
        prompt_tokens=100,
        buckets=length_buckets(lengths, group_size=4, num_groups=16, num_buckets=4),
    )
    return replace(base, **changes)


PROMPTS = (TracePrompt(prompt_id="a", prompt_tokens=3, lengths=(900,) * 8),)
EPISODES = Trace(name="runs/r", cap_tokens=900, prompts=PROMPTS, held_s=30.0)

ONE_LENGTH = LengthBucket(
    share=1.0, tokens=200, max_tokens=400, group_share=1.0, group_tokens=300, batch_share=1.0, batch_tokens=380
)


def training_part(**changes: Any) -> TrainingPart:
    base = TrainingPart(device="a", dp=1, tp=1, pp=1, sharded=False, recompute=False, share=1.0)
    return replace(base, **changes)


def replica(latency_s: float = 1.0, **changes: Any) -> ReplicaKind:
    base = ReplicaKind(
        device="a",
        tp=1,
        pp=1,
        batch_cap=8,
        rate=1.0,
        latency_s=latency_s,
        group_latency_s=latency_s * 1.2,
        batch_latency_s=latency_s * 1.5,
        max_latency_s=latency_s * 2,
        kv_bytes=100.0,
        kv_byte_s=100.0,
        update_s=0.0,
    )
    return replace(base, **changes)


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN_1B = QWEN_7B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}


def fleet(gbit_s: float, *nodes: tuple[str, int, int], links: Sequence[tuple[str, str, float]] = ()) -> Fleet:
    """Nodes, given by their device, its number and theirs, on a network; the first are called ``n0-0``, ``n0-1``."""
    text = f"network = {{ gbit_s = {gbit_s} }}\n"
    for place, (name, num_devices, count) in enumerate(nodes):
        text += f'[[nodes]]\nname = "n{place}"\ndevice = "{name}"\nnum_devices = {num_devices}\ncount = {count}\n'
    for one, other, width in links:
        text += f'[[links]]\nbetween = ["{one}", "{other}"]\ngbit_s = {width}\n'
    return fleets.parse(toml.parse(text, "fleet.toml"))


def preset(name: str, *, num_groups: int, group_size: int = 8) -> WorkloadSpec:
    return specify(name, read_lengths(name), num_groups=num_groups, group_size=group_size)


# --- Drawn problems ---------------------------------------------------------------------------------------------------

SPEEDS = st.floats(0.05, 5.0)
LATENCIES = st.floats(0.5, 40.0)
BUCKET = LengthBucket(
    share=1.0, tokens=10, max_tokens=10, group_share=1.0, group_tokens=10, batch_share=1.0, batch_tokens=10
)


@st.composite
def problems(draw: st.DrawFn, *, updates: bool = False, most: int = 3, priced: bool = True) -> Problem:
    """Up to two types of ``most`` devices, each with two kinds and two training plans."""
    spec = WorkloadSpec(
        name="drawn",
        num_groups=2,
        group_size=2,
        prompt_tokens=1,
        buckets=(BUCKET,),
        held_s=draw(st.sampled_from([0.0, 3.0])),
    )
    names = ["a", "b"][: draw(st.integers(1, 2))]
    supplies = tuple(
        Supply(device=n, count=draw(st.integers(1, most)), price_per_hour=draw(st.floats(0.5, 4.0)) if priced else None)
        for n in names
    )
    kinds = tuple(_kind(draw, n, spec, updates) for n in names for _ in range(2))
    plans = tuple(_plan(draw, n) for n in names for _ in range(2))
    return Problem(
        supplies=supplies,
        replica_kinds=kinds,
        plans=plans,
        workload=spec,
        max_staleness=draw(st.integers(0, 3)),
        budget_per_hour=draw(st.one_of(st.none(), st.floats(2.0, 20.0))) if priced else None,
    )


def _kind(draw: st.DrawFn, name: str, spec: WorkloadSpec, updates: bool) -> ReplicaKind:
    latency, rate = draw(LATENCIES) + spec.held_s, draw(SPEEDS)
    # Caches that are held only while decoding have room for what the replica decodes.
    held = draw(st.floats(1.0, 300.0)) if spec.held_s else 100 * draw(st.floats(0.1, 1.0)) / rate
    return replica(
        latency,
        device=name,
        tp=draw(st.integers(1, 2)),
        rate=rate,
        kv_byte_s=held,
        update_s=draw(st.floats(0.0, 3.0)) if updates else 0.0,
    )


def _plan(draw: st.DrawFn, name: str) -> TrainingPlan:
    parts = (training_part(device=name, dp=draw(st.integers(1, 3))),)
    return TrainingPlan(parts=parts, step_s=draw(st.floats(1.0, 30.0)), sync_s=draw(st.floats(0.0, 2.0)))


# --- The oracle: every choice of whole numbers, and a linear programme for the rest -----------------------------------


def best_by_enumeration(problem: Problem) -> float:
    """The greatest rate, steps/s; 0 where there is none. One replica more never costs rate, so only the choices to
    which none can be added are tried."""
    every = list(choices(problem))
    known = {(y, problem.plans.index(plan)) for y, plan in every}

    def is_full(y: tuple[int, ...], plan: TrainingPlan) -> bool:
        more = ((*y[:i], y[i] + 1, *y[i + 1 :]) for i in range(len(y)))
        return all((n, problem.plans.index(plan)) not in known for n in more)

    return max((rate_of(problem, *choice) for choice in every if is_full(*choice)), default=0.0)


def choices(problem: Problem) -> Iterator[tuple[tuple[int, ...], TrainingPlan]]:
    """Numbers of replicas and training plans that stock and budget allow."""
    stock = {s.device: s.count for s in problem.supplies}
    ranges = [range(stock[c.device] // c.num_devices + 1) for c in problem.replica_kinds]
    budget = math.inf if problem.budget_per_hour is None else problem.budget_per_hour
    for y, plan in itertools.product(itertools.product(*ranges), problem.plans):
        used = devices_used(problem, y, plan)
        if all(used[name] <= count for name, count in stock.items()) and cost_of(problem, y, plan) <= budget:
            yield y, plan


def cost_of(problem: Problem, y: Sequence[int], plan: TrainingPlan) -> float:
    used = devices_used(problem, y, plan)
    return sum(used[s.device] * (s.price_per_hour or 0.0) for s in problem.supplies)


def rate_of(problem: Problem, y: tuple[int, ...], plan: TrainingPlan) -> float:
    """The rate these replicas and this trainer reach: by bisection where updates cost time or the tail counts."""
    if problem.tail == "none" and not any(c.update_s for c in problem.replica_kinds):
        return rate_at(problem, y, plan, 0.0)
    low, high = 0.0, 1 / plan.cycle_s
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rate_at(problem, y, plan, middle) >= middle else (low, middle)
    return low


def rate_at(problem: Problem, y: tuple[int, ...], plan: TrainingPlan, guess: float) -> float:
    """The greatest rate with updates charged at ``guess``. Variables: x in samples/s (kinds), the rate."""
    spec, kinds = problem.workload, problem.replica_kinds
    size = len(kinds) + 1
    rows, limits = [], []

    def add(x: np.ndarray, rate: float, limit: float) -> None:
        rows.append(np.r_[x, rate])
        limits.append(limit)

    away = spec.reward_s + spec.held_s
    rho = np.array([1 - guess * c.update_s for c in kinds])
    unusable = rho <= 1e-3
    rho = np.where(unusable, 1.0, rho)
    add(-np.ones(len(kinds)), spec.batch_size, 0)
    staleness = np.zeros(len(kinds))
    for c, kind in enumerate(kinds):
        x, held = np.zeros(len(kinds)), np.zeros(len(kinds))
        x[c] = 1 / (kind.rate * rho[c])
        running = kind.latency_s - away
        held[c] = kind.kv_byte_s * (running / rho[c] + spec.held_s) / (running + spec.held_s)
        latency = kind.group_latency_s if problem.max_staleness else kind.batch_latency_s
        staleness[c] = ((latency - away) / rho[c] + away) / spec.group_size
        add(x, 0, y[c])
        add(held, 0, kind.kv_bytes * y[c])
    add(staleness, spec.num_groups * plan.cycle_s, spec.num_groups * (problem.max_staleness + 1))
    unusable |= _late(problem, plan, guess, rho)
    bounds = [(0, 0 if none else None) for none in unusable] + [(0, 1 / plan.cycle_s)]
    found = linprog(np.r_[np.zeros(size - 1), -1], A_ub=np.array(rows), b_ub=limits, bounds=bounds)
    return -found.fun if found.status == 0 else 0.0


def _late(problem: Problem, plan: TrainingPlan, rate: float, rho: np.ndarray) -> np.ndarray:
    """Which kinds would end the longest response too late at ``rate``."""
    if problem.tail == "none":
        return np.zeros(rho.shape, dtype=bool)
    away = problem.workload.reward_s + problem.workload.held_s
    longest = (np.array([c.max_latency_s for c in problem.replica_kinds]) - away) / rho + away
    return rate * (longest + plan.cycle_s) > problem.max_staleness + (problem.tail == "soft")
