"""A plan, from the fleet to the devices of every replica: phase 1, phase 2, and back until they agree.

What phase 1 assumed about links is replaced by what the placement met, the shapes that were placed by their re-costed
selves, and both phases are run again, until cycle times move by less than ``SETTLED``. A plan is worth what it costs on
the links it stands on: the best of all rounds is kept, and its numbers are the re-costed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rollover.errors import PlanError
from rollover.planner import columns
from rollover.planner.explain import why_infeasible
from rollover.planner.milp import solve
from rollover.planner.placement import Pipeline, Placement, place
from rollover.planner.records import (
    Device,
    Fleet,
    Link,
    ModelShape,
    Problem,
    RolloutColumn,
    ShadowPrice,
    Solution,
    Tail,
    TrainingPart,
    TrainingPlan,
    WorkloadSpec,
)
from rollover.planner.recost import Recosted, recost
from rollover.planner.routing import Routing, routed
from rollover.planner.topology import Topology

SETTLED = 0.02
"""Relative change of a time below which the rounds end."""
MAX_ROUNDS = 5
_SHORT = 1e-3
"""Part of an asked-for rate that may be missing: the solver's tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pass through both phases."""

    assumed_step_s: float
    step_s: float
    """C_T, on the links of the placement."""
    assumed_sync_s: float
    sync_s: float
    assumed_steps_per_s: float
    steps_per_s: float
    """0 where the placed plan breaks a limit."""

    @property
    def moved(self) -> float:
        """Largest relative change of C_T and S."""
        return max(
            abs(self.step_s / self.assumed_step_s - 1),
            abs(self.sync_s / self.assumed_sync_s - 1) if self.assumed_sync_s else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan to compare with."""

    name: str
    steps_per_s: float
    cost_per_hour: float | None
    devices: dict[str, int]
    """In use, by type."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run where, and what it will yield."""

    fleet: Fleet
    model: ModelShape
    workload: WorkloadSpec
    """With all its length buckets."""
    routing: Routing
    problem: Problem
    """Its columns are the replicas in use, its one training plan is the one chosen, both at their real links. Routed by
    load, its workload has a single bucket."""
    solution: Solution
    placement: Placement
    """``member`` of a replica is an index of the problem's columns."""
    rounds: tuple[Round, ...] = ()
    shadows: tuple[ShadowPrice, ...] = ()
    """What one unit more of something would bring."""
    alternatives: tuple[Alternative, ...] = ()
    """Other ways to spend the same money or the same devices."""
    simulated_steps_per_s: float | None = None
    """What a simulation of the whole loop reached; ``None``: it was not run."""

    @property
    def trusted_steps_per_s(self) -> float:
        """The simulated rate where there is one, else the formula's."""
        return self.simulated_steps_per_s or self.solution.steps_per_s

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second."""
        return self.trusted_steps_per_s * step_tokens(self.workload)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In the fleet's currency; ``None`` where a price is missing."""
        cost = self.cost_per_hour
        return None if cost is None else cost / 3600 / self.tokens_per_s * 1e6

    @property
    def cost_per_hour(self) -> float | None:
        """Of the devices in use."""
        used = self.used
        prices = {d.name: d.price_per_hour for d in self.fleet.devices if used.get(d.name)}
        total = 0.0
        for name, price in prices.items():
            if price is None:
                return None
            total += price * used[name]
        return total

    @cached_property
    def used(self) -> dict[str, int]:
        """Devices in use of each type."""
        found: dict[str, int] = {}
        for part in self.solution.plan.parts:
            found[part.device] = found.get(part.device, 0) + part.num_devices
        for column, count in zip(self.problem.columns, self.solution.replicas, strict=True):
            found[column.device] = found.get(column.device, 0) + count * column.num_devices
        return found

    @property
    def devices(self) -> dict[str, Device]:
        return {device.name: device for device in self.fleet.devices}

    def to_json(self) -> str:
        """The whole plan; ``from_json`` reads it."""
        from pydantic import TypeAdapter

        return TypeAdapter(Plan).dump_json(self, indent=2).decode()

    @staticmethod
    def from_json(text: str, source: str = "plan") -> Plan:
        """Raises ``PlanError`` naming ``source`` where the text is no plan."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(Plan).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise PlanError(f"{source}: not a plan: {place}: {first['msg']}") from None

    @staticmethod
    def load(file: Path) -> Plan:
        """Raises ``PlanError`` where the file is none or cannot be read."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{file}: cannot be read: {error}") from None
        return Plan.from_json(text, str(file))


def step_tokens(workload: WorkloadSpec) -> float:
    """Response tokens of a training step."""
    return workload.batch_size * workload.response_tokens


def make_plan(
    fleet: Fleet,
    model: ModelShape,
    workload: WorkloadSpec,
    *,
    max_staleness: int,
    target_steps_per_s: float | None = None,
    tail: Tail = "soft",
    routing: Routing = "load",
    metis: bool = False,
    seed: int = 0,
) -> Plan:
    """The best plan found: the fastest, or with a target the cheapest that reaches it.

    With the ``tail`` row even the longest response keeps the staleness bound, so that no step waits for one; without
    it the bound is kept on average only. The scheduler keeps it for every group, by waiting.

    Raises:
        PlanError: nothing satisfies the limits; the message says which stand in the way.
    """
    topology = Topology.of(fleet)
    networks: dict[str, Link] = {}
    met: list[Problem] = []
    found: list[Plan] = []
    rounds: list[Round] = []
    seen = set()
    while len(rounds) < MAX_ROUNDS:
        problem = columns.problem(
            _with_networks(fleet, networks),
            model,
            workload,
            max_staleness=max_staleness,
            target_steps_per_s=target_steps_per_s,
            tail=tail,
        )
        problem = _with_placed(problem, met)
        solution = solve(routed(problem, routing))
        if solution is None:
            if found:
                break
            raise PlanError(why_infeasible(routed(problem, routing)))
        placement = place(topology, model, problem, solution, seed=seed, metis=metis)
        real = recost(topology, model, problem, solution, placement, lambda p: routed(p, routing))
        rounds.append(_round(solution, real))
        if real.solution is not None:
            made = _plan(fleet, model, real, real.solution, placement, solution.active)
            found.append(replace(made, workload=workload, routing=routing))
        kind = (solution.plan.parts, tuple(solution.replicas[c] for c in solution.active))
        if rounds[-1].moved < SETTLED or kind in seen:
            break
        seen.add(kind)
        met.append(real.unrouted)
        networks = {**networks, **real.networks}
    if not found:
        raise PlanError(
            f"no plan keeps its limits on the links between these nodes ({len(rounds)} were tried);"
            " allow more staleness, a larger budget or a lower target, or widen the links"
        )
    best = min(found, key=_rank)
    return replace(best, rounds=tuple(rounds))


def _rank(plan: Plan) -> tuple[float, float]:
    """Least is best: the cheapest of those that reach the target, or the fastest."""
    target, rate = plan.problem.target_steps_per_s, plan.solution.steps_per_s
    if target is None:
        return -rate, plan.cost_per_hour or 0.0
    missing = max(0.0, target * (1 - _SHORT) - rate)
    return missing, plan.cost_per_hour or 0.0


def _plan(
    fleet: Fleet,
    model: ModelShape,
    real: Recosted,
    solution: Solution,
    placement: Placement,
    active: tuple[int, ...],
) -> Plan:
    """``active``: the columns of the phase-1 problem that ``real`` has kept, in order."""
    places = {c: index for index, c in enumerate(active)}
    replicas = tuple(Pipeline(member=places[r.member], stages=r.stages) for r in placement.replicas)
    return Plan(
        fleet=fleet,
        model=model,
        workload=real.problem.workload,
        routing="load",
        problem=real.problem,
        solution=solution,
        placement=replace(placement, replicas=replicas),
    )


def _round(assumed: Solution, real: Recosted) -> Round:
    plan = real.problem.plans[0]
    return Round(
        assumed_step_s=assumed.plan.step_s,
        step_s=plan.step_s,
        assumed_sync_s=assumed.plan.sync_s,
        sync_s=plan.sync_s,
        assumed_steps_per_s=assumed.steps_per_s,
        steps_per_s=real.solution.steps_per_s if real.solution else 0.0,
    )


def _with_placed(problem: Problem, met: Sequence[Problem]) -> Problem:
    """The problem with shapes as they were re-costed where they were placed last."""
    plans = {_shape(plan): plan for plan in problem.plans}
    columns = {_kind(column): column for column in problem.columns}
    for placed in met:
        plans |= {_shape(plan): plan for plan in placed.plans}
        columns |= {_kind(column): column for column in placed.columns}
    return replace(problem, plans=tuple(plans.values()), columns=tuple(columns.values()))


def _shape(plan: TrainingPlan) -> tuple[TrainingPart, ...]:
    return tuple(replace(part, share=1.0) for part in plan.parts)


def _kind(column: RolloutColumn) -> tuple[str, int, int, int]:
    return column.device, column.tp, column.pp, column.batch_cap


def _with_networks(fleet: Fleet, networks: Mapping[str, Link]) -> Fleet:
    """The fleet as phase 1 should see it."""
    nodes = [
        replace(node, device=replace(node.device, network=networks[node.device.name]))
        if node.device.name in networks
        else node
        for node in fleet.nodes
    ]
    return replace(fleet, nodes=tuple(nodes))
