"""A plan for people: a table on the terminal, and a page with the fleet coloured by role."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.table import Table
from rich.text import Text

from rollover.planner.plan import Plan, step_tokens
from rollover.planner.summary import roles, sentences
from rollover.report.page import Page, header, table, tiles
from rollover.report.plot import Figure, axis, bar, figure

_TRAIN, _IDLE = "--orange", "--gap"
_ROLLOUT = ("--blue", "--green", "--violet", "--cyan", "--pink", "--yellow", "--brown", "--red")
_MAX_NODES = 256
"""Number of nodes drawn individually."""

_FLEET = (
    "Each square is a device; its number is the pipeline (T) or replica it belongs to. Devices of one colour have"
    " the same role and shape; grey ones are idle and need not be rented."
)
_LENGTHS = "Samples by response length, and the replicas that decode them."
_ALTERNATIVES = (
    "The same model, workload and staleness bound on other fleets or splits. All figures, including this plan's, come"
    " from the formula; the cost counts devices in use."
)
_ROUNDS = "Values assumed by the optimiser → values on the links of the placement, which the next round assumes."


def plan_table(plan: Plan) -> Table:
    """Tabulate the role of every device."""
    found = Table(title=Text(f"{plan.fleet.name}: {plan.model.name}, {plan.workload.name}"), title_justify="left")
    found.title_style = "bold"
    for name in _role_heads(plan):
        found.add_column(name, justify="right" if name in ("samples", "busy") else "left")
    for row in _role_rows(plan):
        found.add_row(*map(Text, row), style="bold" if row[0] == "train" else None)
    return found


def key_table(plan: Plan) -> Table:
    """Tabulate throughput, cost and the proved gap."""
    found = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    found.add_column(style="dim")
    found.add_column()
    for label, value, unit, note in key_numbers(plan):
        found.add_row(Text(label), Text(f"{value} {unit}".strip() + (f"  ({note})" if note else "")))
    return found


def alternatives_table(plan: Plan) -> Table | None:
    if not plan.alternatives:
        return None
    found = Table(*_alternative_heads(plan))
    for row in _rows(plan):
        found.add_row(*map(Text, row))
    return found


def key_numbers(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return the plan's key figures as (label, value, unit, note)."""
    currency, cost, per_million = plan.fleet.currency, plan.cost_per_hour, plan.cost_per_million_tokens
    proof = f"proved to {plan.solution.gap:.1%} in {plan.solution.solve_s:.1f} s"
    formula = plan.solution.steps_per_s
    if plan.simulated_steps_per_s is not None:
        proof = f"simulated; the formula says {formula / plan.trusted_steps_per_s:.2f}× this"
    return [
        ("Training throughput", f"{plan.tokens_per_s:,.0f}", "tokens/s", proof),
        *_this_version(plan),
        ("Training step", f"{1 / plan.trusted_steps_per_s:,.1f}", "s", f"{plan.workload.batch_size:,} samples"),
        (
            "Cost",
            "–" if cost is None else f"{cost:,.2f}",
            f"{currency}/hour" if cost is not None else "",
            f"{sum(plan.used.values())} of {sum(plan.fleet.stock.values())} devices",
        ),
        (
            "Cost per million tokens",
            "–" if per_million is None else f"{per_million:,.3f}",
            currency if per_million is not None else "",
            "a price is missing" if per_million is None else "trained",
        ),
        (
            "Staleness needed",
            str(plan.solution.staleness_needed),
            "version" if plan.solution.staleness_needed == 1 else "versions",
            f"on average; the bound is {plan.problem.max_staleness}"
            + ("" if plan.problem.tail == "none" else ", for the longest responses too"),
        ),
    ]


def _this_version(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """Say what ``rollover launch`` reaches of the throughput, where it cannot run the plan."""
    if plan.obstacles:
        other = plan.launchable
        value = "–" if other is None else f"{other.steps_per_s * step_tokens(plan.workload):,.0f}"
        note = "by the formula, planned with --for-launch; rollover launch cannot run this plan"
        yield "With rollover launch", value, "" if other is None else "tokens/s", note


def render_plan(plan: Plan) -> str:
    """Return the page of a plan: one file that loads nothing."""
    page = Page(f"{plan.fleet.name} · Rollover plan")
    facts = [
        plan.model.name,
        f"{plan.model.parameters / 1e9:.1f}B parameters",
        f"{plan.workload.num_groups} prompts × {plan.workload.group_size} samples per step",
        f"{plan.workload.name}, {plan.workload.response_tokens:,.0f} tokens per response",
        f"max_staleness {plan.problem.max_staleness}",
    ]
    page.add(header("Rollover plan", plan.fleet.name, facts))
    page.add(tiles(key_numbers(plan)))
    done = table(_role_rows(plan), _role_heads(plan))
    page.section("Roles", "", f'<div class="card">{done}</div>', layout="column")
    page.section("The fleet", _FLEET, f'<div class="card">{_picture(plan)}</div>', layout="column")
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(plan))
    page.section("In words", "", f'<div class="card"><ul class="words">{words}</ul></div>', layout="column")
    if plan.alternatives:
        page.section(
            "Alternatives",
            _ALTERNATIVES,
            page.figure("Trained tokens per second, by the formula", _bars(plan), ""),
            f'<div class="card">{table(_rows(plan), _alternative_heads(plan))}</div>',
            layout="column",
        )
    if plan.routing == "length":
        page.section("Lengths", _LENGTHS, page.figure("", _lengths(plan), ""), layout="column")
    rounds = f'<div class="card">{table(_round_rows(plan), _ROUND_HEADS)}</div>'
    page.section("Links", _ROUNDS, rounds, layout="column")
    return page.render()


def _role_heads(plan: Plan) -> tuple[str, ...]:
    lengths = ("lengths",) if plan.routing == "length" else ()
    return ("role", "devices", "shape", "count", *lengths, "samples", "busy")


def _role_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            role.role,
            f"{role.num_devices} × {role.device}",
            role.shape,
            role.count,
            *([role.lengths] if plan.routing == "length" else []),
            f"{role.share:.1%}",
            f"{role.utilisation:.0%}",
        )
        for role in roles(plan)
    ]


def _alternative_heads(plan: Plan) -> tuple[str, ...]:
    return "compared with", "formula, tokens/s", "plan / this", f"{plan.fleet.currency}/hour", "devices"


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    """List the rows of the alternatives, best first."""
    per_step = step_tokens(plan.workload)
    rate = plan.solution.steps_per_s
    return [
        (
            a.name,
            f"{a.steps_per_s * per_step:,.0f}",
            f"{rate / a.steps_per_s:.2f}×",
            "–" if a.cost_per_hour is None else f"{a.cost_per_hour:,.2f}",
            ", ".join(f"{n} × {device}" for device, n in a.devices.items() if n),
        )
        for a in plan.alternatives
    ]


# --- The fleet ------------------------------------------------------------------------------------------------------


def _colour(c: int) -> str:
    return _ROLLOUT[c % len(_ROLLOUT)]


def _picture(plan: Plan) -> str:
    """Draw nodes as boxes and devices as squares."""
    marks = _marks(plan)
    legend = "".join(
        f'<span><i style="background:var({colour})"></i>{escape(name)}</span>' for colour, name in _legend(plan)
    )
    shown = plan.fleet.nodes[:_MAX_NODES]
    boxes = []
    for index, node in enumerate(shown):
        squares = "".join(_square(marks.get((index, device)), node.name, device) for device in range(node.num_devices))
        boxes.append(
            f'<div class="node"><div class="name">{escape(node.name)}<small>{escape(node.device.name)}</small></div>'
            f'<div class="devices">{squares}</div></div>'
        )
    rest = len(plan.fleet.nodes) - len(shown)
    more = f'<p class="caption">and {rest:,} more nodes, in the JSON of this plan</p>' if rest else ""
    return f'<div class="legend">{legend}</div><div class="fleet">{"".join(boxes)}</div>{more}'


def _square(mark: tuple[str, str, str] | None, node: str, device: int) -> str:
    colour, label, what = mark or (_IDLE, "", "idle")
    title = f"{node}, device {device}: {what}"
    return f'<span style="background:var({colour})" title="{escape(title)}">{escape(label)}</span>'


def _marks(plan: Plan) -> dict[tuple[int, int], tuple[str, str, str]]:
    """Return a mapping (node, device) -> (colour, label, what it does)."""
    found = {}
    for number, pipeline in enumerate(plan.placement.training):
        part = plan.solution.plan.parts[pipeline.member]
        for depth, stage in enumerate(pipeline.stages):
            what = f"training pipeline {number}, stage {depth + 1} of {part.pp}, tensor parallel {part.tp}"
            found.update({(stage.node, device): (_TRAIN, f"T{number}", what) for device in stage.devices})
    for number, replica in enumerate(plan.placement.replicas):
        kind = plan.problem.replica_kinds[replica.member]
        for depth, stage in enumerate(replica.stages):
            what = f"rollout replica {number}, stage {depth + 1} of {kind.pp}, tensor parallel {kind.tp}"
            colour = _colour(replica.member)
            found.update({(stage.node, device): (colour, str(number), what) for device in stage.devices})
    return found


def _legend(plan: Plan) -> Iterator[tuple[str, str]]:
    yield _TRAIN, "training"
    for c, kind in enumerate(plan.problem.replica_kinds):
        ways = f"tp {kind.tp}" + (f" pp {kind.pp}" if kind.pp > 1 else "")
        yield _colour(c), f"rollout, {kind.device}, {ways}, batch {kind.batch_cap}"
    if sum(plan.used.values()) < sum(plan.fleet.stock.values()):
        yield _IDLE, "idle"


# --- Figures --------------------------------------------------------------------------------------------------------


def _lengths(plan: Plan) -> Figure:
    """Draw the share of samples of each length bucket, stacked by kind of replica."""
    rate = plan.solution.steps_per_s * plan.workload.batch_size
    ends = [bucket.max_tokens for bucket in plan.workload.buckets]
    names = [f"{low:,}–{high:,}" for low, high in zip([1, *(end + 1 for end in ends)], ends, strict=False)]
    data = []
    for c, kind in enumerate(plan.problem.replica_kinds):
        shares = [x / rate for x in plan.solution.rates[c]]
        name = f"{kind.device}, tp {kind.tp}, batch {kind.batch_cap}"
        trace = bar([], shares, name, _colour(c)) | {"x": names, "hovertemplate": "%{y:.1%}"}
        data.append(trace)
    return figure(
        data,
        height=290,
        barmode="stack",
        xaxis=axis("response tokens", showgrid=False, type="category"),
        yaxis=axis("share of samples", tickformat=".0%"),
        hovermode="x unified",
    )


def _bars(plan: Plan) -> Figure:
    """Draw the rate of the plan above those of its alternatives."""
    per_step = step_tokens(plan.workload)
    entries = [("this plan", plan.solution.steps_per_s), *((a.name, a.steps_per_s) for a in plan.alternatives)]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [rate * per_step for _, rate in reversed(entries)],
        "y": [escape(name) for name, _ in reversed(entries)],
        "marker": {"color": ["--soft"] * (len(entries) - 1) + ["--blue"]},
        "hovertemplate": "%{x:,.0f} tokens/s<extra></extra>",
    }
    height = 90 + 34 * len(entries)
    return figure([trace], height=height, xaxis=axis("tokens per second", rangemode="tozero"), yaxis=axis())


_ROUND_HEADS = ("round", "training step, s", "weight update, s", "steps/hour")


def _round_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            str(number),
            f"{r.assumed_step_s:,.1f} → {r.step_s:,.1f}",
            f"{r.assumed_sync_s:,.2f} → {r.sync_s:,.2f}",
            f"{3600 * r.assumed_steps_per_s:,.2f} → {3600 * r.steps_per_s:,.2f}",
        )
        for number, r in enumerate(plan.rounds, start=1)
    ]
