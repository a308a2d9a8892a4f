"""The strategy ``rollover`` in simulated runs: what its closed form promises comes about."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import pytest
from scipy.stats import ks_2samp

from rollover.rollout.events import BatchConsumed, Event, SampleStarted
from rollover.rollout.state import View
from rollover.rollout.strategies.rollover import Rollover
from rollover.sim.result import Window
from rollover.sim.run import simulate
from rollover.workload.source import PRESETS
from rollover.workload.trace import Trace, TracePrompt
from tests.sim.kit import one_replica, strategy_of

N, G = 16, 4


class Watched(Rollover):
    """Keeps the rounds it decided on, by the step that begins them."""

    __slots__ = ()
    seen: dict[int, Any] = {}  # noqa: RUF012

    def groups_to_open(self, view: View) -> int:
        self.seen.setdefault(view.ledger.next_step, self.round(view))
        return Rollover.groups_to_open(self, view)


def strategy(target: float, cap: int, unit: str, **config: Any) -> Rollover:
    config = {"rollout_batch_size": N, "group_size": G, "max_staleness": 60} | config
    made = strategy_of("rollover", unit=unit, lag_target=target, max_new_tokens=cap, **config)
    assert isinstance(made, Rollover)
    return made


@functools.cache
def run(preset: str, target: float, unit: str, **config: Any) -> tuple[Window, list[Event]]:
    """The steady state of a run, and all its events of samples that started and batches."""
    law, events = PRESETS[preset], list[Event]()
    simulation = simulate(
        strategy(target, law.cap_tokens, unit, **config),
        law.workload(5),
        one_replica(b0=64.0, kv_on_update="keep"),
        steps=240,
        observer=lambda event: events.append(event) if isinstance(event, SampleStarted | BatchConsumed) else None,
    )
    assert not simulation.tokens.wasted
    assert max(s.step for s in simulation.steps) == 239
    return simulation.after(60), events


@pytest.mark.parametrize(
    ("preset", "target", "unit"),
    [("light-8k", 0.5, "sample"), ("light-8k", 2.0, "group"), ("r1-16k", 1.0, "group"), ("heavy-32k", 2.0, "sample")],
)
def test_the_lag_target_is_met_and_lengths_keep_their_mean(preset: str, target: float, unit: str) -> None:
    window, _ = run(preset, target, unit)
    assert window.lag.batch == pytest.approx(target, rel=0.06)
    assert window.mean_length == pytest.approx(PRESETS[preset].mean_tokens, rel=0.04)


def test_trained_lengths_are_spread_as_admitted_ones() -> None:
    """Kolmogorov-Smirnov over whole rounds, prompts apart: siblings are alike, so only the first of each counts."""
    workload = PRESETS["light-8k"].workload(5)

    def first(prompt: int) -> int:
        return workload.group_lengths(prompt, G)[0]

    batches = (e for e in run("light-8k", 0.5, "sample")[1] if isinstance(e, BatchConsumed) and e.step >= 60)
    trained = [first(i // G) for batch in batches for i in batch.group_ids if i % G == 0]
    admitted = [first(10_000 + i) for i in range(4 * len(trained))]
    assert ks_2samp(trained, admitted).pvalue > 0.05


@pytest.mark.parametrize("unit", ["sample", "group"])
def test_the_closed_form_foretells_the_iterations(unit: str) -> None:
    law = PRESETS["light-8k"]
    config = {f: getattr(strategy(1.0, law.cap_tokens, unit), f) for f in Rollover.__dataclass_fields__}
    watched = Watched(**config)
    Watched.seen.clear()
    simulation = simulate(watched, law.workload(2), one_replica(b0=64.0), steps=240)
    rounds = {step: found for step, found in Watched.seen.items() if step >= 60}
    promised = sum(b.iterations for b in rounds.values()) / sum(b.num_batches for b in rounds.values())
    assert simulation.after(min(rounds)).iterations == pytest.approx(promised, rel=0.06)


def test_the_batches_of_a_round_are_alike_and_nothing_starts_in_between() -> None:
    window, events = run("r1-16k", 1.0, "group")
    ends = [number for number, event in enumerate(events) if isinstance(event, BatchConsumed)]
    between = [after - before - 1 for before, after in pairwise([-1, *ends])]
    assert between.count(0) > len(between) / 2, "rounds of one batch only"
    tokens = {s.step: sum(s.lengths) for s in window.steps}
    within = [step for step in tokens if step - 1 in tokens and between[step] == 0]
    assert all(abs(tokens[step] / tokens[step - 1] - 1) < 0.25 for step in within)


@pytest.mark.parametrize("max_staleness", [1, 6])
def test_the_bound_is_kept_and_limits_the_round(max_staleness: int) -> None:
    window, _ = run("light-8k", 3.0, "sample", max_staleness=max_staleness)
    assert window.lag.max == max_staleness


def test_a_round_weighs_what_it_carries_over_against_its_prefill() -> None:
    """Single samples of a thin tail, on an engine that prefills 20 tokens in the time of an iteration."""
    law = PRESETS["light-8k"]

    def speed(name: str, **config: Any) -> float:
        settings = {"rollout_batch_size": N, "group_size": G, "max_new_tokens": law.cap_tokens}
        made = strategy_of(name, **settings, **config)
        engine = one_replica(b0=64.0, prefill_tokens_per_s=20.0)
        return simulate(made, law.workload(5), engine, steps=120).after(40).tokens_per_s

    ours = {"unit": "sample", "lag_target": 1.0, "max_staleness": 60}
    blind, weighed = (speed("rollover", **ours, prefill_tokens_per_iteration=rate) for rate in (math.inf, 20.0))
    assert weighed > 1.4 * blind
    assert weighed > 1.6 * speed("sync")


@pytest.mark.parametrize("steps", range(24, 40, 3))
def test_a_short_run_is_measured_over_a_whole_round(steps: int) -> None:
    """Batches that were collected before the window would be free in it: faster than any engine."""
    law = PRESETS["qwen3-16k"]
    found = simulate(
        strategy(4.0, law.cap_tokens, "sample"), law.workload(5), one_replica(b0=64.0, kv_on_update="keep"), steps=steps
    )
    window = found.after(steps - 9)
    assert window.tokens_per_s < 64.0
    assert window.steps[0].iterations > 0


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_run_without_a_whole_round_is_measured_from_its_rounds_start(steps: int) -> None:
    """Later batches of a round take no time of their own, and their rate would be a division by zero."""
    one = Trace(name="one", cap_tokens=512, prompts=(TracePrompt(prompt_id="a", prompt_tokens=9, lengths=(512,)),))
    found = simulate(strategy(4.0, 512, "sample"), one.workload(), one_replica(b0=64.0), steps=steps)
    for warmup in range(steps):
        window = found.after(warmup)
        assert window.seconds > 0
        assert window.steps[0].iterations > 0
        assert window.tokens_per_s < 64.0
