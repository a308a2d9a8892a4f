"""The rule by which re-executed tokens are compared: pure decisions, with numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.base import GenerateRequest
from rollover.engine.noise import uniforms
from rollover.engine.reexecution import (
    Bounds,
    Comparison,
    Dispute,
    Doubt,
    Lot,
    SecondAnswer,
    Slack,
    Stretch,
    Verdict,
    can_be_compared,
    drawn_between,
    logprobs_differ,
    tokens_verdict,
    trainers_verdict,
)
from rollover.types import SamplingParams

SEED = 7
"""Its noise at position 2 is about 0.55, at position 0 about 0.72."""


def request(**params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="g0.0#1.",
        sample_key="g0.0.",
        prompt_key="p.",
        prompt_ids=(1, 2, 3),
        response_ids=(4, 5),
        params=SamplingParams(**{"max_new_tokens": 40, **params}),
        seed=SEED,
    )


def stretch(token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Stretch:
    return Stretch(request=request(), engine="a", version=3, token_ids=token_ids, logprobs=logprobs)


def noise(position: int) -> float:
    return float(uniforms([SEED], [position])[0])


def test_a_lot_draws_its_share_and_no_other_key_tells_which() -> None:
    names = [f"g{i}.{j}." for i in range(5000) for j in range(4)]
    one, two = Lot(0.02, b"one"), Lot(0.02, b"two")
    first, second = ({name for name in names if lot.draws(name)} for lot in (one, two))
    assert 300 < len(first) < 500 and 300 < len(second) < 500
    assert len(first & second) < 30
    assert first == {name for name in names if one.draws(name)}
    assert not any(Lot(0.0).draws(name) for name in names) and all(Lot(1.0).draws(name) for name in names)


@pytest.mark.parametrize(
    ("params", "compared"), [({}, True), ({"temperature": 0.0}, False), ({"top_p": 0.9}, False), ({"top_k": 5}, False)]
)
def test_only_calls_whose_noise_draws_from_all_tokens_are_compared(params: dict[str, Any], compared: bool) -> None:
    assert can_be_compared(request(**params)) is compared


def test_a_stretch_knows_its_places() -> None:
    it = stretch((10, 11, 12), (-0.1, -0.2, -0.3))
    assert (it.start, it.end, it.token(3), it.logprob(4)) == (2, 5, 11, -0.3)
    assert it.context(4) == (1, 2, 3, 4, 5, 10, 11)
    call = it.call("x", 4, 5)
    assert call.response_ids == (4, 5, 10, 11) and call.params.max_new_tokens == 5 and call.seed == SEED
    assert call.least_version == 3


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=30), st.integers(0, 50), st.floats(1e-4, 0.1))
def test_bounds_hold_the_token_that_is_drawn_and_those_that_near_noise_draws(
    weights: list[float], position: int, distance: float
) -> None:
    probs = np.array(weights) / sum(weights)
    bounds = drawn_between(np.log(probs), SEED, position, distance)
    number, cdf = noise(position), probs.cumsum()
    for moved in (-1.0, -0.5, 0.0, 0.5, 1.0):
        at = min(max(number + moved * distance, 0.0), 1.0 - 1e-12)
        assert bounds.holds(min(int(np.searchsorted(cdf, at, side="right")), len(cdf) - 1))
    for token in range(len(probs)):  # and no others
        far = cdf[token] < number - distance - 1e-9 or cdf[token] - probs[token] > number + distance + 1e-9
        assert not (far and bounds.holds(token))


def test_bounds_by_hand() -> None:
    probs = np.log(np.array([0.5, 0.2, 0.3]))
    assert 0.70 < noise(0) < 0.73
    assert drawn_between(probs, SEED, 0, 0.001) == Bounds(2, 2)
    assert drawn_between(probs, SEED, 0, 0.05) == Bounds(1, 2)


def test_float32_allows_no_token_outside_of_its_bounds_and_half_precision_three() -> None:
    assert Slack(logprobs=0.002).max_outside == 0 and Slack(logprobs=0.002).noise == pytest.approx(0.008)
    assert Slack(logprobs=0.1).max_outside == 3 and Slack(logprobs=0.1).noise == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("slack", "num_tokens", "apart", "differ"),
    [
        (0.002, 3, 0.0019, False),
        (0.002, 3, 0.0021, True),
        (0.002, 3, float("nan"), True),
        (0.1, 63, 5.0, False),
        (0.1, 64, 0.11, True),
        (0.1, 64, 0.09, False),
    ],
)
def test_logprobs_are_compared_by_their_mean_distance(
    slack: float, num_tokens: int, apart: float, differ: bool
) -> None:
    it = stretch((9,) * num_tokens, (-1.0,) * num_tokens)
    answers = [SecondAnswer(2 + i, 9, -1.0 + apart) for i in range(num_tokens)]
    assert logprobs_differ(it, answers, Slack(logprobs=slack)) is differ
    others = [SecondAnswer(a.position, 8, -9.0) for a in answers]
    assert not logprobs_differ(it, others, Slack(logprobs=slack)), "another token has another log-prob"


def token_dispute(first: int, second: int) -> Dispute:
    it = stretch((first,), (-1.0,))
    answer = SecondAnswer(2, second, -1.0)
    comparison = Comparison(answers=(answer,), outside=(answer,), doubt=Doubt.TOKEN)
    return Dispute(stretch=it, second="b", comparison=comparison, slack=Slack(logprobs=0.002))


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [(9, 5, Verdict.FIRST), (5, 9, Verdict.SECOND), (8, 9, Verdict.BOTH), (5, 4, Verdict.NEITHER)],
)
def test_who_stays_outside_of_the_bounds_of_a_third_has_lied(first: int, second: int, who: Verdict) -> None:
    assert tokens_verdict(token_dispute(first, second), [Bounds(4, 6)]) is who


@pytest.mark.parametrize("who", [Verdict.FIRST, Verdict.SECOND])
def test_the_trainer_tells_which_token_the_noise_draws(who: Verdict) -> None:
    logits = np.log(np.array([[0.25, 0.25, 0.25, 0.25]], dtype=np.float32))
    right = int(noise(2) * 4)
    wrong = (right + 2) % 4
    dispute = token_dispute(wrong, right) if who is Verdict.FIRST else token_dispute(right, wrong)
    assert dispute.contexts == ((1, 2, 3, 4, 5),)
    assert trainers_verdict(dispute, logits, 3) is who
    assert "g0.0." in dispute.about and "a says" in dispute.about


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [(-0.5, -1.386, Verdict.FIRST), (-1.386, -3.0, Verdict.SECOND), (-1.3862, -1.387, Verdict.NEITHER)],
)
def test_the_trainer_tells_whose_log_probs_are_farther_off(first: float, second: float, who: Verdict) -> None:
    it = stretch((1,) * 3, (first,) * 3)
    answers = tuple(SecondAnswer(2 + i, 1, second) for i in range(3))
    comparison = Comparison(answers=answers, doubt=Doubt.LOGPROBS)
    dispute = Dispute(stretch=it, second="b", comparison=comparison, slack=Slack(logprobs=0.002))
    assert trainers_verdict(dispute, np.zeros((3, 4), dtype=np.float32), 3) is who


def test_a_trainer_of_later_weights_decides_where_one_side_is_near_and_the_other_far() -> None:
    assert 0.54 < noise(2) < 0.55  # in token 1; 0.02 from token 0, 0.08 from token 2, 0.25 from token 3
    logits = np.log(np.array([[0.53, 0.1, 0.17, 0.2]], dtype=np.float32))
    assert trainers_verdict(token_dispute(3, 0), logits, 4) is Verdict.FIRST
    assert trainers_verdict(token_dispute(1, 3), logits, 4) is Verdict.SECOND
    assert trainers_verdict(token_dispute(2, 1), logits, 4) is None, "one step may well make so much"
    assert trainers_verdict(token_dispute(3, 2), logits, 4) is None, "both are far off"
    it = stretch((1,) * 3, (-1.2,) * 3)
    for second, who in ((-3.0, Verdict.SECOND), (-1.5, None)):
        answers = tuple(SecondAnswer(2 + i, 1, second) for i in range(3))
        comparison = Comparison(answers=answers, doubt=Doubt.LOGPROBS)
        dispute = Dispute(stretch=it, second="b", comparison=comparison, slack=Slack(logprobs=0.002))
        assert trainers_verdict(dispute, np.zeros((3, 4), dtype=np.float32), 4) is who
