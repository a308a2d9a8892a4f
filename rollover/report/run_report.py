"""The report of one run: ``report.html`` next to its metrics, to read and to share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollover.report import health, measures, run_figures
from rollover.report.colours import WASTE_COLOURS
from rollover.report.measures import StepWindow
from rollover.report.member_lanes import has_members, member_lanes
from rollover.report.page import Page, alarm_list, details, fate_bar, header, preformatted, table, tiles, write_page
from rollover.report.record import RunRecord, read_run
from rollover.report.sample_cards import read_cards
from rollover.report.summary import (
    Accuracy,
    RunSummary,
    bytes_text,
    number,
    summarize,
    summary_rows,
    took_text,
)
from rollover.report.timeline import Timeline
from rollover.report.timeline_figure import gantt

FILE_NAME = "report.html"
WINDOW_STEPS = 6
_MAX_WINDOWS = 6

_LEARNING = (
    "Left: over training steps; right: over wall-clock, including evaluations. A method that learns the same per"
    " step but steps faster is ahead only on the right. Bars on the accuracy are standard errors."
)
_SAMPLES = (
    "Of the newest batch, the longest responses, the worst by their reward, the most changed (those whose tokens were"
    " sampled by the oldest weights on average; the log-probs of the trained policy are not on record), and some at"
    " random. A token's tooltip is the log-prob with which it was sampled; a stretch shows its version. By gradient,"
    " tokens without a gradient are struck out; tokens that a correction rejected are not on record. For other steps:"
    " rollover samples RUN --step N."
)
_TIMELINE = (
    "Each bar is a sample, coloured by the policy version that sampled it; a thin line is a sample parked"
    " until a later step. A row that changes colour without ending was rolled over to newer weights. A cross means"
    " never trained. Shaded: training and publishing; a dashed line is a restart. Below: the samples decoding at"
    " each moment; the area missing under a falling curve is idle engine time. Drag to zoom, double-click to go"
    " back."
)
_MEMBERS = (
    "One lane for each member of the swarm, or each server: every thin bar is a sample that it decoded, coloured by the"
    " policy version. A vertical mark is a change to newer weights; in an empty stretch, the member was away or had"
    " no call. The staleness of the batches comes from members of different colours at the same moment."
)
_LAG = (
    "The number of versions by which tokens were older than the weights they trained; 0 is on-policy. Head lag is the"
    " lag of a sample's oldest token: a line that keeps rising means that some samples are passed over again"
    " and again. All tokens of the batches count here, including those without a gradient."
)
_TOKENS = (
    "Every decoded token is trained (it had a gradient), wasted with a cause, or still alive. If the trained"
    " lengths fall short of the generated ones, the schedule favours short answers. Generated responses are those"
    " that ended or were given up; parked ones go on. Mean trained over mean generated here: {drift}."
)
_TIME = (
    "The phases of a training step. If the first one is large, rollout is the bottleneck; the gap between"
    " the two throughputs is the cost of training, publishing and idling."
)
_HEALTH = (
    "Signals to check when learning stalls. An entropy that falls to almost 0 leaves groups of equal responses. A"
    " surprise that stays below the entropy comes from an engine that draws from a part of the distribution (top_k,"
    " top_p, a lower temperature), or from a selection of responses. KL divergences and a small effective sample size"
    " measure how far the trained policy is from the weights that sampled. Right answers that are shorter or longer"
    " than wrong ones pull the length of all responses with them. Curves that are 0 throughout are left out."
)


def write_report(run_dir: Path, record: RunRecord | None = None) -> Path:
    """Write ``run_dir/report.html`` from what the directory holds so far, and return its path. ``record``: its
    contents, if they were read already. Raises ``RunError`` if it is not a run directory, or one of its files is
    damaged."""
    record = record or read_run(run_dir)
    page = render_report(record, read_cards(run_dir))
    return write_page(run_dir / FILE_NAME, page, private=True)  # it has prompts and responses, as the journal has


def render_report(record: RunRecord, samples: str = "", *, is_live: bool = False) -> str:
    """Render the page of a run.

    Args:
        samples: the samples to read, as HTML.
        is_live: whether the page replaces itself by what its server has later.
    """
    summary = summarize(record.metrics, record.timeline, record.config)
    page = Page(f"{record.name} · Rollover")
    facts = [f"{key.replace('_', ' ')} {value}" for key, value in record.meta.items() if key not in _NOT_SHOWN]
    page.add(header("Rollover run", record.name, [took_text(summary), *facts]))
    page.add(alarm_list(summary.alarms))
    page.add(tiles(_key_numbers(summary)))
    _learning(page, record)
    _timeline(page, record)
    if samples:
        page.section("Samples", _SAMPLES, samples, layout="column")
    lag = page.figure("Lag of trained tokens", run_figures.lag_histogram(record), "No batch has been trained yet.")
    lags = page.figure("Lag over steps", run_figures.lag_over_steps(record), "No batch has been trained yet.")
    page.section("Lag", _LAG, lag, lags)
    _tokens(page, record, summary)
    times = page.figure("Time per step", run_figures.time_split(record), "No step has ended yet.")
    speeds = page.figure("Throughput", run_figures.throughput(record), "No step has ended yet.")
    page.section("Time", _TIME, times, speeds)
    _health(page, record)
    page.add("<section><h2>All numbers</h2>")
    page.add(f'<div class="card">{table(summary_rows(summary))}</div>')
    page.add(details("Resolved configuration", preformatted(record.config)))
    page.add("</section>")
    return page.render(is_live=is_live)


_NOT_SHOWN = ("datasets", "identity", "takes_turns", "knows_rewards")
"""Facts for the check of a resumed run, or for simulations, that mean nothing to a reader."""


def _key_numbers(s: RunSummary) -> list[tuple[str, str, str, str]]:
    lag = s.lag
    off_policy = f"p95 {lag.p95}, max {lag.max}; {lag.off_policy_fraction:.0%} of tokens off-policy" if lag else ""
    decoded = f"trained, of the whole loop; rollout decodes {number(s.rollout_tokens_per_s, ',.0f')}/s"
    without_gradient = f"{s.fraction(s.without_gradient):.1%} without a gradient"
    prefilled = f"{s.reprefilled_tokens:,} tokens prefilled again"
    return [
        ("Held-out accuracy", *_accuracy_tile(s.accuracy_before, s.accuracy_after)),
        ("Training throughput", number(s.trained_tokens_per_s, ",.0f"), "tokens/s", decoded),
        ("Lag", number(lag.batch if lag else None, ".2f"), "versions", off_policy or "no batch yet"),
        ("Wasted by the rollout", f"{s.fraction(s.wasted_by_rollout):.1%}", "of tokens", without_gradient),
        ("Resumes", number(s.resumes_per_sample, ".2f"), "per sample", prefilled),
        ("Peak memory", bytes_text(s.peak_memory_bytes).removesuffix(" GiB"), "GiB", "of the run's own process"),
    ]


def _accuracy_tile(before: Accuracy | None, after: Accuracy | None) -> tuple[str, str, str]:
    if before is None:
        return "–", "", "no evaluation yet"
    if after is None:
        return f"{before.value:.1%}", "", f"{_se(before)} (standard error) at step {before.step}"
    note = f"{_se(before)} and {_se(after)} (standard errors)"
    return f"{100 * before.value:.1f} → {after.value:.1%}", "", note


def _se(accuracy: Accuracy) -> str:
    return "± ?" if accuracy.se is None else f"± {100 * accuracy.se:.1f}"


def _learning(page: Page, record: RunRecord) -> None:
    named = [(title, run_figures.by_name(record, prefix)) for prefix, title in _BY_NAME]
    page.section(
        "Learning",
        _LEARNING,
        page.figure("Over steps", run_figures.learning(record, over_time=False), "Nothing measured yet."),
        page.figure("Over wall-clock", run_figures.learning(record, over_time=True), "Nothing measured yet."),
        *(page.figure(title, figure, "") for title, figure in named if figure is not None),
    )


_BY_NAME = (
    ("reward/source/", "Reward by source, smoothed"),
    ("reward/component/", "Reward by component, smoothed"),
    ("pass_rate/source/", "Pass rate by source, smoothed"),
)
"""Metrics of which there is one for each name, and the titles of their figures."""


def _timeline(page: Page, record: RunRecord) -> None:
    found = measures.windows(record.timeline, num_steps=WINDOW_STEPS, max_windows=_MAX_WINDOWS)
    origin_s = run_figures.origin_s(record)
    drawn = [gantt(record.timeline, w, origin_s=origin_s) for w in found]
    labels = [f"steps {w.first_step}–{w.last_step}" if w.first_step >= 0 else "before the first step" for w in found]
    page.section(
        "Rollout timeline",
        _TIMELINE,
        page.figure("", drawn, "No sample has been decoded yet.", labels=labels, pressed=most_resumed(found)),
    )
    if has_members(record.timeline):
        lanes = [member_lanes(record.timeline, w, origin_s=origin_s) for w in found]
        page.section(
            "Members",
            _MEMBERS,
            page.figure("", lanes, "No sample has been decoded yet.", labels=labels, pressed=most_resumed(found)),
        )


def most_resumed(found: Sequence[StepWindow]) -> int:
    """Return the index of the window in which most samples were resumed, the first of several."""
    return max(range(len(found)), key=lambda i: found[i].num_resumes, default=0)


def _tokens(page: Page, record: RunRecord, summary: RunSummary) -> None:
    fate = fate_bar(_fates(record.timeline, summary))
    cards = [
        f'<div class="card"><h3>Where the {summary.decoded_tokens:,} decoded tokens went</h3>{fate}</div>',
        page.figure("Response lengths", run_figures.lengths(record), "No sample has been decoded yet."),
    ]
    if summary.wasted_tokens:
        cards.append(page.figure("Waste by cause", run_figures.waste_over_time(record), "Nothing was wasted so far."))
    page.section("Tokens", _TOKENS.format(drift=number(summary.length_drift, ".2f")), *cards)


def _fates(timeline: Timeline, summary: RunSummary) -> list[tuple[str, str, int]]:
    fates = [("trained", "--blue", timeline.trained_tokens)]
    if timeline.live_tokens:
        fates.append(("alive: parked or ready", "--green", timeline.live_tokens))
    for cause, tokens in summary.wasted_tokens.items():
        fate = "wasted by the rollout" if cause.is_by_rollout else "without a gradient"
        fates.append((f"{fate}: {cause.replace('_', ' ')}", WASTE_COLOURS[cause], tokens))
    return fates


def _health(page: Page, record: RunRecord) -> None:
    drawn = [(title, run_figures.small(record, curves)) for title, curves in health.FIGURES]
    drawn.append(("Mean response length by reward, tokens", run_figures.lengths_by_reward(record)))
    cards = [page.figure(title, figure, "") for title, figure in drawn if figure is not None]
    if cards:
        page.section("Health", _HEALTH, *cards, layout="grid small")
