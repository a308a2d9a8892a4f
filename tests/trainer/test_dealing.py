"""Which rank trains what: laws of the deal that hold for any batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollover.trainer.dealing import DealtRows, attention_share, by_longest_first, deal_rows, family_cost
from rollover.trainer.packing import TrainingSample, num_positions
from rollover.trainer.shares import owners

SAMPLES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 40)).map(
        lambda drawn: TrainingSample(prompt_ids=(drawn[0],) * (drawn[0] + 1), response_ids=(9,) * drawn[1])
    ),
    min_size=1,
    max_size=30,
)


@given(costs=st.lists(st.floats(0.5, 1e6), min_size=1, max_size=60), num_ranks=st.integers(1, 9))
def test_each_item_is_dealt_once_and_no_rank_has_more_than_its_bound(costs: list[float], num_ranks: int) -> None:
    dealt = by_longest_first(costs, num_ranks)
    assert sorted(i for own in dealt for i in own) == list(range(len(costs)))
    loads = [sum(costs[i] for i in own) for own in dealt]
    # Whoever got the last item of the largest load had the least before, and no more than the mean of the others.
    assert max(loads) <= sum(costs) / num_ranks + (1 - 1 / num_ranks) * max(costs) + 1e-6


def test_the_example_of_the_textbook() -> None:
    assert by_longest_first([5, 4, 3, 3, 3], 2) == ((0, 3), (1, 2, 4))


@given(samples=SAMPLES, num_ranks=st.integers(1, 6), budget=st.integers(1, 120))
def test_all_ranks_make_the_same_number_of_passes_and_train_each_sample_once(
    samples: list[TrainingSample], num_ranks: int, budget: int
) -> None:
    dealt = deal(samples, num_ranks, budget)
    assert sorted(i for own in dealt for row in own.rows for part in row for i in part) == list(range(len(samples)))
    assert len({own.num_passes for own in dealt}) == 1
    assert any(not own.num_padding for own in dealt)
    every = {row for own in dealt for row in own.rows}
    assert all(own.padding in every for own in dealt)


@given(samples=SAMPLES, num_ranks=st.integers(1, 6), budget=st.integers(1, 120))
def test_rows_keep_to_the_budget_and_the_costliest_come_first(
    samples: list[TrainingSample], num_ranks: int, budget: int
) -> None:
    for own in deal(samples, num_ranks, budget):
        costs = [sum(family_cost(samples, part, 0.01) for part in row) for row in own.rows]
        assert costs == sorted(costs, reverse=True)
        for row in own.rows:
            positions = sum(num_positions(samples, part) for part in row)
            assert positions <= budget or (len(row) == 1 and len(row[0]) == 1)
            assert all(len({samples[i].prompt_ids for i in part}) == 1 for part in row)


def deal(samples: list[TrainingSample], num_ranks: int, budget: int) -> tuple[DealtRows, ...]:
    return deal_rows(samples, range(len(samples)), budget=budget, num_ranks=num_ranks, quadratic=0.01)


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
