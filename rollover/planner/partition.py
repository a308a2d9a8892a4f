"""Decides which islands train and which roll out: exact counts per device type, wide links where the bytes flow.

Two decisions are kept apart: ``compose`` settles how many islands of each type and size take which share of the roles,
splitting as few as the counts allow; ``arrange`` settles which islands those are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollover.planner.arrangement import arrange
from rollover.planner.composition import compose
from rollover.planner.fabric import Demand, Fabric, Shares, Traffic


def partition(
    fabric: Fabric,
    demands: Mapping[str, Demand],
    traffic: Traffic,
    *,
    starts: int = 8,
    seed: int = 0,
    first: Sequence[int] | None = None,
) -> tuple[Shares, ...]:
    """Shares of each island. ``first`` is an order of the islands to start from, training ones first: ``metis_order``.

    Raises:
        PlanError: the islands cannot hold the demand, for example a stage of 8 devices on islands of 4.
    """
    return arrange(fabric, compose(fabric, demands), traffic, starts=starts, seed=seed, first=first)
