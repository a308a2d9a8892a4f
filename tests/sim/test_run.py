"""Simulated runs: reproducible to the byte, lawful in every state, and what they do with trouble."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from rollover.batch import WasteCause
from rollover.errors import ConfigError
from rollover.garbage import rare_collections
from rollover.rollout.events import Event, GroupDropped, Observed, SegmentEnded
from rollover.rollout.strategy import Strategy
from rollover.sim.result import Simulation, Window
from rollover.sim.run import NEW_OBJECTS, simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario, Turns
from rollover.sim.strategies import SIMULATED as NAMES
from rollover.workload.base import Workload
from rollover.workload.law import Generator, LengthLaw
from tests.sim.kit import Lengths, one_replica, strategy_of, watched

LAW = LengthLaw(median_tokens=20, sigma=0.9, icc=0.5, cap_tokens=120, min_tokens=1, loop_probability=0.02)
TWO = Scenario(
    replicas=tuple(
        ReplicaModel(c0_s=c0_s, b0=8.0, prefill_tokens_per_s=300, kv_tokens=900, max_running=12, swap_pause_s=0.5)
        for c0_s in (1.0, 1.5)
    ),
    trainer=Latency(s_per_token=0.05, sigma=0.2),
    reward=Latency(base_s=0.4, sigma=0.5),
    filter_zero_signal=True,
)


def strategy_for_two(name: str) -> Strategy:
    return strategy_of(name, group_size=4, rollout_batch_size=4, max_new_tokens=120, max_running=TWO.max_running)


def trace_of(name: str, scenario: Scenario, *, seed: int = 5, lengths: int = 1) -> list[str]:
    _, events = watched(strategy_for_two(name), Generator(LAW, lengths), scenario, steps=8, seed=seed)
    return [repr(event) for event in events]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seeds_give_the_same_trace_to_the_byte(name: str) -> None:
    assert trace_of(name, TWO) == trace_of(name, TWO)
    assert trace_of(name, TWO) != trace_of(name, TWO, seed=6)
    assert trace_of(name, TWO) != trace_of(name, TWO, lengths=2)


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_response_is_whole_and_every_token_accounted_for(name: str) -> None:
    strategy = strategy_for_two(name)
    simulation = simulate(strategy, Generator(LAW, 3), TWO, steps=12, seed=2)
    window = Window(simulation.steps)
    assert len(window.lengths) == 12 * 16
    admitted = set(simulation.admitted_lengths)
    assert set(window.lengths) <= admitted
    assert simulation.tokens.trained == sum(window.lengths)
    assert window.lag.max <= strategy.max_staleness


def test_a_step_takes_as_long_as_its_longest_response_and_its_training() -> None:
    lengths = Lengths(lambda index, i, attempt: 10 + 10 * index + i)
    simulation = simulate(
        strategy_of("sync"), lengths, one_replica(b0=8.0, trainer=Latency(base_s=100.0), swap_pause_s=3.0), steps=2
    )
    # Responses of 10, 11, 20 and 21 tokens: four run for 10 iterations, three for 1, two for 9, one for 1.
    first = 10 * 1.5 + 1 * 1.375 + 9 * 1.25 + 1 * 1.125
    assert simulation.steps[0].duration_s == pytest.approx(first + 100)
    assert simulation.steps[0].iterations == pytest.approx(21)
    second = 30 * 1.5 + 1 * 1.375 + 9 * 1.25 + 1 * 1.125
    assert simulation.steps[1].duration_s == pytest.approx(3 + second + 100)


def test_an_episode_takes_its_tokens_and_its_answers() -> None:
    """25 tokens in turns of 10, answered three times; prefilling 2 answers of 4 tokens takes 1 s each."""
    turns = Turns(tokens=10, answer_s=5.0, observed_tokens=4)
    scenario = one_replica(turns=turns, prefill_tokens_per_s=4.0)
    lengths = Lengths(lambda index, i, attempt: 25, prompt_tokens=0)
    simulation = simulate(strategy_of("sync", rollout_batch_size=1, group_size=1), lengths, scenario, steps=1)
    assert simulation.steps[0].duration_s == pytest.approx(25 + 3 * 5 + 2)
    tokens = simulation.tokens
    assert (tokens.trained, tokens.observed, tokens.observed_in_batches) == (25, 8, 8)


def test_an_acting_sample_holds_no_slot() -> None:
    """Two samples share a slot: one decodes its turn of 10 s while the other's environment acts for 10 s."""
    scenario = one_replica(turns=Turns(tokens=10, answer_s=10.0), max_running=1)
    strategy = strategy_of("sync", rollout_batch_size=1, max_running=1)
    simulation = simulate(strategy, Lengths(lambda index, i, attempt: 20), scenario, steps=1)
    assert simulation.steps[0].duration_s == pytest.approx(4 * 10 + 10)
    assert simulation.steps[0].mean_running == pytest.approx(4 / 5)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_trains_whole_episodes(name: str) -> None:
    scenario = replace(TWO, turns=Turns(tokens=7, answer_s=3.0, answer_sigma=0.5, observed_tokens=2))
    assert trace_of(name, scenario) == trace_of(name, scenario)
    simulation, events = watched(strategy_for_two(name), Generator(LAW, 3), scenario, steps=8)
    tokens = simulation.tokens
    trained = [length for step in simulation.steps for length in step.lengths]
    assert tokens.trained == sum(trained)
    assert tokens.observed_in_batches == sum(2 * ((length - 1) // 7) for length in trained)
    assert tokens.observed == sum(len(e.observation.token_ids) for e in events if isinstance(e, Observed))


def test_a_strategy_that_keeps_its_samples_running_hides_training() -> None:
    lengths = Lengths(lambda index, i, attempt: 20)
    scenario = one_replica(trainer=Latency(base_s=20.0))
    kept = simulate(strategy_of("bounded_async", num_running=4), lengths, scenario, steps=10)
    stopped = simulate(strategy_of("sync"), lengths, scenario, steps=10)
    for run, step_s in ((stopped, 40), (kept, 20)):
        window = run.after(2)
        assert window.seconds / len(window.steps) == pytest.approx(step_s)


def test_a_round_is_measured_whole_or_not_at_all() -> None:
    """A pool of three batches, each as long as its longest: their steps take 30 s, 0 s and 0 s, in whichever of them a
    measurement begins and ends."""
    lengths = Lengths(lambda index, i, attempt: 30)
    strategy = strategy_of("sorted", over_sampling_batch_size=6, max_staleness=2)
    simulation = simulate(strategy, lengths, one_replica(), steps=14)
    for warmup in range(8):
        window = simulation.after(warmup)
        assert len(window.steps) % 3 == 0
        assert window.seconds / len(window.steps) == pytest.approx(10)


def test_tokens_on_both_sides_of_new_weights_have_their_own_versions() -> None:
    lengths = Lengths(lambda index, i, attempt: 15 if index % 2 else 4)
    scenario = one_replica(trainer=Latency(base_s=2.0), kv_on_update="keep")
    _, events = watched(strategy_of("bounded_async", num_running=8), lengths, scenario, steps=6)
    spans: dict[Any, list[Any]] = {}
    for event in (e for e in events if isinstance(e, SegmentEnded)):
        spans.setdefault(event.sample_id, []).append(event.segment)
    crossed = [s for s in spans.values() if len(s) > 1 and s[-1].finish_reason is not None]
    assert crossed
    for parts in crossed:
        versions = [p.policy_version for p in parts]
        assert versions == sorted(set(versions))
        assert {p.kv_version for p in parts} == {versions[0]}
        assert sum(len(p.token_ids) for p in parts) in (4, 15)


def test_discarded_prompts_come_back_with_other_responses() -> None:
    drawn: list[tuple[int, int]] = []

    def length(index: int, i: int, attempt: int) -> int:
        drawn.append((index, attempt))
        return 50 if attempt == 0 and index % 2 else 5

    simulation, events = watched(strategy_of("oversample"), Lengths(length), one_replica(), steps=6)
    assert {e.cause for e in events if isinstance(e, GroupDropped)} == {WasteCause.DISCARDED_ON_ABORT}
    assert {attempt for _, attempt in drawn} == {0, 1}
    assert simulation.tokens.wasted[WasteCause.DISCARDED_ON_ABORT] > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"c0_s": 0.0}, "c0_s must be above 0, got 0.0"),
        ({"b0": -1.0}, "b0 must be above 0"),
        ({"kv_tokens": 0}, "kv_tokens must be above 0"),
        ({"swap_pause_s": -1.0}, "swap_pause_s must be at least 0"),
    ],
)
def test_impossible_replicas_are_refused(keys: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplicaModel(**({"c0_s": 1.0, "b0": 1.0} | keys))  # type: ignore[arg-type]


# -- the collector may be rare in a simulation because it finds nothing there -----------------------------------


def garbage_of(name: str, workload: Workload, steps: int) -> int:
    """Objects that only the collector can free once a simulation is over and forgotten."""
    strategy = strategy_for_two(name)
    gc.collect()
    gc.disable()
    try:
        simulate(strategy, workload, TWO, steps=steps)
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["april", "bounded_async", "rollover"])
def test_a_simulation_makes_no_cyclic_garbage(name: str) -> None:
    workload = Generator(LAW, 1)
    garbage_of(name, workload, 2)  # what is made once, the first time
    assert garbage_of(name, workload, 12) == 0


def test_thresholds_are_those_of_before_whatever_happens() -> None:
    before = gc.get_threshold()
    inside: list[tuple[int, int, int]] = []

    def look(event: Event) -> None:
        inside.append(gc.get_threshold())

    simulate(strategy_of("sync"), Lengths(lambda *_: 3), one_replica(), steps=1, observer=look)
    assert set(inside) == {(NEW_OBJECTS, *before[1:])}
    assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError):
        simulate(strategy_of("sync"), Lengths(lambda *_: 1 // 0), one_replica(), steps=2)
    assert gc.get_threshold() == before


def test_who_has_switched_collection_off_keeps_it_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collections(1000):
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_colocation_costs_the_caches_of_each_step_and_the_pause() -> None:
    def run_of(**model: Any) -> Simulation:
        scenario = one_replica(prefill_tokens_per_s=10.0, trainer=Latency(base_s=5.0), **model)
        return simulate(strategy_of("april", max_staleness=4), Generator(LAW), scenario, steps=6)

    kept, lost, turns = run_of(kv_on_update="keep"), run_of(), run_of(colocated=True, swap_pause_s=7.0)
    again = [sum(s.prefilled_tokens for s in run.steps) for run in (kept, lost, turns)]
    assert again[0] < again[1] == again[2]
    assert sum(s.duration_s for s in turns.steps) > sum(s.duration_s for s in lost.steps) + 5 * 7.0 - 1e-6


def test_an_overlapping_strategy_cannot_be_colocated() -> None:
    scenario = one_replica(colocated=True)
    with pytest.raises(ConfigError, match="generates while the trainer trains"):
        simulate(strategy_of("bounded_async", max_staleness=2), Generator(LAW), scenario, steps=2)
    with pytest.raises(ValueError, match="kv_on_update = 'keep' does not work with colocated = true"):
        one_replica(colocated=True, kv_on_update="keep")
