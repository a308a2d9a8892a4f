from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.errors import ConfigError, DataError
from rollover.workload.trace import EmpiricalLaw, Trace, TracePrompt

TRACE = Trace(
    name="t",
    cap_tokens=100,
    prompts=(
        TracePrompt(prompt_id="a", prompt_tokens=7, lengths=(10, 20, 30, 40)),
        TracePrompt(prompt_id="b", prompt_tokens=8, lengths=(5, 100)),
        TracePrompt(prompt_id="c", prompt_tokens=9, lengths=(50, 60), unfinished=frozenset({1})),
    ),
)


def test_seed_0_replays_prompts_and_samples_as_recorded() -> None:
    replay = TRACE.workload()
    assert [replay.group_lengths(i, 2) for i in range(2)] == [(10, 20), (5, 100)]
    assert [replay.prompt_tokens(i) for i in range(3)] == [7, 8, 9]
    assert replay.prompt_id(1) == "trace/1@0"
    assert replay.cap == 100


def test_later_attempts_use_the_samples_behind_the_earlier_ones() -> None:
    assert TRACE.workload().group_lengths(0, 2, attempt=1) == (30, 40)


@given(st.integers(0, 50), st.integers(1, 30), st.integers(0, 4), st.integers(0, 3))
def test_missing_samples_are_drawn_from_those_of_the_same_prompt(i: int, size: int, attempt: int, seed: int) -> None:
    replay, again = TRACE.workload(seed), TRACE.workload(seed)
    row = int(replay.prompt_id(i).partition("/")[2].partition("@")[0])
    found = replay.group_lengths(i, size, attempt)
    assert len(found) == size
    recorded = TRACE.prompts[row].lengths
    assert all(n in recorded or (row == 2 and n == 100) for n in found)
    again.group_lengths(3, 5, 1)
    assert again.group_lengths(i, size, attempt) == found


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    replay = Trace(
        name="t",
        cap_tokens=99,
        prompts=tuple(TracePrompt(prompt_id=str(n), prompt_tokens=1, lengths=(n,)) for n in range(1, 40)),
    ).workload(0)
    epochs = [[replay.group_lengths(39 * e + i, 1)[0] for i in range(39)] for e in range(4)]
    assert epochs[0] == list(range(1, 40))
    assert all(sorted(epoch) == epochs[0] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_other_seeds_shuffle_the_first_epoch_too() -> None:
    orders = {tuple(TRACE.workload(seed).prompt_tokens(i) for i in range(3)) for seed in range(1, 30)}
    assert len(orders) == 6


def test_a_replay_in_another_process_gives_the_same_lengths() -> None:
    replay = TRACE.workload(3)
    copy = pickle.loads(pickle.dumps(replay))
    assert [copy.group_lengths(i, 9) for i in range(9)] == [replay.group_lengths(i, 9) for i in range(9)]


def test_a_cut_sample_is_completed_longer_and_alike_in_every_seed() -> None:
    # Of the finished lengths only 100 is above 60.
    found = {TRACE.workload(s).group_lengths(i, 2) for s in range(5) for i in range(3)}
    assert (50, 100) in found
    assert not any(60 in group for group in found)


samples = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=20)


@given(samples)
def test_kaplan_meier_is_redistribution_to_the_right(sample: list[tuple[int, bool]]) -> None:
    """Efron's form of the estimate: each cut sample gives its weight in equal parts to the samples that outlast it."""
    weights = np.full(len(sample), 1 / len(sample))
    order = sorted(range(len(sample)), key=lambda i: (sample[i][0], not sample[i][1]))
    for place, i in enumerate(order):
        later = order[place + 1 :]
        if not sample[i][1] and later:
            weights[later] += weights[i] / len(later)
            weights[i] = 0
    law = EmpiricalLaw.of(np.array([float(n) for n, _ in sample]), np.array([done for _, done in sample]))
    for x in range(14):
        ended = [i for i, (n, done) in enumerate(sample) if n <= x and done]
        assert law.at(np.array([x]))[0] == pytest.approx(weights[ended].sum(), abs=1e-9)


def test_without_cut_samples_the_estimate_is_the_share_at_or_below() -> None:
    law = EmpiricalLaw.of(np.array([3.0, 1.0, 3.0, 8.0]), np.ones(4, bool))
    assert law.at(np.array([0, 1, 2, 3, 7, 8])).tolist() == [0, 0.25, 0.25, 0.75, 0.75, 1]
    assert [law.quantile(p, 9) for p in (0.25, 0.26, 0.75, 1.0)] == [1, 3, 3, 8]
    assert law.longer_than(1, 0.5) == 3
    assert law.longer_than(1, 0.7) == 8


def test_a_lower_cap_cuts_and_settles_what_was_open() -> None:
    cut = TRACE.capped(55)
    assert [p.lengths for p in cut.prompts] == [(10, 20, 30, 40), (5, 55), (50, 55)]
    assert cut.prompts[2].unfinished == frozenset()
    with pytest.raises(ConfigError, match="the cap of 101 tokens is above 100, under which t was recorded"):
        TRACE.capped(101)


def test_siblings_that_were_not_recorded_are_told() -> None:
    assert [len(p.lengths) for p in TRACE.prompts] == [4, 2, 2]
    assert not TRACE.missing_siblings(2)
    assert TRACE.missing_siblings(3).startswith("2 of 3 prompts in t have fewer lengths than a group of 3")


def test_an_empty_trace_and_impossible_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="t: the trace is empty"):
        replace(TRACE, prompts=())
    with pytest.raises(DataError, match=r"prompt 'b' has a response of 100 tokens, .*not between 1 and the cap of 99"):
        replace(TRACE, cap_tokens=99)
