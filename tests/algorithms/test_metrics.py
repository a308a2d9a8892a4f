from __future__ import annotations

import functools
import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.algorithms import ALGORITHMS, Algorithm
from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.losses import policy_loss
from tests.algorithms.batches import WORKED, denominators, f64, gradient, random_batch, row, take, worked_batch


def metrics_of(algorithm: Algorithm, tokens: TokenBatch | None = None) -> dict[str, float]:
    return policy_loss(algorithm, worked_batch() if tokens is None else tokens, WORKED)[1].finalize()


def test_metrics_have_their_hand_worked_values() -> None:
    # ratios 1.5, 0.9, 0.7 with advantages 1, 1, -1; weights 1, 3, 0.5; staleness 0, 1, 1
    # (1.5 is above the dual clip of 1.4, which concerns negative advantages only)
    actual = metrics_of(row("grpo", kl_coef=0.1, dual_clip=1.4))
    expected = {
        "tokens/trained": 3,
        "surprise": (1 + 2 + 0.5 - math.log(1.5 * 0.9 * 0.7)) / 3,
        "ratio/mean": 3.1 / 3,
        "ratio/max": 1.5,
        "clip/low": 1 / 3,
        "clip/high": 1 / 3,
        "clip/dual": 0,
        "clip/at_start": 0,
        "is_weight/mean": 1.5,
        "is_weight/max": 3,
        "is_weight/truncated": 1 / 3,
        "is_weight/rejected": 0,
        "is_weight/rejected_samples": 0,
        "ess/token": 4.5**2 / (3 * (1 + 9 + 0.25)),
        "ess/sample": 3.5**2 / (2 * (9 + 0.25)),
        # beh - prox = -(0 + ln 3 - ln 2); rho - 1 - ln rho sums to 4.5 - 3 - ln 1.5
        "kl/rollout_proximal_k1": -math.log(1.5) / 3,
        "kl/rollout_proximal_k3": (1.5 - math.log(1.5)) / 3,
        # ratio - 1 - ln ratio
        "kl/proximal": (3.1 - 3 - math.log(1.5 * 0.9 * 0.7)) / 3,
        # d = 0.1, 0.2, -0.3
        "kl/ref": (math.exp(-0.1) + math.exp(-0.2) + math.exp(0.3) - 3) / 3,
        "advantage/abs_mean": 1,
        "staleness/off_policy_tokens": 2 / 3,
        "staleness/max": 1,
        "lag_0/tokens": 1,
        "lag_0/is_weight": 1,
        "lag_0/truncated": 0,
        "lag_0/rejected": 0,
        "lag_0/ess": 1,
        "lag_0/abs_advantage": 1,
        "lag_1/tokens": 2,
        "lag_1/is_weight": 1.75,
        "lag_1/truncated": 0.5,
        "lag_1/rejected": 0,
        "lag_1/ess": 3.5**2 / (2 * 9.25),
        "lag_1/abs_advantage": 1,
        "lag_2/tokens": 0,
        "lag_3plus/tokens": 0,
    }
    assert actual == pytest.approx(expected, abs=1e-9)


def test_dual_clip_is_counted_where_it_holds() -> None:
    tokens = replace(worked_batch(), advantages_T=f64(-1, 1, -1))
    assert metrics_of(row("grpo", dual_clip=1.4), tokens)["clip/dual"] == pytest.approx(1 / 3)
    assert metrics_of(row("grpo"), tokens)["clip/dual"] == 0
    assert "kl/ref" not in metrics_of(row("grpo"), replace(tokens, ref_logprobs_T=None)), "there is no reference"


def test_rejection_is_counted_by_token_and_by_sample() -> None:
    actual = metrics_of(row("grpo", correction="mis", correction_bounds=(0.6, 2)))
    assert actual["is_weight/rejected"] == pytest.approx(2 / 3)
    assert actual["is_weight/rejected_samples"] == pytest.approx(1 / 2)
    assert actual["lag_1/rejected"] == 1


def test_single_ratio_form_shows_what_is_clipped_before_the_first_update() -> None:
    # weights (1, 3, 0.5) with advantages (1, 1, -1): the second is above 1.2, the third below 0.8
    actual = metrics_of(row("grpo", old="rollout", correction="none"))
    assert actual["clip/at_start"] == pytest.approx(2 / 3)


def test_a_token_without_an_advantage_is_not_clipped() -> None:
    # the first token's ratio of 1.5 is above the clip, and the last one's of 0.7 below it
    actual = metrics_of(row("grpo"), worked_batch(advantages=(0, 1, 0)))
    assert (actual["clip/high"], actual["clip/low"]) == (0, 0)


def test_cispo_reports_capped_weights_and_no_zeroed_gradients() -> None:
    actual = metrics_of(row("cispo", clip_high=0.2))
    assert actual["cap/high"] == pytest.approx(1 / 3)
    assert not any(name.startswith("clip/") for name in actual)


def test_old_tokens_share_the_last_lag_bin_and_masked_ones_count_nowhere() -> None:
    tokens = replace(worked_batch(), staleness_T=torch.tensor([3, 9, 2]), loss_mask_T=f64(1, 1, 0))
    actual = metrics_of(row("grpo"), tokens)
    assert (actual["lag_3plus/tokens"], actual["lag_2/tokens"], actual["tokens/trained"]) == (2, 0, 2)
    assert actual["staleness/max"] == 9
    assert actual["ess/sample"] == pytest.approx(1)
    assert actual["is_weight/max"] == pytest.approx(3)


def test_sample_ess_survives_weights_beyond_the_range_of_floats() -> None:
    # log weights -2000 and -2000 + ln 3: (1 + 3)^2 / (2 (1 + 9)) = 0.8
    worked = worked_batch()
    log_rho = f64(-1000, -1000, -2000 + math.log(3))
    tokens = replace(worked, rollout_logprobs_T=worked.proximal_logprobs_T - log_rho)
    assert metrics_of(row("grpo"), tokens)["ess/sample"] == pytest.approx(0.8)


def test_only_stale_tokens_without_correction_bring_the_warning() -> None:
    naive = row("grpo", correction="none")
    with pytest.warns(UserWarning, match="stale tokens are trained"):
        assert metrics_of(naive)["warning/stale_uncorrected"] == pytest.approx(2 / 3)
    fresh = replace(worked_batch(), staleness_T=torch.tensor([0, 0, 0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "warning/stale_uncorrected" not in metrics_of(naive, fresh)
        assert "warning/stale_uncorrected" not in metrics_of(row("grpo"))
        assert "warning/stale_uncorrected" not in metrics_of(row("grpo", old="rollout", correction="none"))


def test_a_fully_masked_micro_batch_changes_no_metric_of_the_whole() -> None:
    algorithm = row("grpo")
    masked = replace(worked_batch(), loss_mask_T=f64(0, 0, 0))
    whole = policy_loss(algorithm, worked_batch(), WORKED)[1]
    nothing = policy_loss(algorithm, masked, WORKED)[1]
    assert nothing.merge(whole).finalize() == whole.finalize()
    assert nothing.finalize()["tokens/trained"] == 0


VARIANTS = [row(name) for name in ALGORITHMS] + [
    row("dapo", aggregation="group-token-mean", correction="mis", guard=(0.5, 2.0)),
    row("gspo", kl_coef=0.2, kl_estimator="k3_unbiased"),
    row("rloo", correction="mask_stale"),
    row("grpo", correction_level="sequence", dual_clip=1.1),
]


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 5), min_size=3, max_size=7),
    variant=st.sampled_from(VARIANTS),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_loss_gradient_and_metrics_ignore_split_and_order_of_the_batch(
    seed: int, lengths: list[int], variant: Algorithm, data: st.DataObject
) -> None:
    whole = random_batch(seed, lengths)
    counts = denominators(whole)
    loss, metrics = policy_loss(variant, whole, counts)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = data.draw(st.sets(st.integers(1, len(lengths) - 1)))
    bounds = [0, *sorted(cuts), len(lengths)]
    parts = [take(whole, order[a:b]) for a, b in itertools.pairwise(bounds)]

    shares = [policy_loss(variant, tokens, counts) for tokens, _ in parts]
    assert sum(share.item() for share, _ in shares) == pytest.approx(loss.item(), abs=1e-12)
    total = torch.zeros_like(whole.advantages_T)
    for tokens, places in parts:
        total[places] = gradient(variant, tokens, counts)
    torch.testing.assert_close(total, gradient(variant, whole, counts), rtol=0, atol=1e-12)
    merged = functools.reduce(lambda a, b: a.merge(b), (m for _, m in shares))
    assert merged.finalize() == pytest.approx(metrics.finalize(), rel=1e-12, abs=1e-12)
