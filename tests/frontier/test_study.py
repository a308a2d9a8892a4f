from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from rollover.frontier.figures import _closed_form
from rollover.frontier.report import HEAD, render_study, rows, study_json, study_table
from rollover.frontier.settings import label, setting
from rollover.frontier.study import Study, study
from rollover.frontier.sweep import Length, MeanOverSeeds, Trial, TrialResult, run_trial, run_trials, workers
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency
from tests.frontier.kit import small

LENGTH = Length(steps=15, warmup=5)


@pytest.fixture(scope="module")
def found() -> Study:
    setup = small(name="<i>small</i>")
    return study(setup, ("sync", "oversample", "april", "concurrency"), LENGTH, num_seeds=2)


def test_gains_are_over_synchronous_rollout_on_the_same_lengths(found: Study) -> None:
    assert found.sync.gain == MeanOverSeeds(mean=1.0, margin=0.0)
    april = next(p for p in found.points if label(p.config) == "april r=2")
    setup = found.setup
    for seed in (0, 1):
        outcomes = [
            run_trial(Trial(config=c, seed=seed, lengths=setup.lengths, scenario=setup.scenario), length=LENGTH)
            for c in (april.config, found.sync.config)
        ]
        assert april.outcomes[seed] == outcomes[0]
        assert april.baseline[seed] == outcomes[1]
    ratios = [o.tokens_per_s / b.tokens_per_s for o, b in zip(april.outcomes, april.baseline, strict=True)]
    assert april.gain.mean == pytest.approx(statistics.fmean(ratios))
    assert april.gain.mean > 1.1


def test_a_trial_draws_lengths_and_latencies_from_its_seed() -> None:
    scenario = replace(small().scenario, trainer=Latency(base_s=1.0, sigma=0.5))
    setup = small(scenario=scenario)
    config = setting("april", setup, 2.0)
    for seed in (0, 3):
        trial = Trial(config=config, seed=seed, lengths=setup.lengths, scenario=scenario)
        workload = setup.lengths.workload(seed)
        run = simulate(config.build_strategy(scenario.capabilities), workload, scenario, steps=LENGTH.steps, seed=seed)
        assert run_trial(trial, length=LENGTH) == TrialResult.of(run, LENGTH)


def test_nothing_lies_above_the_ceiling_and_lag_costs_what_it_should(found: Study) -> None:
    assert all(p.mean("tokens_per_s") < found.ceiling for p in found.points)
    for strategy in ("april", "concurrency"):
        lags = [p.lag for p in found.of(strategy)]
        assert lags == sorted(lags)
        assert lags[0] < lags[-1]
        assert not any(p.wasted for p in found.of(strategy))
    assert any(p.wasted for p in found.of("oversample"))
    assert not any(a.chosen.config.strategy == "oversample" for a in found.advice)


def test_the_usual_setting_is_marked_and_the_recommendation_refined(found: Study) -> None:
    assert label(found.current.config) == "april r=2"
    assert len(found.points) > 1 + 5 + 5 + 5  # neighbours of the recommended one beside the grid


def test_the_setting_in_use_takes_the_place_of_the_one_like_it() -> None:
    used = setting("april", small(max_staleness=3), 2.0)
    found = study(small(rollout=used, is_in_use=True), ("sync", "april"), LENGTH, num_seeds=1, lag_budgets=(0.1, 5.0))
    assert found.current.config == used
    assert [label(p.config) for p in found.points].count("april r=2") == 1
    assert [a.lag_budget for a in found.advice] == [0.1, 5.0]
    assert found.advice[0].chosen.lag <= 0.1
    assert found.advice[1].chosen is found.advice[1].best


def test_the_page_says_it_all_and_nothing_in_it_is_markup(found: Study) -> None:
    page = render_study(found)
    for point in found.points:
        assert f"<th>{label(point.config)}" in page
    assert found.advice[0].toml() in page.replace("&quot;", '"')
    assert "&lt;i&gt;small&lt;/i&gt;" in page
    assert "<i>small" not in page
    assert "nothing here was measured" in page


def test_what_the_closed_form_and_a_bound_do_not_say_is_not_shown(found: Study) -> None:
    by_head = replace(found, setup=replace(found.setup, lag_of="head"))
    assert _closed_form(found, 3.0) and not _closed_form(by_head, 3.0)
    usual = render_study(found)
    bounded = render_study(replace(found, setup=replace(found.setup, max_staleness=64)))
    assert "never held it back" in usual and "never held it back" not in bounded


def test_the_json_has_every_seed_and_no_infinity(found: Study) -> None:
    content = json.loads(study_json(found), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [len(p["seeds"]) for p in content["points"]] == [2] * len(found.points)
    assert content["points"][0]["strategy"] == "sync"
    assert content["simulated"] is True


@pytest.mark.parametrize("width", [76, 80, 100, 200])
def test_the_table_shows_whole_columns_of_every_setting(found: Study, width: int) -> None:
    shown = study_table(found, width)
    assert shown.row_count == len(found.points)
    out = StringIO()
    Console(file=out, width=width).print(shown)
    printed = out.getvalue()
    for point, cells in rows(found):
        line = next(line for line in printed.splitlines() if cells[0] in line)
        for place in map(HEAD.index, ("gain", "batch", "wasted", "length")):
            assert f" {cells[place]} " in line, point
        assert cells[HEAD.index("length")] == "1.00" or point != found.sync, "lengths are relative to sync"
    assert "…" not in printed
    assert ("a wider terminal" in printed) == (width < 200)
    assert all(name.format(unit=found.setup.unit) in printed for name in HEAD), "what is left out is named"


def test_processes_find_what_one_finds() -> None:
    setup = small()
    trials = [
        Trial(config=setting("april", setup, r), seed=seed, lengths=setup.lengths, scenario=setup.scenario)
        for r in (1.5, 2.0)
        for seed in (0, 1)
    ]
    done: list[int] = []
    with workers(2) as runner:
        found = run_trials(trials, LENGTH, runner, done.append)
    assert done == [1, 2, 3, 4]
    assert found == [run_trial(trial, length=LENGTH) for trial in trials]


def test_intervals_are_students() -> None:
    estimate = MeanOverSeeds.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.margin == pytest.approx(4.30 / math.sqrt(3))
    assert MeanOverSeeds.of([1.5]) == MeanOverSeeds(mean=1.5, margin=None)
