"""Mixed fleets against fleets of one type: throughput for the same money, and cost at the same throughput.

    python benchmarks/heterogeneous.py                      # 1.5B, 7B and 14B on three mixes
    python benchmarks/heterogeneous.py --sensitivity        # the same for 7B with other efficiencies and prices

The question of AReaL-Hex (arXiv 2511.00796), which published up to 1.50x and up to 1.46x on hardware and prices that it
does not list. Here every figure is the catalogue's, and nothing is fitted to those numbers. Both sides are planned by
the same programme: same lengths, tail, staleness bound, and both are simulated where ``--simulate`` is given.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollover.devices import workload
from rollover.devices.model_shape import parse
from rollover.devices.records import Device, Efficiency, ModelShape, WorkloadSpec
from rollover.planner import fleet
from rollover.planner.job import check, one_type
from rollover.planner.plan import Plan
from rollover.planner.problem import PlanSpec, stock_problem
from rollover.planner.records import Fleet
from rollover.planner.search import make_plan, solve_finely
from rollover.settings import toml
from rollover.workload.source import read_lengths

RESULTS = Path(__file__).parent / "results" / "heterogeneous"
WORKLOAD, NUM_GROUPS, GROUP_SIZE, MAX_STALENESS = "math-16k", 512, 16, 4
PUBLISHED = {"throughput": 1.50, "cost": 1.46}
"""Upper ends of arXiv 2511.00796, abstract."""
FLEETS = ("h800-h20", "a100-l40s", "h100-l4")

# DeepSeek-R1-Distill-Qwen: the shapes of Qwen2.5, as their config.json files have them.
_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": False}
MODELS = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A mix against the best fleet of one type."""

    fleet: str
    model: str
    variation: str
    tokens_per_s: float
    cost_per_hour: float
    devices: dict[str, int]
    alone: dict[str, float]
    """Tokens/s of each type alone for the same money."""
    alone_cost: dict[str, float]
    """Cost per hour of each type alone at the mix's throughput."""
    simulated: float | None
    """Simulated over predicted rate of the mix."""
    solve_s: float

    @property
    def throughput_ratio(self) -> float | None:
        return self.tokens_per_s / max(self.alone.values()) if self.alone else None

    @property
    def cost_ratio(self) -> float | None:
        return min(self.alone_cost.values()) / self.cost_per_hour if self.alone_cost else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sensitivity", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--fleets", nargs="+", default=FLEETS, choices=FLEETS)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = workload.specify(WORKLOAD, read_lengths(WORKLOAD), num_groups=NUM_GROUPS, group_size=GROUP_SIZE)
    models = ["7B"] if options.sensitivity else options.models
    found: list[Compared] = []
    out = options.out or RESULTS / ("sensitivity.json" if options.sensitivity else "claim.json")
    for name in options.fleets:
        base = _packaged(name)
        for variation, changed in _variations(base) if options.sensitivity else [("as is", base)]:
            for size in models:
                model = parse(_QWEN | MODELS[size], name=size)
                result = _compare(name, variation, changed, model, spec, simulate=options.simulate)
                found.append(result)
                print(_line(result), flush=True)
                _write(out, found)


def _write(out: Path, found: list[Compared]) -> None:
    """After every row: a run that is stopped has recorded what it found."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_record(found), indent=1) + "\n", encoding="utf-8")


def _packaged(name: str) -> Fleet:
    file = Path(fleet.__file__).parent / "fleets" / f"{name}.toml"
    return fleet.parse(toml.parse(file.read_text(encoding="utf-8"), file.name))


def _variations(base: Fleet) -> Iterator[tuple[str, Fleet]]:
    """One figure at a time, for the type that rolls out against the one that trains."""
    yield "as is", base
    cheap = min(base.devices, key=lambda d: d.price_per_hour or 0.0).name
    for factor in (0.7, 1.3):
        yield f"price of {cheap} x {factor}", _with(base, cheap, price=factor)
    for name in ("bandwidth", "train", "prefill"):
        for factor in (0.75, 1.25):
            yield f"efficiency {name} x {factor}", _with(base, None, efficiency={name: factor})
    yield f"efficiency bandwidth of {cheap} x 0.75", _with(base, cheap, efficiency={"bandwidth": 0.75})


def _with(base: Fleet, only: str | None, *, price: float = 1.0, efficiency: dict[str, float] | None = None) -> Fleet:
    def device(found: Device) -> Device:
        if only is not None and found.name != only:
            return found
        reached: Efficiency = found.efficiency
        changes = {key: min(1.0, getattr(reached, key) * factor) for key, factor in (efficiency or {}).items()}
        assert found.price_per_hour is not None
        return replace(found, price_per_hour=found.price_per_hour * price, efficiency=replace(reached, **changes))

    return replace(base, nodes=tuple(replace(node, device=device(node.device)) for node in base.nodes))


def _compare(
    name: str, variation: str, mix: Fleet, model: ModelShape, spec: WorkloadSpec, *, simulate: bool
) -> Compared:
    began = time.perf_counter()
    made = make_plan(mix, PlanSpec(model=model, workload=spec, max_staleness=MAX_STALENESS))
    per_step = spec.batch_size * spec.response_tokens
    money = made.solution.cost_per_hour
    assert money is not None
    alone, alone_cost = {}, {}
    for device in mix.devices:
        assert device.price_per_hour is not None
        found = one_type(made, device, int(money / device.price_per_hour))
        if found is not None:
            alone[device.name] = found.solution.steps_per_s * per_step
        cost = _cheapest(made, device)
        if cost is not None:
            alone_cost[device.name] = cost
    simulated = None
    if simulate:
        measured = check(made, read_lengths(WORKLOAD).workload(0), warmup=8, steps=12)
        simulated = measured.steps_per_s / made.solution.steps_per_s
    return Compared(
        fleet=name,
        model=model.name,
        variation=variation,
        tokens_per_s=made.solution.steps_per_s * per_step,
        cost_per_hour=money,
        devices=made.used,
        alone=alone,
        alone_cost=alone_cost,
        simulated=simulated,
        solve_s=time.perf_counter() - began,
    )


def _cheapest(made: Plan, device: Device) -> float | None:
    """Cost per hour of one type alone at the plan's rate, with at most three times the money."""
    assert device.price_per_hour is not None
    money = made.solution.cost_per_hour
    assert money is not None
    count = int(3 * money / device.price_per_hour)
    built = stock_problem({device: count}, made.model, made.workload, max_staleness=MAX_STALENESS)
    aimed = replace(built, tail=made.problem.tail, target_steps_per_s=made.solution.steps_per_s)
    found = solve_finely(aimed, [device], made.model)
    return None if found is None else found[1].cost_per_hour


def _line(result: Compared) -> str:
    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    simulated = "" if result.simulated is None else f", simulated {result.simulated:.0%} of the formula"
    return (
        f"{result.fleet:10} {result.model:5} {result.variation:32}"
        f" throughput {ratio(result.throughput_ratio)} (published up to {PUBLISHED['throughput']}x),"
        f" cost {ratio(result.cost_ratio)} (up to {PUBLISHED['cost']}x){simulated}; {result.solve_s:.0f} s"
    )


def _record(found: list[Compared]) -> dict[str, Any]:
    rows = [
        {key: getattr(r, key) for key in Compared.__slots__}
        | {"throughput_ratio": r.throughput_ratio, "cost_ratio": r.cost_ratio}
        for r in found
    ]
    return {
        "workload": WORKLOAD,
        "num_groups": NUM_GROUPS,
        "group_size": GROUP_SIZE,
        "max_staleness": MAX_STALENESS,
        "published": PUBLISHED,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "rows": rows,
    }


if __name__ == "__main__":
    main()
