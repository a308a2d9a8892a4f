"""The cost model against figures worked by hand, and its laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.devices import costs
from rollover.devices.records import Device, LengthBucket, Link, TrainingPart
from rollover.planner import columns
from rollover.planner.milp import solve
from tests.planner.kit import FAST, MODEL, device, workload

ONE = LengthBucket(
    share=1.0, tokens=200, max_tokens=400, group_share=1.0, group_tokens=300, batch_share=1.0, batch_tokens=380
)
SPEC = workload(prompt_tokens=100, buckets=(ONE,), pause_s=0.5)


def part(**changes: int | bool) -> TrainingPart:
    base = TrainingPart(device="a", dp=1, tp=1, pp=1, sharded=False, recompute=False, share=1.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_decoding_step_by_hand() -> None:
    engine = costs.replica(MODEL, SPEC, device(), 1, 1)
    kappa = 4 * 512 * 2
    read = 2 * 900_000_000 + 8 * kappa * 200
    assert engine.kv_bytes_per_token == kappa
    assert engine.kv_room == 80e9 - 2e9
    assert engine.step_s(8, 200) == pytest.approx(read / 2e12)
    flops = 4096 * (2 * 900_000_000 + 4 * 4 * 1024 * 200)
    assert engine.step_s(4096, 200) == pytest.approx(flops / 400e12), "bound by compute"


def test_tensor_parallelism_divides_reading_and_adds_two_all_reduces_a_layer() -> None:
    engine = costs.replica(MODEL, SPEC, device(), 2, 1)
    read = 2 * 900_000_000 + 8 * 4096 * 200
    reduce_s = 1e-5 + 2 * 1 / 2 * 8 * 1024 * 2 / 400e9
    assert engine.step_s(8, 200) == pytest.approx(read / 4e12 + 8 * reduce_s)
    wide = costs.replica(MODEL, SPEC, device(), 8, 1)
    assert wide.kv_bytes_per_token == 2 * 4096, "four heads cached, on eight devices: each twice"


def test_stages_buy_memory_and_not_speed() -> None:
    one, two = costs.replica(MODEL, SPEC, device(), 1, 1), costs.replica(MODEL, SPEC, device(), 1, 2)
    assert two.kv_room == one.kv_room + 80e9
    hand_over_s = 1e-5 + 4 * 1024 * 2 / 400e9
    assert two.step_s(8, 200) == pytest.approx(one.step_s(4, 200) + hand_over_s)
    assert two.step_s(1, 200) >= one.step_s(1, 200), "less than one sample is in no stage"


def test_prefill_is_linear_in_parameters_and_square_in_attention() -> None:
    engine = costs.replica(MODEL, SPEC, device(), 2, 1)
    assert engine.prefill_s(1000) == pytest.approx((2 * 9e8 * 1000 + 2 * 4 * 1024 * 1000**2) / (2 * 400e12))


@given(st.integers(1, 1024))
def test_as_many_samples_are_in_flight_as_are_decoded_at_once(cap: int) -> None:
    engine = costs.replica(MODEL, SPEC, device(), 1, 1)
    column = costs.replica_kind(engine, cap)
    assert column.rates[0] * column.latencies_s[0] == pytest.approx(cap)
    assert column.group_latencies_s[0] == pytest.approx(column.latencies_s[0] * 300 / 200)
    held = column.kv_byte_s[0] * column.rates[0]
    assert held == pytest.approx(cap * engine.held_bytes(200)), "Little's law for the cache"


def test_an_update_costs_the_transfer_the_pause_and_the_prefill_of_all_that_runs() -> None:
    engine = costs.replica(MODEL, SPEC, device(), 1, 1)
    load_s = 2e-5 + 2e9 / 50e9 + 0.5
    assert costs.replica_kind(engine, 8).updates_s[0] == pytest.approx(load_s + 8 * engine.prefill_s(200))
    kept = replace(engine, workload=replace(SPEC, keeps_kv=True))
    assert costs.replica_kind(kept, 8).updates_s[0] == pytest.approx(load_s)


@given(st.integers(1, 6), st.integers(1, 3))
def test_every_expert_that_some_sample_visits_is_read(batch: int, per_token: int) -> None:
    """Against the mean over all ways to choose, one expert at a time: 1 - (1 - k/E)^b."""
    experts = 4
    sparse = replace(MODEL, expert_parameters=400, num_experts=experts, experts_per_token=per_token)
    missed = ((experts - per_token) / experts) ** batch
    shared = MODEL.parameters - 400 - MODEL.embedding_parameters
    assert costs.read_parameters(sparse, batch) == pytest.approx(shared + 400 * (1 - missed))
    assert costs.read_parameters(sparse, 10**6) == pytest.approx(shared + 400)


def test_a_training_step_by_hand() -> None:
    """One device: 64 sequences of 300 tokens, three passes' worth and one for log-probabilities."""
    trainer = costs.trainer(MODEL, SPEC, device(hbm_bytes=1e15), part())
    forward = 64 * 300 * (2 * 9e8 + 4 * 4 * 1024 * 150)
    optimizer_s = 2 * 16 * 1e9 / 2e12
    assert trainer.cost().batch_s == pytest.approx(4 * forward / 400e12)
    assert trainer.cost().fixed_s == pytest.approx(optimizer_s)
    again = costs.trainer(MODEL, replace(SPEC, reference_model=True), device(), part(recompute=True))
    assert again.cost().batch_s == pytest.approx(6 * forward / 400e12)


def test_state_is_sixteen_bytes_a_parameter_divided_over_its_shards() -> None:
    whole = costs.trainer(MODEL, SPEC, device(), part(recompute=True)).memory_bytes
    sharded = costs.trainer(MODEL, SPEC, device(), part(dp=4, sharded=True, recompute=True)).memory_bytes
    gathered = 2 * 2e9 / 4
    reference = costs.trainer(MODEL, replace(SPEC, reference_model=True), device(), part(recompute=True)).memory_bytes
    assert whole - sharded == pytest.approx(16e9 * 3 / 4 - gathered)
    assert reference - whole == pytest.approx(2e9)


def test_a_pipeline_fills_and_drains_once() -> None:
    alone = costs.trainer(MODEL, SPEC, device(), part(tp=1, pp=1)).cost()
    piped = costs.trainer(MODEL, SPEC, device(), part(tp=1, pp=4)).cost()
    micro_s = piped.batch_s / (64 * 300 / 500)
    hand_over_s = 1e-5 + 500 * 1024 * 2 / 400e9
    assert piped.batch_s == pytest.approx(alone.batch_s / 4)
    optimizer_s = 2 * 16 * 1e9 / 4 / 2e12
    assert piped.fixed_s == pytest.approx(3 * (micro_s + 2 * hand_over_s) + optimizer_s)


def test_gradients_cross_the_network_once_a_step_and_hide_behind_the_last_micro_batch() -> None:
    slow = Link(bytes_per_s=1e9, latency_s=0.0)
    alone = costs.trainer(MODEL, SPEC, device(), part(dp=2)).cost()
    wide = costs.trainer(MODEL, SPEC, device(node_size=1, network=slow), part(dp=2)).cost()
    micro_s = alone.batch_s / (64 * 300 / 500 / 2)
    assert wide.batch_s == pytest.approx(alone.batch_s)
    assert wide.fixed_s - alone.fixed_s == pytest.approx(2 * 1 / 2 * 2e9 / 1e9 - micro_s)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0, 50)), min_size=1, max_size=4))
def test_parts_that_share_a_batch_finish_together(pairs: list[tuple[float, float]]) -> None:
    parts = tuple(costs.PartCost(batch_s=a, fixed_s=b) for a, b in pairs)
    shares, step_s = costs.balanced(parts)
    assert sum(shares) == pytest.approx(1)
    for share, cost in zip(shares, parts, strict=True):
        if share:
            assert share * cost.batch_s + cost.fixed_s == pytest.approx(step_s)
        else:
            assert cost.fixed_s >= step_s * (1 - 1e-9)
    assert step_s <= min(c.batch_s + c.fixed_s for c in parts) * (1 + 1e-9)


def rate(*devices: tuple[Device, int]) -> float:
    built = columns.of_stock(dict(devices), MODEL, workload(), max_staleness=8)
    solution = solve(built, simplify=False)
    assert solution is not None
    return solution.steps_per_s


@pytest.mark.parametrize(
    "better",
    [
        {"flops": 500e12},
        {"hbm_bytes_per_s": 3e12},
        {"hbm_bytes": 120e9},
        {"link": replace(FAST, bytes_per_s=600e9)},
        {"network": Link(bytes_per_s=100e9, latency_s=1e-5)},
    ],
)
def test_a_better_device_never_costs_rate(better: dict[str, object]) -> None:
    assert rate((device(**better), 6)) >= rate((device(), 6)) * (1 - 2e-3)


def test_longer_responses_and_larger_batches_never_bring_rate() -> None:
    def steps(**changes: object) -> float:
        solution = solve(columns.of_stock({device(): 6}, MODEL, workload(**changes), max_staleness=8), simplify=False)
        assert solution is not None
        return solution.steps_per_s

    longer = tuple(
        replace(
            b,
            tokens=1.5 * b.tokens,
            max_tokens=int(1.5 * b.max_tokens),
            group_tokens=1.5 * b.group_tokens,
            batch_tokens=1.5 * b.batch_tokens,
        )
        for b in workload().buckets
    )
    assert steps(buckets=longer) < steps()
    assert steps(num_groups=24) < steps()


def test_devices_k_times_faster_with_latencies_k_times_shorter_give_k_times_the_rate() -> None:
    k = 4.0
    base = device(efficiency=replace(device().efficiency, step_s=1e-3))

    def scaled(link: Link) -> Link:
        return Link(bytes_per_s=link.bytes_per_s * k, latency_s=link.latency_s / k)

    quick = replace(
        base,
        flops=base.flops * k,
        hbm_bytes_per_s=base.hbm_bytes_per_s * k,
        link=scaled(base.link),
        network=scaled(base.network),
        efficiency=replace(base.efficiency, step_s=1e-3 / k),
    )
    slow_spec = workload(reward_s=2.0, pause_s=1.0)
    quick_spec = replace(slow_spec, reward_s=2.0 / k, pause_s=1.0 / k)
    slow = solve(columns.of_stock({base: 6}, MODEL, slow_spec, max_staleness=2), simplify=False)
    fast = solve(columns.of_stock({quick: 6}, MODEL, quick_spec, max_staleness=2), simplify=False)
    assert slow is not None
    assert fast is not None
    assert fast.steps_per_s == pytest.approx(k * slow.steps_per_s, rel=2e-3)
