"""Laws of the cost model as plans show them: what is better never costs rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.devices.records import Device, Link
from rollover.planner.optimum import solve
from rollover.planner.problem import stock_problem
from tests.planner.kit import FAST, MODEL, device, workload


def rate(*devices: tuple[Device, int]) -> float:
    built = stock_problem(dict(devices), MODEL, workload(), max_staleness=8)
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
        solution = solve(stock_problem({device(): 6}, MODEL, workload(**changes), max_staleness=8), simplify=False)
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


def test_devices_that_are_k_times_faster_give_k_times_the_rate() -> None:
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
    slow = solve(stock_problem({base: 6}, MODEL, slow_spec, max_staleness=2), simplify=False)
    fast = solve(stock_problem({quick: 6}, MODEL, quick_spec, max_staleness=2), simplify=False)
    assert slow is not None
    assert fast is not None
    assert fast.steps_per_s == pytest.approx(k * slow.steps_per_s, rel=2e-3)
