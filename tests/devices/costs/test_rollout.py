"""Decoding, prefill and caches against figures worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.devices.costs.rollout import replica_costs, replica_kind
from tests.planner.kit import MODEL, ONE_LENGTH, device, workload

SPEC = workload(prompt_tokens=100, buckets=(ONE_LENGTH,), pause_s=0.5)


def test_a_decoding_step_by_hand() -> None:
    engine = replica_costs(MODEL, SPEC, device(), 1, 1)
    kappa = 4 * 512 * 2
    read = 2 * 900_000_000 + 8 * kappa * 200
    assert engine.kv_bytes_per_token == kappa
    assert engine.kv_room == 80e9 - 2e9
    assert engine.step_s(8, 200) == pytest.approx(read / 2e12)
    flops = 4096 * (2 * 900_000_000 + 4 * 4 * 1024 * 200)
    assert engine.step_s(4096, 200) == pytest.approx(flops / 400e12), "bound by compute"


def test_tensor_parallelism_divides_reading_and_adds_two_all_reduces() -> None:
    engine = replica_costs(MODEL, SPEC, device(), 2, 1)
    read = 2 * 900_000_000 + 8 * 4096 * 200
    reduce_s = 1e-5 + 2 * 1 / 2 * 8 * 1024 * 2 / 400e9
    assert engine.step_s(8, 200) == pytest.approx(read / 4e12 + 8 * reduce_s)
    wide = replica_costs(MODEL, SPEC, device(), 8, 1)
    assert wide.kv_bytes_per_token == 2 * 4096, "four heads cached, on eight devices: each twice"


def test_stages_buy_memory_and_not_speed() -> None:
    one, two = replica_costs(MODEL, SPEC, device(), 1, 1), replica_costs(MODEL, SPEC, device(), 1, 2)
    assert two.kv_room == one.kv_room + 80e9
    hand_over_s = 1e-5 + 4 * 1024 * 2 / 400e9
    assert two.step_s(8, 200) == pytest.approx(one.step_s(4, 200) + hand_over_s)
    assert two.step_s(1, 200) >= one.step_s(1, 200), "less than one sample is in no stage"


def test_prefill_is_linear_in_parameters_and_square_in_attention() -> None:
    engine = replica_costs(MODEL, SPEC, device(), 2, 1)
    assert engine.prefill_s(1000) == pytest.approx((2 * 9e8 * 1000 + 2 * 4 * 1024 * 1000**2) / (2 * 400e12))


@given(st.integers(1, 1024))
def test_as_many_samples_are_in_flight_as_are_decoded_at_once(cap: int) -> None:
    engine = replica_costs(MODEL, SPEC, device(), 1, 1)
    column = replica_kind(engine, cap)
    assert 1 / column.rate == pytest.approx(200 * engine.step_s(cap, 200) / cap + engine.prefill_s(100) / 4)
    assert column.rate * column.latency_s == pytest.approx(cap)
    assert column.group_latency_s == pytest.approx(column.latency_s * 300 / 200)
    held = column.kv_byte_s * column.rate
    assert held == pytest.approx(cap * engine.held_bytes(200)), "Little's law for the cache"


def test_an_update_costs_transfer_pause_and_prefill_of_running_samples() -> None:
    engine = replica_costs(MODEL, SPEC, device(), 1, 1)
    load_s = 2e-5 + 2e9 / 50e9 + 0.5
    assert replica_kind(engine, 8).update_s == pytest.approx(load_s + 8 * engine.prefill_s(200))
    kept = replace(engine, workload=replace(SPEC, keeps_kv=True))
    assert replica_kind(kept, 8).update_s == pytest.approx(load_s)


def test_a_kind_decodes_all_lengths_in_proportion() -> None:
    """A quarter of the samples, half of the longest of groups and all of the longest of batches are long."""
    short = replace(ONE_LENGTH, share=0.75, group_share=0.5, batch_share=0.0)
    long = replace(short, share=0.25, tokens=800, max_tokens=1000, group_tokens=900, batch_tokens=950, batch_share=1.0)
    spec = workload(prompt_tokens=100, buckets=(short, long), pause_s=0.5)
    both, *alone = (
        replica_kind(replica_costs(MODEL, replace(spec, buckets=buckets), device(), 1, 1), 8)
        for buckets in ((short, long), (replace(short, share=1.0, group_share=1.0),), (replace(long, share=1.0),))
    )
    times = [1 / kind.rate for kind in alone]
    assert 1 / both.rate == pytest.approx(0.75 * times[0] + 0.25 * times[1])
    assert both.latency_s == pytest.approx(0.75 * alone[0].latency_s + 0.25 * alone[1].latency_s)
    assert both.group_latency_s == pytest.approx(0.5 * alone[0].group_latency_s + alone[1].group_latency_s)
    assert both.batch_latency_s == pytest.approx(alone[1].batch_latency_s)
    assert both.max_latency_s == pytest.approx(alone[1].max_latency_s)
    busy = 0.25 * times[1] * both.rate
    assert both.update_s == pytest.approx((1 - busy) * alone[0].update_s + busy * alone[1].update_s)
