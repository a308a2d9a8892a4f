"""``rollover plan``: from a fleet file to a table, a page and a record.

A plan is tested by a simulation of the whole loop: the planner works with means, and there lengths are drawn, groups
wait for their longest response, the staleness bound holds back new groups, and calls go to the replica with the least
load. The alternatives to it are solved as it was: with the same lengths, tail and staleness bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from rich.console import Console

from rollover.devices import model_shape as models
from rollover.devices import workload
from rollover.devices.costs.links import weight_update_s
from rollover.devices.costs.rollout import engine_model
from rollover.devices.records import Device, WorkloadSpec
from rollover.errors import ConfigError, PlanError, nearest
from rollover.planner import fleet as fleets
from rollover.planner.placement import engine_on_links, weight_ways, weights_link
from rollover.planner.plan import Alternative, Plan, step_tokens
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Node, Server, Tail
from rollover.planner.report import render_page, show
from rollover.planner.search import alone, make_plan
from rollover.planner.topology import Topology
from rollover.report.page import write_page
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.settings import toml
from rollover.sim.result import Window
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario
from rollover.workload.base import Workload
from rollover.workload.source import Lengths, read_lengths
from rollover.workload.trace import Trace

DEFAULT_WORKLOAD = "math-16k"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Options of ``rollover plan``; ``None`` means not given."""

    fleet: str
    """A fleet file, or the name of a packaged example."""
    model: str
    workload: str = DEFAULT_WORKLOAD
    max_staleness: int = 4
    aim: Literal["throughput", "cost"] = "throughput"
    target: float | None = None
    """Required rate, in trained tokens per second."""
    budget: float | None = None
    """Maximum cost per hour, in the fleet's currency."""
    num_groups: int = 128
    group_size: int = 8
    cap_tokens: int | None = None
    reference_model: bool = False
    keeps_kv: bool = False
    reward_s: float = 0.0
    held_s: float | None = None
    """Seconds that tools take per sample; if not given, those of the run that is the workload."""
    tail: Tail = "soft"
    quick: bool = False
    for_launch: bool = False
    """Plan only what ``rollover launch`` can run."""
    page: Path | None = None
    json: Path | None = None
    server: Server | None = None
    """Kind of servers with ``for_launch``; vLLM if not given."""

    def __post_init__(self) -> None:
        if (self.aim == "cost") != (self.target is not None):
            raise PlanError("--aim cost needs --target, and --target needs --aim cost")
        if self.server is not None and not self.for_launch:
            raise PlanError("--server has no effect without --for-launch")


def plan(request: PlanRequest) -> None:
    """Plan, and write the requested files. Raises ``RolloverError`` if the fleet, the model, the workload or the aim is
    invalid; the message says how."""
    console = Console(highlight=False)
    fleet = _with_budget(_read_fleet(request.fleet), request)
    model = models.read_shape(request.model)
    lengths = read_lengths(request.workload, cap_tokens=request.cap_tokens)
    recorded_s = lengths.held_s if isinstance(lengths, Trace) else 0.0
    demand = workload.specify(
        request.workload,
        lengths,
        num_groups=request.num_groups,
        group_size=request.group_size,
        reference_model=request.reference_model,
        keeps_kv=request.keeps_kv,
        reward_s=request.reward_s,
        held_s=recorded_s if request.held_s is None else request.held_s,
    )
    spec = PlanSpec(
        model=model,
        workload=demand,
        max_staleness=request.max_staleness,
        target_steps_per_s=None if request.target is None else request.target / step_tokens(demand),
        tail=request.tail,
        launchable=(request.server or "vllm") if request.for_launch else None,
    )
    with console.status("planning"):
        made = replace(make_plan(fleet, spec), notes=tuple(_left_open(lengths, demand)))
    if not request.quick:
        with console.status("simulating, and planning alternatives"):
            rate = check(made, lengths.workload()).steps_per_s
            made = replace(made, simulated_steps_per_s=rate, alternatives=alternatives(made, spec.launchable))
    show(console, made)
    if request.page is not None:
        console.print(f"page: {write_page(request.page, render_page(made))}", markup=False)
    if request.json is not None:
        request.json.write_text(made.to_json(), encoding="utf-8")
        console.print(f"plan: {request.json}", markup=False)


def _left_open(lengths: Lengths, demand: WorkloadSpec) -> Iterator[str]:
    """Say what the plan does not know of a recorded workload."""
    if not isinstance(lengths, Trace):
        return
    if lengths.held_s:
        yield (
            f"The samples of {lengths.name} are episodes: the plan lets each be held for {demand.held_s:,.2f} s by its"
            " environment (--held-s), but knows neither its single turns nor the tokens that it reads between them."
        )
    if lacking := lengths.missing_siblings(demand.group_size):
        yield lacking


def _read_fleet(name: str) -> Fleet:
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return fleets.read_fleet(path)
    examples = {
        file.name.removesuffix(".toml"): file for file in files("rollover.planner").joinpath("fleets").iterdir()
    }
    if name not in examples:
        raise ConfigError(f"{name} is neither a .toml file nor a packaged fleet{nearest(name, examples)}")
    return fleets.parse(toml.parse(examples[name].read_text(encoding="utf-8"), f"{name}.toml"))


def _with_budget(fleet: Fleet, request: PlanRequest) -> Fleet:
    budget = fleet.budget_per_hour if request.budget is None else request.budget
    missing = [device.name for device in fleet.devices if device.price_per_hour is None]
    if budget is not None and missing:
        raise PlanError(
            f"--budget: the price of {' and '.join(missing)} is not known in {fleet.currency}:"
            f" write price_per_hour in its [[nodes]] of {request.fleet}"
        )
    return replace(fleet, budget_per_hour=budget)


WARMUP_STEPS = 12
MEASURED_STEPS = 24


def check(plan: Plan, lengths: Workload, *, warmup: int = WARMUP_STEPS, steps: int = MEASURED_STEPS) -> Window:
    """Simulate the plan under its staleness bound for ``warmup`` + ``steps`` training steps."""
    workload = plan.workload
    found = scenario(plan)
    strategy = BoundedAsync(
        batch_size=workload.num_groups,
        group_size=workload.group_size,
        max_staleness=plan.problem.max_staleness,
        num_running=found.max_running,
    )
    return simulate(strategy, lengths, found, steps=warmup + steps, seed=0).after(warmup)


def scenario(plan: Plan) -> Scenario:
    """Describe the plan's engines and trainer to the simulator."""
    workload, training = plan.workload, plan.solution.plan
    topology = Topology.of(plan.fleet)
    ways = weight_ways(topology, training, plan.placement, plan.placement.rollout_nodes)
    models: list[ReplicaModel] = []
    for c, kind in enumerate(plan.problem.replica_kinds):
        replicas = [r for r in plan.placement.replicas if r.member == c]
        engine = engine_on_links(topology, plan.model, workload, kind, replicas)
        device = engine.device
        pause_s = weight_update_s(plan.model, workload, device, weights_link(device, replicas, ways))
        models += [engine_model(engine, pause_s=pause_s, max_running=kind.batch_cap)] * len(replicas)
    return Scenario(
        replicas=tuple(models),
        trainer=Latency(base_s=training.sync_s, s_per_token=training.step_s / step_tokens(workload)),
        reward=Latency(base_s=workload.reward_s + workload.held_s),  # as if held after its last turn
        kv_on_update="keep" if workload.keeps_kv else "recompute",
    )


def alternatives(plan: Plan, launchable: Server | None = None) -> tuple[Alternative, ...]:
    """List the feasible alternatives, fastest first: with ``launchable`` only what such servers can run."""
    return tuple(sorted(_of_one_type(plan, launchable), key=lambda a: (-a.steps_per_s, a.name)))


def one_type(plan: Plan, device: Device, count: int, launchable: Server | None = None) -> Plan | None:
    """Return the best plan on ``count`` devices of one kind, or ``None``. They stand in the fleet's own nodes, and in
    further ones as large as the largest of these."""
    kind = _kind(device)
    own = [replace(node, device=kind) for node in plan.fleet.nodes if _kind(node.device) == kind]
    largest = max(node.num_devices for node in own)
    own += [Node(name=f"further {i}", device=kind, num_devices=largest) for i in range(count // largest + 1)]
    nodes: list[Node] = []
    while left := count - sum(node.num_devices for node in nodes):
        nodes.append(replace(own[len(nodes)], num_devices=min(own[len(nodes)].num_devices, left)))
    nodes = [replace(node, device=replace(kind, node_size=max(n.num_devices for n in nodes))) for node in nodes]
    bound, tail = plan.problem.max_staleness, plan.problem.tail
    spec = PlanSpec(model=plan.model, workload=plan.workload, max_staleness=bound, tail=tail, launchable=launchable)
    fleet = replace(plan.fleet, nodes=tuple(nodes), budget_per_hour=None)
    try:
        return make_plan(alone(fleet, range(len(nodes))), spec) if nodes else None
    except PlanError:
        return None


def _kind(device: Device) -> Device:
    """Return what devices of different types have in common if these differ only in their nodes."""
    return replace(device, name=device.name.partition("@")[0], node_size=1)


def _of_one_type(plan: Plan, launchable: Server | None) -> Iterator[Alternative]:
    """Plan as many devices of one kind as the plan's cost buys; if prices are missing, as many as the fleet has."""
    money = plan.solution.cost_per_hour
    first = {_kind(device): device for device in reversed(plan.fleet.devices)}
    keys = Counter(kind.name for kind in first)
    for kind, device in first.items():
        name = kind.name if keys[kind.name] == 1 else device.name
        count = sum(node.num_devices for node in plan.fleet.nodes if _kind(node.device) == kind)
        label = f"the fleet's {name} alone"
        if money is not None and device.price_per_hour is not None:
            count = int(money / device.price_per_hour * (1 + 1e-9))
            label = f"{name} alone, for the same money"
        if (found := one_type(plan, device, count, launchable)) is not None:
            yield Alternative(
                name=label,
                steps_per_s=found.solution.steps_per_s,
                cost_per_hour=found.solution.cost_per_hour,
                devices={name: sum(found.used.values())},
            )
