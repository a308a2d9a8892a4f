"""A finished plan in sentences: its limits, how to lift them, its assumptions and its alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollover.devices.costs.records import ReplicaKind
from rollover.planner.explain import in_words
from rollover.planner.plan import Alternative, Plan, step_tokens
from rollover.planner.records import Binding
from rollover.planner.slow_links import slow_links

AGREED = 0.10
"""Relative difference between simulation and formula up to which they agree."""
USELESS = 0.03
"""Fraction of the cost from which devices of little use are mentioned: three times the rate that they may add."""

CONSIDERABLE = 0.2
"""Fraction of the trainer's time from which weight updates are mentioned as a part of its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One line of the plan: a training part, or all replicas of a kind.

    Example: ``Role(role="rollout", device="h20", num_devices=24, shape="tp 2, batch 64", count="12 replicas",
    lengths="all lengths", share=1.0, utilisation=0.97)``.
    """

    role: str
    device: str
    num_devices: int
    shape: str
    count: str
    lengths: str
    """The lengths of the responses it decodes."""
    share: float
    """Fraction of all samples (rollout) or of the batch (training)."""
    utilisation: float
    """Fraction of the time in which it is busy."""


def roles(plan: Plan) -> tuple[Role, ...]:
    """Return the roles of the plan: training first, then replicas by their share of the samples."""
    training = plan.solution.plan
    found = [
        Role(
            role="train",
            device=part.device,
            num_devices=part.num_devices,
            shape=_shape(dp=part.dp, tp=part.tp, pp=part.pp)
            + (", sharded" if part.sharded else "")
            + (", recomputing" if part.recompute else ""),
            count="1 trainer" if len(training.parts) == 1 else "1 part",
            lengths="–",
            share=part.share,
            utilisation=plan.solution.steps_per_s * training.step_s,
        )
        for part in training.parts
    ]
    rate = plan.solution.steps_per_s * plan.workload.batch_size
    rolling = []
    for c, kind in enumerate(plan.problem.replica_kinds):
        count, rates = plan.solution.replicas[c], plan.solution.rates[c]
        rolling.append(
            Role(
                role="rollout",
                device=kind.device,
                num_devices=count * kind.num_devices,
                shape=f"{_shape(dp=1, tp=kind.tp, pp=kind.pp)}, batch {kind.batch_cap}",
                count=f"{count} replica{'s' * (count > 1)}",
                lengths=_lengths(plan, c),
                share=sum(rates) / rate,
                utilisation=_busy(plan, kind, rates) / count,
            )
        )
    rolling.sort(key=lambda role: -role.share)
    return tuple(found + rolling)


def _shape(*, dp: int, tp: int, pp: int) -> str:
    """Describe a shape by the ways that divide anything, such as ``dp 2 × tp 4``."""
    ways = [f"{name} {n}" for name, n in (("dp", dp), ("tp", tp), ("pp", pp)) if n > 1]
    return " × ".join(ways) or "1 device"


def _busy(plan: Plan, kind: ReplicaKind, rates: tuple[float, ...]) -> float:
    """Return how many replicas' worth of time decoding and weight updates take."""
    rate = plan.solution.steps_per_s
    return sum(x / r / (1 - rate * update) for x, r, update in zip(rates, kind.rates, kind.updates_s, strict=True) if x)


def _lengths(plan: Plan, c: int) -> str:
    """Describe the lengths that a kind decodes, such as ``up to 3,400 tokens``; a bucket counts from a hundredth of it
    on."""
    if plan.routing == "load":
        return "all lengths"
    buckets = plan.workload.buckets
    rate = plan.solution.steps_per_s * plan.workload.batch_size
    mine = [w for w, x in enumerate(plan.solution.rates[c]) if x and x >= 0.01 * rate * buckets[w].share]
    if not mine:
        return "none"
    low = buckets[mine[0] - 1].max_tokens if mine[0] else 0
    high = f"{buckets[mine[-1]].max_tokens:,}"
    return f"{low:,} to {high} tokens" if low else f"up to {high} tokens"


def sentences(plan: Plan) -> tuple[str, ...]:
    """Say what the user should know about the plan, most important first."""
    return (
        *cannot_run(plan),
        *_simulated(plan),
        *_limits(plan),
        *_useless(plan),
        *(f"{in_words(shadow, plan.problem)}." for shadow in plan.marginal_gains if shadow.gain > 0),
        *_staleness(plan),
        *_compared(plan),
        *_routed(plan),
        *_placed(plan),
        *slow_links(plan),
        *unverified(plan),
        *_efficiencies(plan),
    )


def cannot_run(plan: Plan) -> Iterator[str]:
    """Say which parts of the plan this version cannot run, and what it costs to avoid them."""
    if unlimited := plan.unlimited:
        yield (
            f"Planned for rollover launch. Without its limits, the fleet would reach {_rate(plan, unlimited)} by the"
            f" formula, {unlimited.steps_per_s / plan.solution.steps_per_s:.2f}× this plan's."
        )
    if not (found := plan.obstacles):
        return
    said = f"rollover launch cannot run this plan: {'; '.join(found)}"
    if (other := plan.launchable) is None:
        yield f"{said}. No plan was found that it can run with {plan.model.name} on this fleet."
        return
    yield (
        f"{said}. Planned with --for-launch, this fleet reaches {_rate(plan, other)} by the formula,"
        f" {other.steps_per_s / plan.solution.steps_per_s:.1%} of the formula's rate for this plan."
    )


def _rate(plan: Plan, other: Alternative) -> str:
    return f"{other.steps_per_s * step_tokens(plan.workload):,.0f} tokens/s"


def _useless(plan: Plan) -> Iterator[str]:
    """Yield what there is to say about devices that bring nothing, or next to nothing."""
    if plan.idle:
        yield f"Idle: {_counted(plan.idle)}; no plan that uses them was found to be better.{_worth(plan, plan.idle)}"
    leaner = plan.leaner
    if leaner is None:
        return
    fewer = {name: n - leaner.devices.get(name, 0) for name, n in plan.used.items() if n > leaner.devices.get(name, 0)}
    more = {name: n - plan.used.get(name, 0) for name, n in leaner.devices.items() if n > plan.used.get(name, 0)}
    now, then = float(sum(plan.used.values())), float(sum(leaner.devices.values()))
    if plan.cost_per_hour is not None and leaner.cost_per_hour is not None:
        now, then = plan.cost_per_hour, leaner.cost_per_hour
        saved = f"{now - then:,.2f} of {now:,.2f} {plan.fleet.currency} per hour"
    else:
        saved = f"{now - then:g} of {now:g} devices"
    lost = max(0.0, 1 - leaner.steps_per_s / plan.solution.steps_per_s)
    if fewer and 1 - then / now >= USELESS:
        instead = f", with {_counted(more)} more," if more else ""
        without = f"Without them{instead} {lost:.1%} of the rate would be lost and {saved} saved."
        yield f"Of little use: {_counted(fewer)}. {without}"


def _counted(devices: Mapping[str, int]) -> str:
    return " and ".join(f"{n} × {name}" for name, n in devices.items())


def _worth(plan: Plan, devices: Mapping[str, int]) -> str:
    """Say what is saved without them."""
    prices = [(plan.fleet.by_name[name].price_per_hour, n) for name, n in devices.items()]
    if any(price is None for price, _ in prices):
        return ""
    saved = sum((price or 0.0) * n for price, n in prices)
    return f" Not renting them saves {saved:,.2f} {plan.fleet.currency} per hour."


def _simulated(plan: Plan) -> Iterator[str]:
    simulated, formula = plan.simulated_steps_per_s, plan.solution.steps_per_s
    if simulated is None:
        return
    if abs(simulated / formula - 1) <= AGREED:
        yield (
            f"Simulated, the whole loop reaches {simulated / formula:.0%} of what the formula predicts;"
            " throughput and cost are the simulated ones."
        )
    else:
        yield (
            f"The simulation disagrees with the formula: it reaches {simulated / formula:.0%} of the predicted rate."
            " Throughput and cost are the simulated ones; the search may have misjudged other plans to the same extent."
        )


def _limits(plan: Plan) -> Iterator[str]:
    bindings = plan.solution.bindings
    rows = {binding.row for binding in bindings}
    all_busy = sum(b.row == "replicas" for b in bindings) == len(plan.solution.active)
    updating = plan.solution.plan.sync_s / plan.solution.plan.cycle_s
    if "trainer" in rows and updating >= CONSIDERABLE:
        what = "Weight updates are" if updating >= 0.5 else "Training and weight updates together are"
        yield (
            f"{what} the bottleneck: the trainer trains for {1 - updating:.0%} of its time, and waits for"
            f" {updating:.0%} until the engines have new weights; "
            + ("the replicas are busy all the time, too." if all_busy else "some replicas have time to spare.")
        )
    elif "trainer" in rows and all_busy:
        yield "Trainer and replicas are both busy all the time: neither waits for the other."
    elif "trainer" in rows:
        yield "Training is the bottleneck: the trainer is never idle, but some replicas are."
    elif all_busy:
        yield "Rollout is the bottleneck: every replica is busy all the time, and the trainer waits for samples."
    for binding in bindings:
        if binding.row not in ("replicas", "trainer"):
            yield _limit(plan, binding)


def _limit(plan: Plan, binding: Binding) -> str:
    bound = plan.problem.max_staleness
    match binding.row:
        case "stock":
            count = plan.fleet.stock[plan.fleet.by_name[binding.subject]]
            return f"All {count} {binding.subject} are in use."
        case "budget":
            return f"The budget of {plan.problem.budget_per_hour:,.2f} {plan.fleet.currency} per hour is spent."
        case "staleness":
            return f"The staleness bound of {bound} binds: no more samples may be in flight."
        case "cache":
            return f"The cache of {binding.subject} is full of samples that wait for tools."
        case _:
            return f"The staleness bound of {bound} binds for the longest responses: slower replicas would miss it."


def _staleness(plan: Plan) -> Iterator[str]:
    needed, bound = plan.solution.staleness_needed, plan.problem.max_staleness
    if any(shadow.subject == "max_staleness" and shadow.gain > 0 for shadow in plan.marginal_gains):
        return
    if needed < bound and not any(b.row in ("staleness", "tail") for b in plan.solution.bindings):
        yield f"On average a staleness of {needed} is enough for this rate; the bound of {bound} covers the tail."


def _compared(plan: Plan) -> Iterator[str]:
    """Compare the plan with the best fleet of one type and with the best other split of this fleet."""
    alone = [a for a in plan.alternatives if len(a.devices) == 1]
    mixed = [a for a in plan.alternatives if len(a.devices) > 1]
    for found in (alone, mixed):
        best = max(found, key=lambda a: a.steps_per_s, default=None)
        if best is not None:
            ratio = plan.solution.steps_per_s / best.steps_per_s
            cost, other = plan.solution.cost_per_hour, best.cost_per_hour
            money = f", at {cost / other / ratio:.2f}× its cost per step" if cost and other else ""
            yield f"The plan is {ratio:.2f}× as fast as {best.name}{money}."


def _routed(plan: Plan) -> Iterator[str]:
    if plan.routing == "length":
        yield (
            "Replicas receive the lengths that suit them, which requires a prediction of lengths; the simulation"
            " predicts nothing and sends samples where there is room."
        )


def _placed(plan: Plan) -> Iterator[str]:
    if len(plan.rounds) > 1:
        again = len(plan.rounds) - 1
        yield (
            f"The links of the placement were fed back {again} time{'s' * (again > 1)}: the times of the first round"
            f" were {plan.rounds[0].moved:.0%} off, those of the last {plan.rounds[-1].moved:.1%}."
        )


def unverified(plan: Plan) -> tuple[str, ...]:
    """Name the unverified figures that the plan relies on."""
    return tuple(
        f"Not verified for {device.title}: {', '.join(device.unverified)}."
        for device in plan.fleet.devices
        if plan.used.get(device.name) and device.unverified
    )


def _efficiencies(plan: Plan) -> Iterator[str]:
    for source in sorted({d.efficiency.source for d in plan.fleet.devices if plan.used.get(d.name)}):
        yield f"Efficiencies: {source}."
