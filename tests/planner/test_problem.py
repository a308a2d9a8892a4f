"""What there is to choose from fits into memory, and nothing worth choosing is missing."""

from __future__ import annotations

import re
from itertools import product

import pytest

from rollover.devices.costs.rollout import replica_costs
from rollover.devices.costs.training import TrainerCosts, trainer_costs, training_plan
from rollover.errors import PlanError
from rollover.planner.problem import stock_problem
from tests.planner.kit import MODEL, device, training_part, workload

TWO = {device("a"): 8, device("b", flops=100e12, price_per_hour=1.0): 8}


def test_everything_offered_fits_into_memory_and_stock() -> None:
    built = stock_problem(TWO, MODEL, workload(), max_staleness=1)
    devices = {d.name: d for d in TWO}
    for kind in built.replica_kinds:
        engine = replica_costs(MODEL, workload(), devices[kind.device], kind.tp, kind.pp)
        assert engine.fits()
        assert kind.rate * kind.kv_byte_s <= engine.kv_room * (1 + 1e-9)
        assert kind.num_devices <= 8
    for plan in built.plans:
        assert sum(part.share for part in plan.parts) == pytest.approx(1)
        for part in plan.parts:
            assert trainer_costs(MODEL, workload(), devices[part.device], part).fits()
            assert part.num_devices <= 8


def test_no_training_plan_is_beaten_with_the_same_devices() -> None:
    plans = stock_problem(TWO, MODEL, workload(), max_staleness=1).plans
    for plan in plans:
        for other in plans:
            if other is not plan and all(other.count(d.name) <= plan.count(d.name) for d in TWO):
                assert other.cycle_s > plan.cycle_s


def test_plans_train_about_as_fast_as_any_shapes_of_one_or_two_types() -> None:
    """For every number of devices, against every shape of one type and every pair of shapes of two."""
    plans = stock_problem(TWO, MODEL, workload(), max_staleness=1).plans
    shapes = list(product(range(1, 9), (1, 2, 4, 8), (1, 2, 4), (False, True), (False, True)))
    sides: list[list[TrainerCosts]] = []
    for made in TWO:
        parts = [
            training_part(device=made.name, dp=dp, tp=tp, pp=pp, sharded=sharded, recompute=recompute)
            for dp, tp, pp, sharded, recompute in shapes
            if dp * tp * pp <= 8 and (dp > 1 or not sharded)
        ]
        every = [trainer_costs(MODEL, workload(), made, one) for one in parts]
        sides.append([trainer for trainer in every if trainer.fits()])
    for trainers in [*zip(sides[0]), *zip(sides[1]), *product(*sides)]:
        used = {t.part.device: t.part.num_devices for t in trainers}
        within = [p for p in plans if all(p.count(d.name) <= used.get(d.name, 0) for d in TWO)]
        assert min(p.cycle_s for p in within) <= (1.01 if len(trainers) > 1 else 1) * training_plan(trainers).cycle_s


def test_sharding_and_recomputation_come_when_memory_is_short() -> None:
    def shapes(hbm_bytes: float) -> set[tuple[bool, bool]]:
        plans = stock_problem({device(hbm_bytes=hbm_bytes): 4}, MODEL, workload(), max_staleness=1).plans
        return {(part.sharded, part.recompute) for plan in plans for part in plan.parts if part.tp * part.pp == 1}

    assert (False, False) in shapes(80e9)
    assert shapes(8e9) <= {(True, False), (True, True)}


@pytest.mark.parametrize(
    ("hbm_bytes", "message"),
    [
        (
            0.1e9,
            "m (1.0B parameters) cannot roll out on any device of this fleet:\n  a: 0.1 GiB per device needed even with tp 4 x pp 4, 0.1 of 0.1 GiB usable\n",
        ),
        (1.2e9, "m (1.0B parameters) cannot train on any device of this fleet:\n  a: "),
    ],
)
def test_a_model_that_fits_nowhere_is_told_with_what_it_needs(hbm_bytes: float, message: str) -> None:
    count = 16 if hbm_bytes < 1e9 else 4
    with pytest.raises(PlanError) as caught:
        stock_problem({device(hbm_bytes=hbm_bytes): count}, MODEL, workload(), max_staleness=1)
    assert str(caught.value).startswith(message)
    assert "add devices of one type, or use devices with more memory" in str(caught.value)


def test_what_rollover_cannot_launch_is_not_said_to_fit() -> None:
    """Pipelines of training would, and replicas over several devices."""
    for act, server, hbm_bytes in (("train", "vllm", 2e9), ("roll out", "embedded_server", 1.5e9)):
        stock = {device(hbm_bytes=hbm_bytes): 16}
        stock_problem(stock, MODEL, workload(), max_staleness=1)
        with pytest.raises(PlanError) as caught:
            stock_problem(stock, MODEL, workload(), max_staleness=1, launchable=server)
        said = str(caught.value)
        assert f"cannot {act} on any device of this fleet in shapes that rollover launch can run" in said
        needed, usable = re.search(r"([\d.]+) GiB per device.*, ([\d.]+) of", said).groups()
        assert float(needed) > float(usable)


def test_a_bound_below_zero_is_refused() -> None:
    with pytest.raises(PlanError, match="max_staleness must be at least 0, got -1"):
        stock_problem({device(): 4}, MODEL, workload(), max_staleness=-1)
