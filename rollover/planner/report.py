"""Presents a finished plan: the same rows and sentences on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollover.planner.plan import Plan, step_tokens
from rollover.planner.records import Binding
from rollover.report.page import Page, header, table, tiles

AGREED = 0.10
"""Relative difference between simulation and formula up to which they agree."""
CONSIDERABLE = 0.2
"""Fraction of the trainer's time from which weight updates are mentioned as a part of its work."""

_TRAIN, _IDLE = "--orange", "--gap"
_ROLLOUT = ("--blue", "--green", "--violet", "--cyan", "--pink", "--yellow", "--brown", "--red")
_MAX_NODES = 256
"""Number of nodes drawn individually."""
_FLEET = (
    "Each square is a device; its number is the pipeline (T) or replica it belongs to. Devices of one colour have"
    " the same role and shape; grey ones are idle and need not be rented."
)
_ALTERNATIVES = (
    "The same model, workload and staleness bound on other fleets. All figures, including this plan's, come"
    " from the formula; the cost counts devices in use."
)

_ROLE_HEADS = ("role", "devices", "shape", "count", "samples", "busy")


def sentences(plan: Plan) -> tuple[str, ...]:
    """Describe a plan in words, the most important first."""
    return (
        *cannot_run(plan),
        *_simulated(plan),
        *_limits(plan),
        *_idle(plan),
        _proved(plan),
        *_assumed(plan),
        *plan.notes,
    )


def show(console: Console, plan: Plan) -> None:
    """Print the tables and sentences of a plan."""
    title = Text(f"{plan.fleet.name}: {plan.model.name}, {plan.workload.name}")
    shown = Table(title=title, title_justify="left", title_style="bold")
    for name in _ROLE_HEADS:
        shown.add_column(name, justify="right" if name in ("samples", "busy") else "left")
    for row in roles(plan):
        shown.add_row(*map(Text, row), style="bold" if row[0] == "train" else None)
    console.print(shown)
    figures = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    figures.add_column(style="dim")
    figures.add_column()
    for label, value, unit, note in numbers(plan):
        figures.add_row(Text(label), Text(f"{value} {unit}".strip() + (f"  ({note})" if note else "")))
    console.print(figures)
    if plan.alternatives:
        heads, *others = _alternatives(plan)
        compared = Table(*heads)
        for row in others:
            compared.add_row(*map(Text, row))
        console.print(compared)
    for sentence in sentences(plan):
        console.print(Text(f"- {sentence}"))


def render_page(plan: Plan) -> str:
    """Return the page of a plan, with the fleet coloured by role: one file that loads nothing."""
    page = Page(f"{plan.fleet.name} · Rollover plan")
    facts = [
        plan.model.name,
        f"{plan.model.parameters / 1e9:.1f}B parameters",
        f"{plan.workload.num_groups} prompts × {plan.workload.group_size} samples per step",
        f"{plan.workload.name}, {plan.workload.response_tokens:,.0f} tokens per response",
        f"max_staleness {plan.problem.max_staleness}",
    ]
    page.add(header("Rollover plan", plan.fleet.name, facts))
    page.add(tiles(numbers(plan)))
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(plan))
    sections = [
        ("Roles", "", table(roles(plan), _ROLE_HEADS)),
        ("The fleet", _FLEET, _picture(plan)),
        ("In words", "", f'<ul class="words">{words}</ul>'),
    ]
    if plan.alternatives:
        heads, *others = _alternatives(plan)
        sections.append(("Alternatives", _ALTERNATIVES, table(others, heads)))
    for title, caption, content in sections:
        page.section(title, caption, f'<div class="card">{content}</div>', layout="column")
    return page.render()


# --- Tables -----------------------------------------------------------------------------------------------------------


def roles(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield what each kind of device does: training first, then replicas by their share of the samples."""
    training, rate = plan.solution.plan, plan.solution.steps_per_s
    for part in training.parts:
        shape = _shape(dp=part.dp, tp=part.tp, pp=part.pp)
        shape += (", sharded" if part.sharded else "") + (", recomputing" if part.recompute else "")
        counted = "1 trainer" if len(training.parts) == 1 else "1 part"
        busy = f"{rate * training.step_s:.0%}"
        yield "train", f"{part.num_devices} × {part.device}", shape, counted, f"{part.share:.1%}", busy
    replicas = zip(plan.problem.replica_kinds, plan.solution.replicas, plan.solution.rates, strict=True)
    for kind, count, samples_per_s in sorted(replicas, key=lambda entry: -entry[2]):
        yield (
            "rollout",
            f"{count * kind.num_devices} × {kind.device}",
            f"{_shape(dp=1, tp=kind.tp, pp=kind.pp)}, batch {kind.batch_cap}",
            f"{count} replica{'s' * (count > 1)}",
            f"{samples_per_s / rate / plan.workload.batch_size:.1%}",
            f"{samples_per_s / kind.rate / (1 - rate * kind.update_s) / count:.0%}",
        )


def _shape(*, dp: int, tp: int, pp: int) -> str:
    """Describe a shape by the ways that divide anything, such as ``dp 2 × tp 4``."""
    ways = [f"{name} {n}" for name, n in (("dp", dp), ("tp", tp), ("pp", pp)) if n > 1]
    return " × ".join(ways) or "1 device"


def numbers(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """Yield (label, value, unit, note)."""
    currency, cost, per_million = plan.fleet.currency, plan.cost_per_hour, plan.cost_per_million_tokens
    proof = f"by the formula, planned in {plan.solution.solve_s:.1f} s"
    if plan.simulated_steps_per_s is not None:
        proof = f"simulated; the formula says {plan.solution.steps_per_s / plan.trusted_steps_per_s:.2f}× this"
    yield "Training throughput", f"{plan.tokens_per_s:,.0f}", "tokens/s", proof
    yield "One step every", f"{1 / plan.trusted_steps_per_s:,.1f}", "s", f"{plan.workload.batch_size:,} samples"
    devices = f"{sum(plan.used.values())} of {sum(plan.fleet.stock.values())} devices"
    if cost is None or per_million is None:
        yield "Cost", "–", "", devices
        yield "Cost per million tokens", "–", "", "a price is missing"
    else:
        yield "Cost", f"{cost:,.2f}", f"{currency}/hour", devices
        yield "Cost per million tokens", f"{per_million:,.3f}", currency, "trained"
    needed, bound = plan.solution.staleness_needed, f"on average; the bound is {plan.problem.max_staleness}"
    bound += "" if plan.problem.tail == "none" else ", for the longest responses too"
    yield "Staleness needed", str(needed), "version" if needed == 1 else "versions", bound


def _alternatives(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the heads of the table, then a row for each alternative, the fastest first."""
    yield "compared with", "formula, tokens/s", "plan / this", f"{plan.fleet.currency}/hour", "devices"
    for other in plan.alternatives:
        yield (
            other.name,
            f"{other.steps_per_s * step_tokens(plan.workload):,.0f}",
            f"{plan.solution.steps_per_s / other.steps_per_s:.2f}×",
            "–" if other.cost_per_hour is None else f"{other.cost_per_hour:,.2f}",
            ", ".join(f"{n} × {device}" for device, n in other.devices.items() if n),
        )


# --- Sentences --------------------------------------------------------------------------------------------------------


def cannot_run(plan: Plan) -> Iterator[str]:
    """Say which parts of the plan this version cannot run."""
    if found := plan.obstacles:
        yield f"rollover launch cannot run this plan: {'; '.join(found)}. --for-launch plans what it can run."


def _simulated(plan: Plan) -> Iterator[str]:
    if plan.simulated_steps_per_s is None:
        return
    part = plan.simulated_steps_per_s / plan.solution.steps_per_s
    if abs(part - 1) <= AGREED:
        yield (
            f"Simulated, the whole loop reaches {part:.0%} of what the formula predicts;"
            " throughput and cost are the simulated ones."
        )
    else:
        yield (
            f"The simulation disagrees with the formula: it reaches {part:.0%} of the predicted rate."
            " Throughput and cost are the simulated ones; the search may have misjudged other plans to the same extent."
        )
    target = plan.problem.target_steps_per_s
    if target is not None and plan.simulated_steps_per_s < target:
        short = 1 - plan.simulated_steps_per_s / target
        yield f"The simulated rate misses the target by {short:.1%}: plan with a --target that is higher by as much."


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


def _idle(plan: Plan) -> Iterator[str]:
    """Describe devices that add nothing to the rate."""
    if plan.idle:
        prices = [(plan.fleet.by_name[name].price_per_hour, n) for name, n in plan.idle.items()]
        cost = None if any(price is None for price, _ in prices) else sum((price or 0.0) * n for price, n in prices)
        saved = "" if cost is None else f" Not renting them saves {cost:,.2f} {plan.fleet.currency} per hour."
        than = "better" if plan.problem.budget_per_hour is None else "better within the budget"
        yield f"Idle: {_counted(plan.idle)}; no plan that uses them was found to be {than}.{saved}"


def _counted(devices: Mapping[str, int]) -> str:
    return " and ".join(f"{n} × {name}" for name, n in devices.items())


def _proved(plan: Plan) -> str:
    better = "faster" if plan.problem.target_steps_per_s is None else "cheaper"
    return (
        "Proved: no choice of listed shapes and batch caps, on the links that the first phase assumes, is more than"
        f" {plan.solution.gap:.1%} {better}. Other batch caps, nodes and places are searched without a proof."
    )


def _assumed(plan: Plan) -> Iterator[str]:
    """Name the unverified figures and the efficiencies that the plan relies on."""
    used = [device for device in plan.fleet.devices if plan.used.get(device.name)]
    for device in used:
        if device.unverified:
            yield f"Not verified for {device.title}: {', '.join(device.unverified)}."
    for source in sorted({device.efficiency.source for device in used}):
        yield f"Efficiencies: {source}."


# --- The fleet --------------------------------------------------------------------------------------------------------


def _picture(plan: Plan) -> str:
    """Draw nodes as boxes and devices as squares."""
    marks = _marks(plan)
    legend = "".join(
        f'<span><i style="background:var({colour})"></i>{escape(name)}</span>' for colour, name in _legend(plan)
    )
    boxes = []
    for index, node in enumerate(plan.fleet.nodes[:_MAX_NODES]):
        squares = "".join(_square(marks.get((index, device)), node.name, device) for device in range(node.num_devices))
        boxes.append(
            f'<div class="node"><div class="name">{escape(node.name)}<small>{escape(node.device.name)}</small></div>'
            f'<div class="devices">{squares}</div></div>'
        )
    rest = len(plan.fleet.nodes) - len(boxes)
    more = f'<p class="caption">and {rest:,} more nodes, in the JSON of this plan</p>' if rest else ""
    return f'<div class="legend">{legend}</div><div class="fleet">{"".join(boxes)}</div>{more}'


def _square(mark: tuple[str, str, str] | None, node: str, device: int) -> str:
    colour, label, what = mark or (_IDLE, "", "idle")
    title = f"{node}, device {device}: {what}"
    return f'<span style="background:var({colour})" title="{escape(title)}">{escape(label)}</span>'


def _marks(plan: Plan) -> dict[tuple[int, int], tuple[str, str, str]]:
    """Return a mapping (node, device) -> (colour, label, what it does)."""
    found = {}
    for pipelines, shapes, role in (
        (plan.placement.training, plan.solution.plan.parts, "training pipeline"),
        (plan.placement.replicas, plan.problem.replica_kinds, "rollout replica"),
    ):
        trains = role.startswith("training")
        for number, pipeline in enumerate(pipelines):
            shape = shapes[pipeline.member]
            colour = _TRAIN if trains else _colour(pipeline.member)
            for depth, stage in enumerate(pipeline.stages, start=1):
                what = f"{role} {number}, stage {depth} of {shape.pp}, tensor parallel {shape.tp}"
                label = f"T{number}" if trains else str(number)
                found.update({(stage.node, device): (colour, label, what) for device in stage.devices})
    return found


def _colour(c: int) -> str:
    return _ROLLOUT[c % len(_ROLLOUT)]


def _legend(plan: Plan) -> Iterator[tuple[str, str]]:
    yield _TRAIN, "training"
    for c, kind in enumerate(plan.problem.replica_kinds):
        ways = f"tp {kind.tp}" + (f" pp {kind.pp}" if kind.pp > 1 else "")
        yield _colour(c), f"rollout, {kind.device}, {ways}, batch {kind.batch_cap}"
    if sum(plan.used.values()) < sum(plan.fleet.stock.values()):
        yield _IDLE, "idle"
