"""A study for the terminal, as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from statistics import fmean
from typing import Any

from rich.table import Table

from rollover.frontier import figures
from rollover.frontier.advice import Advice, bound, frontier, is_fair
from rollover.frontier.refine import TOLERANCE
from rollover.frontier.settings import label, name_of
from rollover.frontier.study import Study
from rollover.frontier.sweep import FrontierPoint
from rollover.report.page import Page, finite, header, table, tiles

_FRONTIER = (
    "Each point is a setting of a strategy, simulated on the same lengths as all others; along a line, more and more"
    " is carried over. Up is faster, left is fresher. Nothing lies above the ceiling, where engines would only read"
    " caches. Bars are 95% intervals of the paired ratio over seeds."
)
_FIGURES: dict[str, Callable[[FrontierPoint, float], str]] = {
    "gain": lambda p, _: f"{p.gain.mean:.2f}×" + ("" if p.gain.margin is None else f" ±{p.gain.margin:.2f}"),
    "tokens/{unit}": lambda p, _: f"{p.mean('tokens_per_s'):,.0f}",
    "of ceiling": lambda p, ceiling: f"{p.mean('tokens_per_s') / ceiling:.0%}",
    "batch": lambda p, _: f"{p.lag_over('batch'):.2f}",
    "token": lambda p, _: f"{p.lag_over('token'):.2f}",
    "group": lambda p, _: f"{p.lag_over('group'):.2f}",
    "head": lambda p, _: f"{p.lag_over('head'):.2f}",
    "max": lambda p, _: f"{p.max_lag}",
    "p95": lambda p, _: f"{p.lag_over('p95'):.1f}",
    "off-policy": lambda p, _: f"{p.lag_over('off_policy_fraction'):.0%}",
    "wasted": lambda p, _: f"{sum(p.wasted.values()):.0%}",
    "prefilled": lambda p, _: f"{p.mean('prefilled'):.2f}",
    "length": lambda p, _: f"{p.mean('trained_length') / fmean(b.trained_length for b in p.baseline):.2f}",
    "K": lambda p, _: f"{p.mean('iterations'):,.0f}",
}
"""Columns of the table: name, and a function of a point and the setup's ceiling."""
HEAD = ("setting", *_FIGURES)
FIRST_TO_GO = (
    *("p95", "group", "head", "K", "prefilled", "token", "max", "batch", "off-policy"),
    *("tokens/{unit}", "of ceiling"),
)
"""Columns that a narrow terminal omits, in this order, but for the lag that counts. Gain, this lag, waste and length
bias are always shown together."""


def rows(study: Study) -> list[tuple[FrontierPoint, tuple[str, ...]]]:
    """Return one row per setting; the columns are ``HEAD``'s."""
    ceiling = study.ceiling
    return [
        (p, (label(p.config) + _mark(study, p), *(shown(p, ceiling) for shown in _FIGURES.values())))
        for p in study.points
    ]


def _mark(study: Study, point: FrontierPoint) -> str:
    marks = ["in use"] if point is study.current and study.setup.is_in_use else []
    marks += ["recommended"] if any(point is a.chosen for a in study.advice) else []
    return f" ({', '.join(marks)})" if marks else ""


def study_table(study: Study, width: int) -> Table:
    """Return the table with as many columns as fit in ``width`` characters, and a note on the columns left out."""
    found = rows(study)
    names = [name.format(unit=study.setup.unit) for name in HEAD]
    widths = [max(map(len, column)) for column in zip(names, *(cells for _, cells in found), strict=True)]
    places = _fitting(widths, width, kept=study.setup.lag_of)
    left_out = [names[place] for place in range(len(HEAD)) if place not in places]
    shown = Table(title=headline(study), title_justify="left", title_style="bold", caption_justify="left")
    if left_out:
        shown.caption = f"{', '.join(left_out)}: see the page or a wider terminal"
    for place in places:
        shown.add_column(names[place], justify="right" if place else "left", no_wrap=True)
    strategy = None
    for point, cells in found:
        if strategy not in (None, name_of(point.config)):
            shown.add_section()
        strategy = name_of(point.config)
        chosen = any(point is a.chosen for a in study.advice)
        shown.add_row(*(cells[place] for place in places), style="bold" if chosen else None)
    return shown


def _fitting(widths: Sequence[int], width: int, kept: str) -> list[int]:
    """Choose the columns that stay: each takes its characters and three for its rule and its margins."""
    places = list(range(len(widths)))
    for name in FIRST_TO_GO:
        if name == kept:
            continue
        if 1 + sum(widths[place] + 3 for place in places) <= width:
            break
        places.remove(HEAD.index(name))
    return places


def headline(study: Study) -> str:
    r, length = study.setup.rollout, study.length
    seeds = f"{study.num_seeds} seed{'s' * (study.num_seeds > 1)}"
    return (
        f"{study.setup.name}: {r.rollout_batch_size} groups of {r.group_size}, responses of at most"
        f" {study.setup.cap_tokens:,} tokens; {length.steps} steps, the first {length.warmup} excluded, {seeds}"
    )


def legend() -> str:
    return (
        "gain: trained tokens per time over sync, paired; batch, token, group: lag in versions, mean over batches,"
        " tokens, groups; head: lag of a group's oldest token; wasted: of decoded tokens; prefilled: tokens per trained"
        " token, prompts included; length: trained over admitted mean, 1 means no bias; K: iterations per step"
    )


def recommendation(advice: Advice) -> str:
    within = "" if advice.lag_budget is None else f"For a {advice.chosen.lag_of} lag of at most {advice.lag_budget:g}: "
    return within + advice.sentence()


def rivals(study: Study, advice: Advice) -> str:
    """Say what the other strategies reach at the requested lag, each with its fastest setting within it, and which of
    them have no setting close to it. Empty if no lag was requested."""
    budget = advice.lag_budget
    if budget is None:
        return ""
    said = []
    for name in study.strategies:
        fair = [p for p in study.of(name) if is_fair(p) and p.lag <= budget]
        if name in ("sync", name_of(advice.config)) or not fair:
            continue
        best = frontier(fair)[-1]
        said.append(
            f"{label(best.config)} {best.gain.mean:.2f} times at {best.lag:.2f}{_gap(study.of(name), best, budget)}"
        )
    return f"Others within this lag: {'; '.join(said)}." if said else ""


def _gap(points: Sequence[FrontierPoint], best: FrontierPoint, lag: float) -> str:
    """Return why the fastest fair setting of a strategy stays far below ``lag``; empty if it does not."""
    beyond = [p.lag for p in points if p.lag > lag]
    if best.lag >= (1 - TOLERANCE) * lag or not beyond:
        return ""
    if any((1 - TOLERANCE) * lag <= p.lag <= lag for p in points):
        return " (at more lag it trains shorter responses)"
    return f" (no setting lies between that and {min(beyond):.2f})"


def render_study(study: Study, extra: tuple[str, ...] = ()) -> str:
    """Return the page; ``extra`` are sentences to put in its header."""
    page = Page(f"{study.setup.name} · Rollover simulation")
    page.add(header("Rollover simulation: nothing here was measured", study.setup.name, [headline(study), *extra]))
    page.add(tiles(_key_numbers(study)))
    cards = [
        f'<div class="card"><p>{escape(recommendation(a))}</p><p class="caption">{escape(rivals(study, a))}</p><br>'
        f"<pre>{escape(a.toml())}</pre></div>"
        for a in study.advice
    ]
    page.section("Recommendation", f"Ready to paste into a run's config. {study.instead}", *cards)
    head = [name.format(unit=study.setup.unit) for name in HEAD]
    numbers = f"{table([cells for _, cells in rows(study)], head)}<p class='caption'>{escape(legend())}</p>"
    drawn = page.figure("", figures.frontier(study), "")
    page.section("Throughput against lag", _FRONTIER, drawn, f'<div class="card">{numbers}</div>', layout="column")
    notes = "".join(f"<li>{escape(note)}</li>" for note in assumptions(study))
    page.add(f'<section><h2>Assumptions</h2><div class="card"><ul>{notes}</ul></div></section>')
    return page.render()


def assumptions(study: Study) -> list[str]:
    scenario = study.setup.scenario
    kept = "survive weight updates" if scenario.kv_on_update == "keep" else "are recomputed after each weight update"
    found = [*study.setup.notes, f"Caches of unfinished samples {kept}."]
    if scenario.colocated:
        found.append("Replicas and trainer take turns on the same devices.")
    if study.setup.takes_turns:
        found.append("Trainer and engine took turns: strategies that decode during training are left out.")
    if study.setup.has_own_trainer:
        found.append("The trainer has devices of its own: rollover goes on decoding while it trains (overlap = true).")
    if scenario.trainer.is_zero:
        found.append("Training takes no time: gains are of the rollout alone. Set [trainer] in a scenario file.")
    return found


def _key_numbers(study: Study) -> list[tuple[str, str, str, str]]:
    advice, sync, theory = study.advice[-1], study.sync, study.theory
    ceiling = study.ceiling / sync.mean("tokens_per_s")
    strategy, _, value = label(advice.config).partition(" ")
    value = value.replace("=", " = ") or "on-policy"
    knob = advice.config.strategy.knob
    is_free = study.setup.max_staleness is None and (knob is None or knob.key != "max_staleness")
    held = f"max_staleness = {bound(advice.chosen)}" + " never held it back" * is_free
    return [
        ("Recommended", value, "", f"{strategy}; {held}"),
        ("Gain", f"{advice.chosen.gain.mean:.2f}", "× sync", f"{advice.share:.0%} of the fastest setting's gain"),
        ("Lag", f"{advice.chosen.lag:.2f}", "versions", f"{advice.best.lag:.2f} at the fastest setting"),
        ("Ceiling", f"{ceiling:.2f}", "× sync", "engines that only read caches, a trainer that never waits"),
        ("Sync step", f"{theory.sync_iterations:,.0f}", "iterations", "the mean longest response of a batch"),
        ("Lag times K", f"{theory.kappa:,.0f}", "tokens", "in closed form: the price of lag for these lengths"),
    ]


def study_json(study: Study) -> str:
    """Return all figures, by setting and seed, as JSON."""
    setup = study.setup
    content = {
        "simulated": True,
        "workload": setup.name,
        "unit": setup.unit,
        "steps": study.length.steps,
        "warmup": study.length.warmup,
        "scenario": asdict(setup.scenario),
        "rollout": asdict(setup.rollout),
        "assumptions": assumptions(study),
        "ceiling_tokens_per_time": study.ceiling,
        "theory": asdict(study.theory),
        "instead": study.instead,
        "points": [_point_json(p) for p in study.points],
        "advice": [
            {"lag_budget": a.lag_budget, "sentence": a.sentence(), "share_of_gain": a.share, "toml": a.toml()}
            for a in study.advice
        ],
    }
    return json.dumps(finite(content), indent=1) + "\n"


def _point_json(point: FrontierPoint) -> dict[str, Any]:
    return {
        "setting": label(point.config),
        "strategy": point.config.strategy.kind,
        "rollout": asdict(point.config),
        "gain": asdict(point.gain),
        "lag": point.lag,
        "seeds": [asdict(o) for o in point.outcomes],
    }
