from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rollover.algorithms import AlgorithmConfig
from tests.algorithms.batches import row


def test_a_column_given_replaces_the_rows_value_and_no_other() -> None:
    changed = row("dapo", clip_high=0.5)
    assert changed.clip_high == 0.5
    assert (changed.clip_low, changed.aggregation, changed.group_filter) == (0.2, "token-mean", "zero_signal")


def test_a_correction_given_alone_brings_its_own_bounds() -> None:
    assert row("grpo", correction="mis").correction_bounds == (0.5, 5.0)
    assert row("grpo", correction="mis", correction_bounds=(0.9, 1.1)).correction_bounds == (0.9, 1.1)


def test_reference_and_proximal_log_probs_are_asked_for_only_when_used() -> None:
    assert not row("grpo").needs_ref
    assert row("grpo", kl_coef=0.1).needs_ref
    assert row("reinforce++").needs_ref
    assert row("grpo").needs_proximal
    assert not row("grpo", old="rollout", correction="none").needs_proximal
    assert row("grpo", old="rollout", correction="none", guard=(0.5, 2.0)).needs_proximal
    assert row("rloo").needs_proximal
    assert not row("rloo", correction="none").needs_proximal


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"name": "grop"}, "algorithm.name has no value 'grop'; did you mean 'grpo'?"),
        ({"correction": "miss"}, "algorithm.correction has no value 'miss'; did you mean 'mis'?"),
        ({"clip_low": 1.5}, "algorithm.clip_low must lie in [0, 1], got 1.5"),
        ({"kl_coef": 1e300}, "algorithm.kl_coef must be 0 or between 1e-30 and 1e30 in size, got 1e+300"),
        ({"advantage_eps": 1e-300}, "algorithm.advantage_eps must be 0 or between 1e-30 and 1e30 in size, got 1e-300"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip must be above 1, or 0 for off, got 0.5"),
        ({"correction_bounds": (1.5, 2.0)}, "must hold low <= 1 <= high, got (1.5, 2.0)"),
        ({"old": "rollout"}, "set correction to 'none' or 'mask_stale', or old to 'proximal'"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "expected gradient 0"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "needs advantage 'whitened' and kl_estimator 'k1'"),
        ({"kl_estimator": "k2"}, "algorithm.kl_estimator has no effect while kl_coef is 0: remove it"),
        ({"name": "rloo", "clip_high": 0.3}, "clip_high has no effect while objective is 'reinforce'"),
        ({"name": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip has no effect while objective is 'cispo'"),
        ({"correction": "none", "correction_bounds": (0.0, 2.0)}, "algorithm.correction_bounds has no effect while"),
        ({"name": "rloo", "advantage_eps": 1e-4}, "no effect while advantage is 'leave_one_out'"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_name(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        AlgorithmConfig(**columns)
    assert message in str(error.value)


def test_a_setting_may_be_off_where_it_has_no_effect() -> None:
    assert row("cispo", dual_clip=0.0).dual_clip == 0


def test_rows_can_be_read_without_torch() -> None:
    code = "import sys, rollover.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_row_keeps_groups_of_equal_rewards_unless_it_samples_dynamically() -> None:
    assert [row(name).keeps_group((1.0, 1.0, 1.0)) for name in ("grpo", "dapo")] == [True, False]
