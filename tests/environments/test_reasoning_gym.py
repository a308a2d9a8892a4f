from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.environments.reasoning_gym import CHUNK, MAX_ROWS, GymDataset, freeze, gym_seed, thaw
from rollover.errors import DataError

SMALL = {"max_terms": 3, "max_digits": 1}


def test_rows_are_the_items_of_one_endless_dataset_of_the_library() -> None:
    import reasoning_gym

    library = reasoning_gym.create_dataset("chain_sum", **SMALL, seed=77, size=10 * CHUNK)
    ours = GymDataset("chain_sum", SMALL, seed=77)
    for row in (0, 1, CHUNK - 1, CHUNK, 7 * CHUNK + 13):
        assert ours.entry(row)["question"] == library[row]["question"]
        assert ours.entry(row)["answer"] == library[row]["answer"]


def test_a_dataset_whose_size_bounds_the_index_goes_on_without_end() -> None:
    bounded = GymDataset("gsm_symbolic", {}, seed=3)
    far = bounded.entry(5 * CHUNK + 2)
    assert far["question"] != bounded.entry(2)["question"]
    assert GymDataset("gsm_symbolic", {}, seed=3).entry(5 * CHUNK + 2) == far


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, MAX_ROWS - 1), st.integers(0, MAX_ROWS - 1))
def test_training_and_evaluation_seed_no_generator_alike(train: int, evaluate: int, row: int, other: int) -> None:
    train_seed, eval_seed = gym_seed("train", "x", train) + row, gym_seed("eval", "x", evaluate) + other
    assert train_seed < 2**31 <= eval_seed < 2**32


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
HASHABLE = st.recursive(PLAIN, lambda inner: st.tuples(inner, inner))
ENTRIES = st.recursive(
    HASHABLE | st.sets(st.integers() | st.text()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(ENTRIES)
def test_an_entry_comes_back_from_json_as_it_was(entry: Any) -> None:
    back = thaw(json.loads(json.dumps(freeze(entry))))
    assert back == entry
    assert repr(type(back)) == repr(type(entry))


@pytest.mark.filterwarnings("ignore:Exception ignored.*arcagi:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["arc_agi", "chain_sum", "countdown", "number_sorting", "letter_counting"])
def test_verifiers_judge_an_entry_from_the_journal_like_the_original(name: str) -> None:
    dataset = GymDataset(name, {}, seed=1)
    for row in range(3):
        entry = dataset.entry(row)
        stored = thaw(json.loads(json.dumps(freeze(entry))))
        assert stored == entry
        assert dataset.score(entry["answer"], stored) == 1.0
        assert dataset.score("no idea", stored) == dataset.score("no idea", entry) < 1.0


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "no dataset 'chain_sums'; did you mean 'chain_sum'?"),
        ("chain_sum", {"max_term": 3}, "no parameter 'max_term'; did you mean 'max_terms'?"),
        ("chain_sum", {"zzz": 3}, "known: allow_negation, max_digits, max_terms, min_digits, min_terms"),
        ("chain_sum", {"min_terms": 0}, "rejects its config {'min_terms': 0}: min_terms must be positive"),
        ("chain_sum", {"min_terms": "a"}, "rejects its config {'min_terms': 'a'}"),
    ],
)
def test_a_wrong_dataset_or_config_is_told_with_its_mend(name: str, config: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        GymDataset(name, config)
