"""Training steps against figures worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.devices.costs.training import PartCost, balanced_shares, trainer_costs
from rollover.devices.records import Link
from tests.planner.kit import MODEL, ONE_LENGTH, device, training_part, workload

SPEC = workload(prompt_tokens=100, buckets=(ONE_LENGTH,), pause_s=0.5)


def test_a_training_step_by_hand() -> None:
    """One device: 64 sequences of 300 tokens, three passes' worth and one for log-probabilities."""
    trainer = trainer_costs(MODEL, SPEC, device(hbm_bytes=1e15), training_part())
    forward = 64 * 300 * (2 * 9e8 + 4 * 4 * 1024 * 150)
    optimizer_s = 2 * 16 * 1e9 / 2e12
    assert trainer.cost.batch_s == pytest.approx(4 * forward / 400e12)
    assert trainer.cost.fixed_s == pytest.approx(optimizer_s)
    again = trainer_costs(MODEL, replace(SPEC, reference_model=True), device(), training_part(recompute=True))
    assert again.cost.batch_s == pytest.approx(6 * forward / 400e12)


def test_state_is_sixteen_bytes_a_parameter_divided_over_its_shards() -> None:
    whole = trainer_costs(MODEL, SPEC, device(), training_part(recompute=True)).memory_bytes
    sharded = trainer_costs(MODEL, SPEC, device(), training_part(dp=4, sharded=True, recompute=True)).memory_bytes
    gathered = 2 * 2e9 / 4
    reference = trainer_costs(
        MODEL, replace(SPEC, reference_model=True), device(), training_part(recompute=True)
    ).memory_bytes
    assert whole - sharded == pytest.approx(16e9 * 3 / 4 - gathered)
    assert reference - whole == pytest.approx(2e9)


def test_a_pipeline_fills_and_drains_once() -> None:
    alone = trainer_costs(MODEL, SPEC, device(), training_part(tp=1, pp=1)).cost
    piped = trainer_costs(MODEL, SPEC, device(), training_part(tp=1, pp=4)).cost
    micro_s = piped.batch_s / (64 * 300 / 500)
    hand_over_s = 1e-5 + 500 * 1024 * 2 / 400e9
    assert piped.batch_s == pytest.approx(alone.batch_s / 4)
    optimizer_s = 2 * 16 * 1e9 / 4 / 2e12
    assert piped.fixed_s == pytest.approx(3 * (micro_s + 2 * hand_over_s) + optimizer_s)


def test_gradients_cross_once_a_step_behind_the_last_micro_batch() -> None:
    slow = Link(bytes_per_s=1e9, latency_s=0.0)
    alone = trainer_costs(MODEL, SPEC, device(), training_part(dp=2)).cost
    wide = trainer_costs(MODEL, SPEC, device(node_size=1, network=slow), training_part(dp=2)).cost
    micro_s = alone.batch_s / (64 * 300 / 500 / 2)
    assert wide.batch_s == pytest.approx(alone.batch_s)
    assert wide.fixed_s - alone.fixed_s == pytest.approx(2 * 1 / 2 * 2e9 / 1e9 - micro_s)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0, 50)), min_size=1, max_size=4))
def test_parts_that_share_a_batch_finish_together(pairs: list[tuple[float, float]]) -> None:
    parts = tuple(PartCost(part=training_part(), batch_s=a, fixed_s=b) for a, b in pairs)
    shares, step_s = balanced_shares(parts)
    assert sum(shares) == pytest.approx(1)
    for share, cost in zip(shares, parts, strict=True):
        if share:
            assert share * cost.batch_s + cost.fixed_s == pytest.approx(step_s)
        else:
            assert cost.fixed_s >= step_s * (1 - 1e-9)
    assert step_s <= min(c.batch_s + c.fixed_s for c in parts) * (1 + 1e-9)
