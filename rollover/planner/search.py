"""The best plan for a fleet: of all its nodes, or of a part of them if the links between them are slow.

A plan on all nodes reckons with the links between them, and a slow one costs more than the nodes beyond it bring. It
may then pay to train on every node, so that new weights stay inside and only gradients leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy.sparse.csgraph import connected_components

from rollover.devices.costs.records import ReplicaKind
from rollover.devices.records import Device, Link, ModelShape
from rollover.errors import PlanError
from rollover.planner.choices import finer
from rollover.planner.optimum import GAP, may_reach, solve
from rollover.planner.placement import Pipeline, Placement, costed_on_links, place
from rollover.planner.plan import Plan, step_tokens
from rollover.planner.problem import PlanSpec, fleet_problem, supplies, with_networks
from rollover.planner.rate_demand import RateDemand
from rollover.planner.records import Fleet, Node, Problem, Solution
from rollover.planner.topology import Topology

_MOST_PARTS = 48
"""Maximum number of parts considered, counted by their numbers of nodes of each kind."""
_FEW_TYPES = 3
"""Number of types up to which every set of them is planned to train in each of its nodes."""
_SOME_NODES = 8
"""Number of nodes of a small fleet, in which equal devices in nodes of different sizes may be different types."""
_FEW_NODES = 3
"""Number of nodes up to which each may be a type of its own."""
_COARSE = 0.015
"""Fraction of the rate that finer batch caps may add to a part of a small fleet, which is judged by the coarse ones."""
SETTLED = 0.02
"""Relative change of the rate below which the rounds end."""
MAX_ROUNDS = 5
_WORTH_WHILE = 0.01
"""Fraction of a plan's time from which the transfer of weights over the slowest link counts."""
_PROMISING = 1.2
"""Devices that a shape of replica may need, over the fewest of its type, for its batch caps to be refined."""
_SHORT = 1e-3
"""Fraction of a requested rate that may be missing: the solver's tolerance."""


class _NoneFound(PlanError):
    def __init__(self, remark: str = "") -> None:
        super().__init__(
            f"no plan satisfies its limits on these nodes and the links between them{remark}: allow more devices,"
            " staleness or budget, a lower target, faster links or a weaker --tail"
        )


def make_plan(fleet: Fleet, spec: PlanSpec) -> Plan:
    """Make the best plan found: the fastest, or with a target the cheapest that reaches it. Raises ``PlanError`` if
    nothing satisfies the limits."""
    found: list[Plan] = []
    best: Plan | None = None
    refused: PlanError | None = None
    everything = tuple(range(len(fleet.nodes)))
    ways = [fleet] if spec.launchable else _typings(fleet)
    for typed, nodes in ((way, nodes) for way in ways for nodes in (everything, *_parts(way))):
        part = alone(typed, nodes)
        for inside in _forms(part) if best is None or _may_beat(spec, part, best) else ():
            if best is not None and inside and not _may_beat(spec, part, best, inside):
                continue
            try:
                found.append(best_of_rounds(spec, typed, nodes, inside))
                best = _best(found)
            except PlanError as error:
                refused = refused or error
    if best is None:
        assert refused is not None
        if spec.target_steps_per_s is None or not isinstance(refused, _NoneFound):
            raise refused
        fastest = make_plan(fleet, replace(spec, target_steps_per_s=None)).solution.steps_per_s
        rate = fastest * step_tokens(spec.workload)
        raise _NoneFound(f" (without the target, the fastest has {rate:,.0f} tokens/s)")
    return best


def _typings(fleet: Fleet) -> Iterator[Fleet]:
    """Yield the fleet with its devices divided into types in different ways. All pipelines of a type have one shape,
    and shards stay within a type, so each way allows other plans: equal devices are a type; in fleets of few nodes also
    equal devices in nodes of equal size, then the devices of each node."""
    alike = [replace(node.device, name="", node_size=1) for node in fleet.nodes]
    ways: list[list[Hashable]] = [[*alike]]
    if len(fleet.nodes) <= _SOME_NODES:
        sizes = (node.num_devices for node in fleet.nodes)
        ways.insert(0, [*zip(alike, sizes, strict=True)])
    if len(fleet.nodes) <= _FEW_NODES:
        ways.append([*range(len(fleet.nodes))])
    for types in dict.fromkeys(tuple(way.index(key) for key in way) for way in ways):
        yield replace(fleet, nodes=tuple(_typed(fleet.nodes, types)))


def _typed(nodes: Sequence[Node], types: Sequence[int]) -> Iterator[Node]:
    """Yield the nodes with their types, each of which is given by its first node."""
    keys = [node.device.name.partition("@")[0] for node in nodes]
    for key, node, first in zip(keys, nodes, types, strict=True):
        largest = max(other.num_devices for other, its in zip(nodes, types, strict=True) if its == first)
        several = any(its != first for other, its in zip(keys, types, strict=True) if other == key)
        name = f"{key}@{nodes[first].name}" if several else key
        yield replace(node, device=replace(node.device, name=name, node_size=largest))


def _forms(fleet: Fleet) -> Iterator[tuple[str, ...]]:
    """Yield sets of types that train a whole copy in each of their nodes, so that new weights do not leave it: none,
    each alone and all; if there are few types, every set."""
    names = [device.name for device in fleet.devices]
    for size in range(len(fleet.nodes) == 1, len(names) + 1):
        if size in (0, 1, len(names)) or len(names) <= _FEW_TYPES:
            yield from itertools.combinations(names, size)


def _may_beat(spec: PlanSpec, part: Fleet, best: Plan, inside: tuple[str, ...] = ()) -> bool:
    """Return False if it is proved that the part does not beat ``best``, even with all its links as wide as its widest,
    or if it is not worth while that weights stay ``inside`` its nodes."""
    if inside and len(part.nodes) > 1:
        bytes_per_s = float(Topology.of(part).widths.min()) * min(d.efficiency.link for d in part.devices)
        transfer_s = spec.workload.rollout_weight_bytes * spec.model.parameters / bytes_per_s
        if transfer_s * best.solution.steps_per_s < _WORTH_WHILE:
            return False
    try:
        problem = fleet_problem(part, spec, _widest(part, inside), inside=inside)
    except PlanError:
        return False
    least, cheaper = spec.target_steps_per_s, (best.cost_per_hour or 0.0) * (1 - GAP)
    if least is None:
        rate, least = best.solution.steps_per_s, best.solution.steps_per_s * (1 - GAP)
        faster = rate * (1 - _COARSE) if len(best.fleet.nodes) <= _SOME_NODES else rate * (1 + GAP)
        if may_reach(problem, min(best.solution.bound_steps_per_s, faster)):
            return True
    return cheaper > 0 and may_reach(problem, least, cheaper)


# --- Parts of a fleet -------------------------------------------------------------------------------------------------


def _parts(fleet: Fleet) -> list[tuple[int, ...]]:
    """List the nodes of each part that may deserve a plan of its own, the smallest first, never all of them. Of nodes
    that stand alike, any number: every combination of numbers, if there are no more than ``_MOST_PARTS``, else one
    node, half of them or all, of one kind or two. Further the islands: nodes joined by links of some width or more."""
    if len(fleet.nodes) == 1:
        return []
    topology = Topology.of(fleet)
    kinds = _kinds(fleet, topology)
    found = [tuple(sorted(itertools.chain(*taken))) for taken in _taken(kinds)]
    found += _islands(topology)
    whole = len(fleet.nodes)
    return sorted({nodes for nodes in found if 0 < len(nodes) < whole}, key=lambda nodes: (len(nodes), nodes))


def alone(fleet: Fleet, nodes: Sequence[int]) -> Fleet:
    """Return the fleet with only these of its nodes and the links between them."""
    kept = tuple(fleet.nodes[i] for i in nodes)
    names = {node.name for node in kept}
    return replace(fleet, nodes=kept, links=tuple(link for link in fleet.links if {link[0], link[1]} <= names))


def _widest(fleet: Fleet, inside: tuple[str, ...]) -> dict[str, Link]:
    """Return links at least as wide as any that a plan on the fleet can meet between two nodes or, if it does not
    promise that weights stay ``inside`` them, in one."""
    topology = Topology.of(fleet)
    apart = ~np.eye(len(fleet.nodes), dtype=bool) if inside and len(fleet.nodes) > 1 else slice(None)
    best = Link(bytes_per_s=float(topology.widths[apart].max()), latency_s=float(topology.latencies[apart].min()))
    return {device.name: best for device in fleet.devices}


def _kinds(fleet: Fleet, topology: Topology) -> list[list[int]]:
    """Return the sets of nodes that have the same device and equal links."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(fleet.nodes):
        links = tuple(sorted(zip(topology.widths[i].tolist(), topology.latencies[i].tolist(), strict=True)))
        kinds.setdefault((node.device.name, links), []).append(i)
    return list(kinds.values())


def _taken(kinds: list[list[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Return how many of each kind are taken."""
    if np.prod([float(len(nodes) + 1) for nodes in kinds]) <= _MOST_PARTS:
        yield from itertools.product(*([nodes[:n] for n in range(len(nodes) + 1)] for nodes in kinds))
        return
    sizes = [[nodes[:n] for n in sorted({1, len(nodes) // 2, len(nodes)} - {0})] for nodes in kinds]
    for pair in itertools.combinations_with_replacement(sizes, 2):
        yield from itertools.product(*(pair if pair[0] is not pair[1] else pair[:1]))


def _islands(topology: Topology) -> list[tuple[int, ...]]:
    """Return the sets of nodes that links of at least some width join, for every width."""
    widths = topology.widths.copy()
    np.fill_diagonal(widths, 0.0)
    found = []
    for width in np.unique(widths[widths > 0]):
        num_islands, island = connected_components(widths >= width, directed=False)
        found += [tuple(np.flatnonzero(island == one).tolist()) for one in range(num_islands)]
    return found


# --- Rounds through both phases ---------------------------------------------------------------------------------------


def best_of_rounds(spec: PlanSpec, fleet: Fleet, nodes: Sequence[int], inside: tuple[str, ...] = ()) -> Plan:
    """Return the best plan found that may use all of ``nodes``, of the plans that train in each node of the types
    ``inside``. Raises ``PlanError`` if nothing satisfies the limits."""
    part, topology, model, target = alone(fleet, nodes), Topology.of(fleet), spec.model, spec.target_steps_per_s
    networks: dict[str, Link] = {}
    met: list[Problem] = []
    found: list[Plan] = []
    rounds: list[tuple[float, float]] = []
    seen = set()
    while len(rounds) < MAX_ROUNDS:
        problem = _with_placed(fleet_problem(part, spec, networks, inside=inside), met)
        devices = with_networks(part.stock, networks)
        solved = solve_finely(problem, devices, model)
        if solved is None and not rounds and target:  # the fastest plan may reach it on its links
            solved = solve_finely(replace(problem, target_steps_per_s=None), devices, model)
        if solved is None:
            break
        problem, solution = solved
        placement = _in_fleet(place(Topology.of(part), model, problem, solution), nodes)
        whole = replace(
            problem, supplies=supplies(fleet.stock, fleet.node_sizes), target_steps_per_s=target
        )  # other nodes are idle
        real = costed_on_links(topology, model, whole, solution, placement)
        reached = real.solution.steps_per_s if real.solution else 0.0
        rounds.append((solution.steps_per_s, reached))
        if real.solution is not None and reached >= (target or 0.0) * (1 - _SHORT):
            bound = solution.bound_steps_per_s * reached / solution.steps_per_s
            proved = replace(real.solution, bound_steps_per_s=bound, gap=solution.gap, solve_s=solution.solve_s)
            found.append(
                Plan(
                    fleet=fleet,
                    model=model,
                    workload=spec.workload,
                    problem=real.problem,
                    solution=proved,
                    placement=placement,
                )
            )
        choice = (solution.plan.parts, tuple(solution.replicas[c] for c in solution.active))
        if abs(reached / solution.steps_per_s - 1) < SETTLED or choice in seen:
            break
        seen.add(choice)
        met.append(real.problem)
        networks = {**networks, **real.networks}
    if not found:
        raise _NoneFound
    return replace(_best(found), rounds=tuple(rounds))


def solve_finely(problem: Problem, devices: Iterable[Device], model: ModelShape) -> tuple[Problem, Solution] | None:
    """Solve ``problem``, then once more with the listed trainers and with promising replicas at finer batch caps, which
    may reach a target that the listed caps miss. Return the second problem and its solution with the first solution's
    bound and gap."""
    first = known = solve(problem)
    if first is None and problem.target_steps_per_s is not None:
        first = solve(replace(problem, target_steps_per_s=None))
    if first is None:
        return None
    named = {d.name: replace(d, network=d.link) if d.name in problem.inside else d for d in devices}
    demand = RateDemand(problem, first.steps_per_s * (1 - GAP))
    kinds: list[ReplicaKind] = []
    for kind in [problem.replica_kinds[c] for c in (*first.active, *_promising(demand))]:
        kinds += [*finer(kind, named[kind.device], model, problem.workload), kind]
    near = replace(problem, replica_kinds=tuple({kind.key: kind for kind in kinds}.values()))
    second = solve(near)
    if second is None:
        return None if known is None else (problem, known)
    proved, solve_s = known or second, first.solve_s + second.solve_s
    return near, replace(second, bound_steps_per_s=proved.bound_steps_per_s, gap=proved.gap, solve_s=solve_s)


def _promising(demand: RateDemand) -> Iterator[int]:
    """Yield, for each shape of replica, the kind that meets the demand with the fewest devices, if no other shape needs
    far fewer devices of its type, or if it fits beside the shape that needs the fewest."""
    in_time = demand.in_time(range(len(demand.busy)))
    needs = np.where(in_time, demand.sizes * demand.time, np.inf)
    for of_its_type in demand.of_type:
        best = int(np.argmin(np.where(of_its_type, needs, np.inf)))
        for shape in demand.shapes:
            c = min(shape, key=lambda c: needs[c])
            small = demand.sizes[c] < demand.sizes[best]
            if of_its_type[c] and in_time[c] and (small or needs[c] <= _PROMISING * needs[best]):
                yield c


def _best(found: Sequence[Plan]) -> Plan:
    """Return the cheapest plan that reaches the target or, without one, the rate of the fastest to the gap. A plan that
    needs a more intricate fleet must be cheaper by more than the gap."""
    rates = (plan.solution.steps_per_s for plan in found)
    least = max(rates) * (1 - GAP) if found[0].problem.target_steps_per_s is None else 0.0
    best, *others = (plan for plan in found if plan.solution.steps_per_s >= least)
    for plan in others:
        mine, its = _rank(plan), _rank(best)
        if mine < its if plan.fleet == best.fleet else mine[0] < its[0] * (1 - GAP):
            best = plan
    return best


def _rank(plan: Plan) -> tuple[float, float]:
    return plan.cost_per_hour or 0.0, -plan.solution.steps_per_s


def _in_fleet(placement: Placement, nodes: Sequence[int]) -> Placement:
    """Number the nodes as in the fleet. ``nodes``: the fleet's nodes that the part consists of, in order."""

    def moved(pipelines: Iterable[Pipeline]) -> tuple[Pipeline, ...]:
        return tuple(replace(p, stages=tuple(replace(s, node=nodes[s.node]) for s in p.stages)) for p in pipelines)

    return Placement(training=moved(placement.training), replicas=moved(placement.replicas))


def _with_placed(problem: Problem, met: Sequence[Problem]) -> Problem:
    """Replace each shape of the problem by its latest cost on a placement, if it has been placed."""
    plans = {plan.shape: plan for plan in problem.plans}
    kinds = {kind.key: kind for kind in problem.replica_kinds}
    for placed in met:
        plans |= {plan.shape: plan for plan in placed.plans}
        kinds |= {kind.key: kind for kind in placed.replica_kinds}
    return replace(problem, plans=tuple(plans.values()), replica_kinds=tuple(kinds.values()))
