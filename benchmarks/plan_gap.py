"""How close the plans of small fleets come to the best plan, which enumeration finds.

    python benchmarks/plan_gap.py --out benchmarks/results/plan-gap.json
    python benchmarks/plan_gap.py --before benchmarks/results/plan-gap.json --out benchmarks/results/plan-gap-now.json

A fleet has up to three nodes of up to three types behind links of 0.1 to 400 Gbit/s. Nodes have 1, 2 or 4 devices, from
the 41st fleet on 1 to 8. Enumerated are the roles of all devices, all shapes of trainers over any groups of equal
devices, all sets of replicas that fill what a node has left, and all batch caps in steps of 9%, each at the links that
it uses. Times come from the planner's cost functions; the search does not.
Prints, for each fleet, the rate of the plan over the best rate. ``--before`` adds the ratios of an earlier record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from rollover.devices import workload
from rollover.devices.costs.records import TrainingPart, TrainingPlan
from rollover.devices.costs.rollout import replica_costs, replica_kind
from rollover.devices.costs.training import trainer_costs
from rollover.devices.model_shape import parse
from rollover.devices.records import Device, Link
from rollover.errors import PlanError
from rollover.planner import fleet as fleets
from rollover.planner.choices import MAX_BATCH
from rollover.planner.placement import Pipeline, Placement, Stage, _training, weight_ways
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet
from rollover.planner.search import make_plan
from rollover.planner.topology import Topology
from rollover.settings import toml
from rollover.workload.source import read_lengths

BASE = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MODELS = {"0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2), "3B": (2048, 11008, 36, 16, 2)}
TYPES = ("h100-sxm", "a100-80-sxm", "l40s", "l4", "h200-sxm")
CAPS = sorted({round(2 ** (i / 8)) for i in range(81)})
WAYS = list(itertools.product((1, 2, 4, 8), (1, 2, 4)))
"""Tensor and pipeline parallel sizes."""
EVEN = 40
"""Number of fleets whose nodes have 1, 2 or 4 devices."""
EXACT = 1e-6

Trained = tuple[TrainingPart, tuple[Pipeline, ...]]
Curves = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Over batch caps: samples/s, seconds of a weight update, seconds of the longest response."""


def fleet_of(nodes: list[tuple[str, int]], gbit_s: float) -> Fleet:
    """Return a fleet of nodes (device, number of devices) behind equal links."""
    text = f"network = {{ gbit_s = {gbit_s} }}\n"
    for i, (name, size) in enumerate(nodes):
        text += f'[[nodes]]\nname = "n{i}"\ndevice = "{name}"\nnum_devices = {size}\nprice_per_hour = 1.0\n'
    return fleets.parse(toml.parse(text, "fleet.toml"))


def spec_of(model: str, groups: int, max_staleness: int) -> PlanSpec:
    shape = parse({**BASE, **dict(zip(KEYS, MODELS[model], strict=True))}, name=model)
    return PlanSpec(
        model=shape,
        workload=workload.specify("light-8k", read_lengths("light-8k"), num_groups=groups, group_size=8),
        max_staleness=max_staleness,
    )


def drawn(seed: int) -> tuple[Fleet, PlanSpec]:
    """Draw a fleet and what is planned for it; the first one is a small model on two types behind a slow link."""
    if seed == 0:
        return fleet_of([("h100-sxm", 2), ("h200-sxm", 2)], 1), spec_of("0.5B", 32, 4)
    rng = np.random.default_rng(seed)
    if seed >= EVEN:
        return of_any_sizes(rng)
    types = [str(name) for name in rng.choice(TYPES, size=rng.integers(1, 4), replace=False)]
    nodes = [(name, int(rng.choice([1, 2, 2] if len(types) == 3 else [1, 2, 4]))) for name in types]
    if len(nodes) < 3 and max(size for _, size in nodes) < 4:
        nodes = [nodes[0], *nodes] if len(nodes) == 2 else nodes * int(rng.integers(2, 4))
    elif len(nodes) == 1:
        nodes *= 2
    model, groups, bound = rng.choice(list(MODELS)), rng.choice([8, 32]), rng.choice([1, 2, 4])
    return fleet_of(nodes, float(rng.choice([0.1, 1, 10, 100, 400]))), spec_of(str(model), int(groups), int(bound))


def of_any_sizes(rng: np.random.Generator) -> tuple[Fleet, PlanSpec]:
    """Draw a fleet of one to three nodes with up to 8 devices each, of which three nodes have up to 9 in all."""
    types = [str(name) for name in rng.choice(TYPES, size=rng.integers(1, 3), replace=False)]
    count = int(rng.integers(len(types), 4))
    most = {1: 8, 2: 8, 3: 3}[count]
    nodes = [(types[i % len(types)], int(rng.integers(1, most + 1))) for i in range(count)]
    model, groups, bound = rng.choice(list(MODELS)), rng.choice([8, 32]), rng.choice([1, 2, 4])
    return fleet_of(nodes, float(rng.choice([0.1, 1, 10, 100, 400]))), spec_of(str(model), int(groups), int(bound))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to divide items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def same(one: Device, other: Device) -> bool:
    """Return whether two devices differ at most in the size of their nodes."""
    return replace(one, name="", node_size=1) == replace(other, name="", node_size=1)


class Best:
    """The best plan of a fleet by enumeration."""

    def __init__(self, fleet: Fleet, spec: PlanSpec) -> None:
        self.fleet, self.spec = fleet, spec
        self.topology = Topology.of(fleet)
        self.curves = cache(self._curves)
        self.of_type = cache(lambda device, slots: list(self._of_type(device, slots)))

    def rate(self) -> float:
        """Return the steps/s of the best plan."""
        best = 0.0
        for cycle_s, rollout in sorted(self._trained(), key=lambda found: found[0]):
            if 1 / cycle_s <= best * (1 + EXACT):
                break
            nodes = [
                (count, [(tp * pp, self.curves(self.fleet.nodes[node].device, tp, pp, link)) for tp, pp in ways])
                for node, count, link in rollout
                if (ways := self._shapes(node, count))
            ]
            best = max(best, self._reached(cycle_s, nodes, best))
        return best

    def _trained(self) -> Iterator[tuple[float, tuple[tuple[int, int, Link | None], ...]]]:
        """Yield the cycle time of every trainer in every place and, for each node that rolls out beside it, (node,
        devices, link over which it gets weights)."""
        sizes = [node.num_devices for node in self.fleet.nodes]
        roles = [[(t, r) for t in range(n + 1) for r in {0, n - t}] for n in sizes]
        for taken in itertools.product(*roles):
            train, rest = [t for t, _ in taken], [r for _, r in taken]
            if not any(train) or not any(rest):
                continue
            for parts in (parts for groups in self._groups(train) for parts in itertools.product(*groups)):
                plan = TrainingPlan(parts=tuple(p for p, _ in parts), step_s=0.0, sync_s=0.0)
                pipelines = tuple(replace(p, member=i) for i, (_, found) in enumerate(parts) for p in found)
                placed = Placement(training=pipelines, replicas=())
                ways = weight_ways(self.topology, plan, placed, [i for i, r in enumerate(rest) if r])
                costed, _ = _training(self.topology, self.spec.model, self.spec.workload, plan, placed, ways)
                yield costed.cycle_s, tuple((i, rest[i], way) for i, way in ways.items())

    def _groups(self, train: list[int]) -> Iterator[list[list[Trained]]]:
        """Yield, for each way to divide the nodes that train into groups of equal devices, the shapes of each group
        that fit and their pipelines."""
        nodes = self.fleet.nodes
        for groups in partitions([i for i, count in enumerate(train) if count]):
            devices = [max((nodes[i].device for i in group), key=lambda device: device.node_size) for group in groups]
            if all(same(nodes[i].device, device) for group, device in zip(groups, devices, strict=True) for i in group):
                slots = [tuple((i, d) for i in group for d in range(train[i])) for group in groups]
                yield [self.of_type(device, its) for device, its in zip(devices, slots, strict=True)]

    def _of_type(self, device: Device, slots: tuple[tuple[int, int], ...]) -> Iterator[Trained]:
        model, spec, total = self.spec.model, self.spec.workload, len(slots)
        for tp, pp in WAYS:
            blocks = [slots[i : i + tp] for i in range(0, total, tp)]
            if total % (tp * pp) or model.num_heads % tp or any(len({node for node, _ in b}) > 1 for b in blocks):
                continue
            stages = [Stage(node=b[0][0], devices=tuple(d for _, d in b)) for b in blocks]
            pipelines = tuple(Pipeline(member=0, stages=tuple(stages[i : i + pp])) for i in range(0, len(stages), pp))
            shape = TrainingPart(
                device=device.name, dp=len(pipelines), tp=tp, pp=pp, sharded=False, recompute=False, share=1.0
            )
            for sharded, recompute in itertools.product((False, True), (False, True)):
                part = replace(shape, sharded=sharded, recompute=recompute)
                if (part.dp > 1 or not sharded) and trainer_costs(model, spec, device, part).fits():
                    yield part, pipelines

    def _shapes(self, node: int, count: int) -> list[tuple[int, int]]:
        """Return (tp, pp) of the replicas that ``count`` devices of a node hold."""
        device, spec = self.fleet.nodes[node].device, self.spec
        return [
            (tp, pp)
            for tp, pp in WAYS
            if tp * pp <= count
            and not spec.model.num_heads % tp
            and replica_costs(spec.model, spec.workload, device, tp, pp).fits()
        ]

    def _curves(self, device: Device, tp: int, pp: int, link: Link | None) -> Curves:
        engine = replica_costs(self.spec.model, self.spec.workload, device, tp, pp)
        most = max(engine.batch(bucket, MAX_BATCH) for bucket in self.spec.workload.buckets)
        kinds = [replica_kind(engine, cap, link or device.link) for cap in {*CAPS, most} if cap <= most]
        rates, updates_s, longest_s = np.array([(k.rate, k.update_s, k.max_latency_s) for k in kinds]).T
        return rates, updates_s, longest_s

    def _reached(self, cycle_s: float, nodes: list[tuple[int, list[tuple[int, Curves]]]], known: float) -> float:
        """Return the steps/s of a trainer and the best replicas beside it on so many devices of each node; 0 if they do
        not exceed ``known``. That the longest response keeps the bound implies it for the mean."""
        bound, size = self.spec.max_staleness + 1, self.spec.workload.batch_size

        def carries(rate: float) -> bool:
            made = 0.0
            for count, shapes in nodes:
                each: dict[int, float] = {}
                for devices, (rates, updates_s, longest_s) in shapes:
                    left = 1 - rate * updates_s
                    fits = (left > 1e-3) & (rate * (longest_s / np.maximum(left, 1e-3) + cycle_s) <= bound)
                    each[devices] = max(each.get(devices, 0.0), float(np.where(fits, rates * left, 0.0).max()))
                most = [0.0]
                for n in range(1, count + 1):
                    most.append(max([most[-1], *(most[n - d] + one for d, one in each.items() if d <= n)]))
                made += most[-1]
            return made >= size * rate

        low, high = known, 1 / cycle_s
        if not carries(low * (1 + EXACT) or 1e-9):
            return 0.0
        while high > low * (1 + EXACT / 10):
            middle = (low + high) / 2
            low, high = (middle, high) if carries(middle) else (low, middle)
        return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here")
    parser.add_argument("--fleets", type=int, default=80, help="fleets to draw; some cannot hold their model")
    parser.add_argument("--before", type=Path, help="a record of another planner on the same fleets")
    options = parser.parse_args()
    before = {row["seed"]: row for row in json.loads(options.before.read_text())["fleets"]} if options.before else {}
    rows: list[dict[str, object]] = []
    for seed in range(options.fleets):
        fleet, spec = drawn(seed)
        began = time.process_time()
        try:
            planned = make_plan(fleet, spec).solution.steps_per_s
        except PlanError:  # the model fits nowhere
            continue
        plan_s = time.process_time() - began
        best = Best(fleet, spec).rate()
        nodes = " + ".join(f"{n.num_devices} {n.device.name.partition('@')[0]}" for n in fleet.nodes)
        width = fleet.nodes[0].device.network.bytes_per_s * 8 / 1e9
        row = {"seed": seed, "model": spec.model.name, "nodes": nodes, "gbit_s": width, "best": best}
        row |= {"ratio": round(planned / best, 5), "plan_s": round(plan_s, 2)}
        row |= {f"{key}_before": before[seed][key] for key in ("ratio", "plan_s") if seed in before}
        rows.append(row)
        print(row, flush=True)
    summary = {}
    for key in ("ratio", "ratio_before", "plan_s", "plan_s_before"):
        if found := [float(str(row[key])) for row in rows if key in row]:
            low, middle = min(found), statistics.median(found)
            summary[key] = {"least": low, "median": middle, "mean": round(statistics.fmean(found), 5), "of": len(found)}
            print(key, summary[key])
    if options.out:
        options.out.write_text(json.dumps({"summary": summary, "fleets": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
