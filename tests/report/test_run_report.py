"""The pages are well-formed, self-contained, safe against what data says, and work for any part of a run."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from rich.console import Console

from rollover import cli
from rollover.errors import RunError
from rollover.report import health, run_figures, sample_cards
from rollover.report.colours import version_colours
from rollover.report.comparison import compare_tables
from rollover.report.measures import evenly, lengths_by_reward, window_of, windows
from rollover.report.metrics import MetricRow, MetricsWriter
from rollover.report.page import Page, write_page
from rollover.report.plot import smoothed
from rollover.report.record import read_run
from rollover.report.run_figures import MAX_POINTS
from rollover.report.run_report import render_report, write_report
from rollover.report.summary import summarize, summary_table
from rollover.report.timeline import Timeline
from rollover.report.timeline_figure import MAX_SPANS, gantt, thinned
from rollover.rollout.events import BatchConsumed, Event, Restarted, SampleScored
from rollover.types import FinishReason, SampleId
from tests.environments.words import char_tokenizer
from tests.report.synthetic import Simulation, recorded, steps, write_run
from tests.report.test_timeline import ROLLED_OVER, ended, opened, started

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
_VOID = {"meta", "br", "img", "link", "hr", "input"}


class _Checker(HTMLParser):
    """Fails on an element that is closed out of order; collects what a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "action")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        self.ids += [v or "" for k, v in attrs if k == "id"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes {self.open[-1:]}"


def _checked(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    return checker


def figures_of(page: str) -> dict[str, list[dict[str, Any]]]:
    [packed] = re.findall(r'<script type="text/plain" id="figures">(.*?)</script>', page, re.S)
    return dict(json.loads(gzip.decompress(base64.b64decode(packed))))


@pytest.fixture(scope="module")
def april(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "april", Simulation(num_steps=12))


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "sync", Simulation(num_steps=12, strategy="sync"))


def test_the_report_is_one_well_formed_file_that_loads_nothing(april: Path) -> None:
    path = write_report(april)
    assert path == april / "report.html" and not (april / "report.html.part").exists()
    page = path.read_text()
    checker = _checked(page)
    assert checker.references == [] and checker.handlers == []
    assert checker.seen.count("script") == 3
    assert "default-src 'none'" in page


def test_every_figure_has_its_place_and_is_valid_plotly(april: Path) -> None:
    page = render_report(read_run(april))
    drawn = figures_of(page)
    assert len(drawn) >= 12
    assert set(drawn) <= set(_checked(page).ids)
    for variant in (v for variants in drawn.values() for v in variants):
        coloured = json.loads(re.sub(r'"--[a-z]+"', '"#123456"', json.dumps(variant)))
        go.Figure(coloured)


def test_colours_named_by_figures_are_known_to_the_page(april: Path) -> None:
    page = render_report(read_run(april))
    assets = Path(run_figures.__file__).parent / "assets"
    names = set(re.findall(r'"--([a-z]+)"', json.dumps(figures_of(page))))
    css, script = (assets / "page.css").read_text(), (assets / "page.js").read_text()
    for name in names:
        assert css.count(f"--{name}:") == 2, f"{name} needs a light and a dark value"
        assert f'"{name}"' in script


def test_nothing_from_data_becomes_markup() -> None:
    rows = (
        MetricRow(kind="eval", step=0, time_s=0.0, values={f"accuracy/{EVIL}": 0.5, "accuracy/b": 0.5}),
        MetricRow(kind="step", step=0, time_s=1.0, values={"reward/mean": 0.5}),
    )
    group = opened(0, 1)
    group = group._replace(prompt=replace(group.prompt, prompt_id=EVIL, text=EVIL, source=EVIL))
    events = [group, started(0, 0, 1.0, 0), ended(0, 0, 1.0, 2.0, 0, 5, None)]
    page = render_report(replace(recorded(events, rows, name=EVIL, **{EVIL: EVIL}), meta={EVIL: EVIL}))
    checker = _checked(page)
    assert checker.seen.count("script") == 3 and "img" not in checker.seen and checker.handlers == []
    shown = json.dumps(figures_of(page))
    assert "<script" not in shown and "<img" not in shown


def test_a_figure_has_no_nan() -> None:
    page = Page("run")
    page.figure("", {"data": [float("nan"), float("inf"), 1.5], "layout": {"height": 1}}, "")
    assert [drawn["data"] for [drawn] in figures_of(page.render()).values()] == [[None, None, 1.5]]


def test_the_command_prints_the_alarms(april: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(april, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    nothing = {"reward/mean": 0.0, "reward/std": 0.0, "reward/groups_with_signal": 0.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | nothing) + "\n" for row in rows))
    assert cli.main(["report", str(run)]) == 0
    alarm, path = capsys.readouterr().out.splitlines()
    assert alarm.startswith("alarm: every reward of the last 10 steps is 0: ") and path == f"report: {run}/report.html"


@pytest.mark.parametrize("missing", ["metrics.jsonl", "journal.sqlite", "both"])
def test_a_report_is_made_from_whatever_there_is(april: Path, tmp_path: Path, missing: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(april, run)
    for name in ("metrics.jsonl", "journal.sqlite"):
        if missing in (name, "both"):
            for file in run.glob(name + "*"):
                file.unlink()
    page = write_report(run).read_text()
    _checked(page)
    if missing == "both":
        assert figures_of(page) == {} and "No sample has been decoded yet." in page


@pytest.mark.parametrize("cut", range(len(ROLLED_OVER) + 1))
def test_a_run_can_be_reported_at_any_moment(cut: int) -> None:
    _checked(render_report(recorded(ROLLED_OVER[:cut])))


def test_a_journal_that_lacks_an_event_is_named(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", Simulation(num_steps=1))
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        db.execute("DELETE FROM events WHERE kind = 'GroupOpened'")
    with pytest.raises(RunError, match=r"journal\.sqlite lacks an event that later ones follow from.*from a copy"):
        read_run(run_dir)


def test_the_only_point_of_a_curve_is_visible(tmp_path: Path) -> None:
    """After one step every curve of metrics is one point, and a line through one point is not seen."""
    page = render_report(read_run(write_run(tmp_path / "one", Simulation(num_steps=1))))
    drawn = [each for variants in figures_of(page).values() for v in variants for each in v["data"]]
    points = [each for each in drawn if each["type"] == "scatter" and len(each["x"]) == 1]
    assert {c["name"] for c in points} >= {"reward (smoothed)", "token lag, mean", "trained, of the whole loop", "loss"}
    for curve in points:
        assert "markers" in curve["mode"] and curve["marker"]["size"] > 0, curve["name"]
    assert "1 step in" in page


def test_a_run_of_2000_steps_is_drawn_with_a_bounded_number_of_points(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", Simulation(num_steps=2000, groups_per_step=2))
    page = render_report(read_run(run))
    for name, variants in figures_of(page).items():
        for drawn in variants:
            if any("decoding" in d.get("hovertemplate", "") for d in drawn["data"]):
                continue  # the timeline shows a few steps, each change of the samples decoding
            assert max(len(d["x"]) for d in drawn["data"]) <= 2 * MAX_POINTS, name
    assert len(json.dumps(figures_of(page))) < 0.5e6


def test_a_report_of_500_steps_has_less_than_2_megabytes(tmp_path: Path) -> None:
    """Timeline and members are drawn to their limits, and so would be samples of 800 tokens and more."""
    run = write_run(tmp_path / "long", Simulation(num_steps=500, groups_per_step=11, engine="gpu-2"))
    char_tokenizer().save_pretrained(run / "model")
    names = [f"{kind}/source/{i}" for kind in ("reward", "pass_rate") for i in range(6)]
    names += ["entropy", "surprise", *(f"entropy/end_{n}" for n in (0, 16, 64, 256)), "kl/ref", "clip/low", "clip/high"]
    with MetricsWriter(run) as writer:
        for step in range(500):
            writer.write("step", step, float(step), {name: 0.1 + 0.01 * (step % 31) for name in names})
    page = write_report(run).read_text()
    assert page.count('<details class="card sample">') == 12
    spans = [sum(len(d["x"]) for d in v["data"] if d["type"] == "bar") for vs in figures_of(page).values() for v in vs]
    assert max(spans) > 0.8 * MAX_SPANS
    longest_samples = 12 * sample_cards.MOST_TOKENS * len('<i class="p0" title="-0.50">token</i>')
    assert len(page.encode()) + longest_samples < 2e6


def test_rewards_and_pass_rates_are_drawn_by_source_and_component() -> None:
    values = {"reward/source/sums": 0.5, "reward/source/words": 0.25, "pass_rate/source/sums": 0.75}
    values |= {"reward/component/format": 1.0}
    drawn = [v["data"] for (v, *_) in figures_of(render_report(recorded((), steps(*[values] * 3)))).values()]
    curves = [{d["name"]: d["y"] for d in data} for data in drawn]
    assert {"sums": [0.5] * 3, "words": [0.25] * 3} in curves
    assert {"format": [1.0] * 3} in curves and {"sums": [0.75] * 3} in curves


def test_health_draws_what_is_measured_and_not_0_throughout() -> None:
    values = {"reward/groups_with_signal": 0.75}
    values |= dict.fromkeys(("response/truncated", "clip/low", "clip/high", "loss"), 0.0)
    record = recorded((), steps(*[values] * 3))
    found = {title: run_figures.small(record, curves) for title, curves in health.FIGURES}
    drawn = {title: [(d["name"], d["y"]) for d in figure["data"]] for title, figure in found.items() if figure}
    assert drawn == {
        "Share without signal, share cut at the limit": [("groups of equal rewards", [0.25] * 3)],
        "Loss": [("loss", [0.0] * 3)],
    }


@pytest.mark.parametrize("right", [1.0, 1.7e308])  # journals of earlier versions hold any finite rewards
def test_lengths_by_reward_compare_with_the_mean_of_the_batch(right: float) -> None:
    events: list[Event] = [opened(0, 3)]
    for i, (tokens, reward) in enumerate([(10, right), (30, right), (50, 0.0)]):
        events += [
            started(0, i, 0.0, 0),
            ended(0, i, 0.0, 1.0, 0, tokens, FinishReason.STOP),
            SampleScored(1.0, SampleId(0, i), reward),
        ]
    events.append(BatchConsumed(2.0, 0, (0,)))
    assert lengths_by_reward(Timeline.of(events).samples) == [(0.0, (20.0, 50.0))]


def test_alarms_are_at_the_top_of_the_page_and_in_the_closing_summary() -> None:
    values = {"reward/mean": 0.0, "reward/groups_with_signal": 0.0}
    record = recorded((), steps(*[values] * 10))
    page, out = render_report(record), io.StringIO()
    assert "<li>every reward of the last 10 steps is 0" in page[: page.index("Held-out accuracy")]
    Console(file=out, width=200).print(summary_table(record, summarize(record.metrics, record.timeline)))
    assert "every reward of the last 10 steps is 0: rewards teach nothing." in out.getvalue()


def test_the_timeline_draws_spans_by_version_and_gaps_as_parked() -> None:
    timeline = Timeline.of(ROLLED_OVER)
    drawn = gantt(timeline, window_of(timeline, 0, 1), origin_s=1.0)
    bars = {d["name"]: d for d in drawn["data"] if d["type"] == "bar"}
    assert set(bars) == {"parked", "v0", "v1"}
    assert sorted(zip(bars["v1"]["base"], bars["v1"]["x"], strict=True)) == [(4.5, 0.5), (4.5, 1.5)]
    assert list(zip(bars["parked"]["base"], bars["parked"]["x"], strict=True)) == [(2.5, 2.0), (2.5, 2.0)]
    assert bars["v0"]["y"][1:] == bars["v1"]["y"], "a sample keeps its row"
    assert [(s["x0"], s["x1"]) for s in drawn["layout"]["shapes"]] == [(3.0, 4.0)]


def test_a_crowded_window_is_thinned_by_whole_groups() -> None:
    events: list[Event] = []
    for group in range(2 * MAX_SPANS):
        events += [opened(group, 2)]
        for i in range(2):
            events += [started(group, i, 0.0, 0), ended(group, i, 0.0, 1.0 + group, 0, 1, None)]
    timeline = Timeline.of(events)
    (window,) = windows(timeline, num_steps=6, max_windows=6)
    kept, every = thinned(timeline.samples)
    assert every == 4 and len(kept) == MAX_SPANS
    assert {s.sample_id.group % 4 for s in kept} == {0}
    assert gantt(timeline, window, origin_s=0.0)["layout"]["yaxis"]["title"]["text"] == "samples (one group in 4)"


def test_neighbouring_versions_get_different_colours() -> None:
    for count in (1, 2, 7, 30):
        assert len(set(version_colours(range(count)).values())) == count


def test_smoothing_leaves_a_straight_line_alone_and_spreads_a_peak() -> None:
    line = [float(i) for i in range(20)]
    assert smoothed(line) == line
    assert smoothed([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0]) == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert smoothed([]) == []


def test_a_long_curve_keeps_its_values_at_even_times() -> None:
    curve = tuple((i / 100, i % 7) for i in range(1001))
    assert evenly(curve, 11) == tuple((float(t), (100 * t) % 7) for t in range(11))
    assert evenly(((0.0, 5), (0.5, 9), (0.6, 7), (2.0, 7)), 3) == ((0.0, 5), (1.0, 7), (2.0, 7))


def test_a_restart_is_marked_in_the_timeline() -> None:
    events = [*ROLLED_OVER, Restarted(time_s=8.0, step=2, redo_from=None, lost_tokens=0)]
    timeline = Timeline.of(events)
    shapes = gantt(timeline, window_of(timeline, 0, 1), origin_s=1.0)["layout"]["shapes"]
    assert [(s["x0"], s["x1"]) for s in shapes if s["type"] == "line"] == [(7.0, 7.0)]


def test_a_comparison_gives_ratios_to_the_first_run(sync: Path, april: Path) -> None:
    records = [read_run(sync), read_run(april)]
    base, other = (summarize(r.metrics, r.timeline).trained_tokens_per_s for r in records)
    assert base is not None and other is not None
    (table,) = compare_tables(records, 80)
    names, *columns = ([*column.cells] for column in table.columns)
    rows = {name: cells for name, *cells in zip(names, *columns, strict=True)}
    assert other > 1.2 * base
    assert rows["trained tokens/s, whole loop"] == [f"{base:,.0f}", f"{other:,.0f} ({other / base:.2f}×)"]
    assert rows["lag, mean over batches (versions)"][0] == "0.00" and "→" in rows["reward, first → last tenth"][1]


@pytest.mark.parametrize("width", [70, 80, 120])
def test_nothing_of_a_comparison_is_cut_on_a_narrow_terminal(sync: Path, april: Path, width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(*compare_tables([read_run(sync), *[read_run(april)] * 12], width))
    assert "…" not in out.getvalue()
    assert all(f"april ({i})" in out.getvalue() for i in range(2, 14)), "each name in one piece"
    assert max(map(len, out.getvalue().splitlines())) <= width


def test_a_comparison_is_printed_again(sync: Path, april: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"meta": {}, "variants": {"a": {}, "b": {}, "not begun": {}}}))
    (tmp_path / "a").symlink_to(sync)
    (tmp_path / "b").symlink_to(april)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path), "--open"]) == 2
    assert "ratios are to" in (said := capsys.readouterr().out) and "reward, first" in said


def test_reports_need_no_torch() -> None:
    code = (
        "import sys, rollover.report.run_report, rollover.report.comparison, rollover.report.sinks,"
        " rollover.report.progress; print('torch' in sys.modules, 'plotly' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_page_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    page, link = tmp_path / "elsewhere" / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    for text in ("first", "second"):
        assert write_page(link, text) == link and link.is_symlink() and page.read_text() == text
    assert {path.name for path in tmp_path.rglob("*")} == {"elsewhere", "page.html", "link.html"}
