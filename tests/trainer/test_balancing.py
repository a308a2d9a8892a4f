"""Which rank trains what: laws of the assignment that hold for any batch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.trainer import balancing
from rollover.trainer.balancing import AssignedRows, assign_rows, attention_share, by_longest_first, family_cost, pieces
from rollover.trainer.packing import TrainingSample, families, num_positions
from rollover.trainer.shares import owners

ROOT = Path(__file__).parents[2]

SAMPLES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 40)).map(
        lambda drawn: TrainingSample(prompt_ids=(drawn[0],) * (drawn[0] + 1), response_ids=(9,) * drawn[1])
    ),
    min_size=1,
    max_size=30,
)


@given(costs=st.lists(st.floats(0.5, 1e6), min_size=1, max_size=60), num_ranks=st.integers(1, 9))
def test_each_item_is_dealt_once_and_no_rank_has_more_than_its_bound(costs: list[float], num_ranks: int) -> None:
    assigned = by_longest_first(costs, num_ranks)
    assert sorted(i for own in assigned for i in own) == list(range(len(costs)))
    loads = [sum(costs[i] for i in own) for own in assigned]
    # Whoever got the last item of the largest load had the least before, and no more than the mean of the others.
    assert max(loads) <= sum(costs) / num_ranks + (1 - 1 / num_ranks) * max(costs) + 1e-6


def test_the_example_of_the_textbook() -> None:
    assert by_longest_first([5, 4, 3, 3, 3], 2) == ((0, 3), (1, 2, 4))


@given(samples=SAMPLES, num_ranks=st.integers(1, 6), budget=st.integers(1, 120))
def test_ranks_share_passes_and_train_samples_once(samples: list[TrainingSample], num_ranks: int, budget: int) -> None:
    assigned = assign(samples, num_ranks, budget)
    assert sorted(i for own in assigned for row in own.rows for part in row for i in part) == list(range(len(samples)))
    assert len({len(own.rows) + own.num_padding for own in assigned}) == 1
    assert any(not own.num_padding for own in assigned)
    every = {row for own in assigned for row in own.rows}
    assert all(own.padding in every for own in assigned)


@given(samples=SAMPLES, num_ranks=st.integers(1, 6), budget=st.integers(1, 120))
def test_rows_keep_the_budget_the_costliest_first(samples: list[TrainingSample], num_ranks: int, budget: int) -> None:
    for own in assign(samples, num_ranks, budget):
        costs = [sum(family_cost(samples, part, 0.01) for part in row) for row in own.rows]
        assert costs == sorted(costs, reverse=True)
        for row in own.rows:
            positions = sum(num_positions(samples, part) for part in row)
            assert positions <= budget or (len(row) == 1 and len(row[0]) == 1)
            assert all(len({samples[i].prompt_ids for i in part}) == 1 for part in row)


@given(samples=SAMPLES, most=st.floats(0.0, 400.0))
def test_pieces_of_a_family_are_few_enough_and_none_costs_too_much(samples: list[TrainingSample], most: float) -> None:
    for family in families(samples, range(len(samples)), 10**6):
        found = pieces(samples, family, most, 0.01)
        assert sorted(i for piece in found for i in piece) == sorted(family)
        costs = [family_cost(samples, piece, 0.01) for piece in found]
        assert max(costs) <= most or all(len(piece) == 1 for piece in found)
        assert len(found) == 1 or family_cost(samples, family, 0.01) > most


def test_pieces_compute_their_prompt_again() -> None:
    samples = [TrainingSample(prompt_ids=(1,) * 20, response_ids=(2,) * 11) for _ in range(3)]
    assert pieces(samples, (0, 1, 2), 50.0, 0.0) == ((0, 1, 2),)
    assert pieces(samples, (0, 1, 2), 49.0, 0.0) == ((0, 2), (1,))
    assert pieces(samples, (0, 1, 2), 39.0, 0.0) == ((0,), (1,), (2,))


def test_a_family_that_is_the_whole_batch_is_shared_by_all_ranks() -> None:
    samples = [TrainingSample(prompt_ids=(1,) * 5, response_ids=(2,) * 30) for _ in range(4)]
    assigned = assign(samples, 2, 1000)
    assert sorted(sorted(i for row in own.rows for part in row for i in part) for own in assigned) == [[0, 2], [1, 3]]


@given(samples=SAMPLES, num_ranks=st.integers(1, 6), budget=st.integers(1, 120))
def test_families_are_cut_if_the_busiest_rank_gains(samples: list[TrainingSample], num_ranks: int, budget: int) -> None:
    def busiest(assigned: Sequence[AssignedRows]) -> float:
        return max(own.cost(samples, 0.01) for own in assigned)

    assigned = assign(samples, num_ranks, budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancing, "_LIMITS", (math.inf,))
        whole = assign(samples, num_ranks, budget)
    assert busiest(assigned) < busiest(whole) or assigned == whole
    for own in assigned:
        parts = [part for row in own.rows for part in row]
        for prompt in {samples[part[0]].prompt_ids for part in parts}:
            same = [part for part in parts if samples[part[0]].prompt_ids == prompt]
            assert len(same) == 1 or num_positions(samples, [i for part in same for i in part]) > budget


def test_recorded_lengths_are_dealt_evenly_to_eight_ranks() -> None:
    """The costliest family alone is half as much again as the share of a rank."""
    lengths = json.loads((ROOT / "benchmarks" / "lengths.json").read_text())
    ratios = []
    for at in range(0, len(lengths) - 15, 16):
        samples = [
            TrainingSample(prompt_ids=(group,) * 100, response_ids=(1,) * length)
            for group, siblings in enumerate(lengths[at : at + 16])
            for length in siblings
        ]
        quadratic = attention_share(1024)
        assigned = assign_rows(samples, range(len(samples)), budget=8192, num_ranks=8, quadratic=quadratic)
        costs = [own.cost(samples, quadratic) for own in assigned]
        ratios.append(max(costs) / statistics.mean(costs))
    assert statistics.mean(ratios) < 1.06 and max(ratios) < 1.15


def assign(samples: list[TrainingSample], num_ranks: int, budget: int) -> tuple[AssignedRows, ...]:
    return assign_rows(samples, range(len(samples)), budget=budget, num_ranks=num_ranks, quadratic=0.01)


def test_long_sequences_cost_more_than_their_positions() -> None:
    long = TrainingSample(prompt_ids=(1,) * 384, response_ids=(2,) * 16_001)
    assert round(family_cost([long], (0,), attention_share(4096))) == 21_845


@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=5), st.integers(1, 1000), max_size=20),
    num_ranks=st.integers(1, 5),
)
def test_each_tensor_has_one_owner(sizes: dict[str, int], num_ranks: int) -> None:
    owned_by = owners(sizes, num_ranks)
    assert owned_by.keys() == sizes.keys()
    assert set(owned_by.values()) <= set(range(num_ranks))
