"""Decides how many islands of each type and size take which share of the roles: an integer programme with exact
counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from rollover.errors import PlanError
from rollover.planner.fabric import Demand, Fabric, Shares


def compose(fabric: Fabric, demands: Mapping[str, Demand]) -> tuple[Shares, ...]:
    """Return shares that meet the demand exactly, with the fewest islands split between roles, then the fewest
    training.

    Block sizes are assumed to divide one another (powers of two): then blocks fit iff for each size enough of it
    fits, and the rows below say so exactly.
    """
    shares = [Shares(0, 0)] * len(fabric.types)
    for device in dict.fromkeys(fabric.types):
        demand = demands.get(device)
        if demand is None:
            continue
        members = sorted((i for i, t in enumerate(fabric.types) if t == device), key=lambda i: -fabric.sizes[i])
        classes = [(size, list(found)) for size, found in groupby(members, key=lambda i: fabric.sizes[i])]
        for (_, islands), taken in zip(classes, _composition(device, classes, demand), strict=True):
            for island, share in zip(islands, taken, strict=True):
                shares[island] = share
    return tuple(shares)


def _composition(device: str, classes: Sequence[tuple[int, Sequence[int]]], demand: Demand) -> list[list[Shares]]:
    """Return, for each class of equal islands, the shares of its members, most training first."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    block = demand.train_block
    options = [
        (c, Shares(train, rollout))
        for c, (size, _) in enumerate(classes)
        for train in range(0, size + 1, block)
        for rollout in range(0, size - train + 1)
    ]
    sizes = [classes[c][0] for c, _ in options]
    roles = [
        (s.train > 0) + (s.rollout > 0) + (s.train + s.rollout < size)
        for (_, s), size in zip(options, sizes, strict=True)
    ]
    cost = [r - 1 + 1e-3 * (s.train > 0) for r, (_, s) in zip(roles, options, strict=True)]
    rows = [[float(c == k) for c, _ in options] for k in range(len(classes))]
    lower = [float(len(islands)) for _, islands in classes]
    upper = list(lower)
    for row, total in (
        ([float(s.train) for _, s in options], demand.train_devices),
        ([float(s.rollout) for _, s in options], demand.rollout_devices),
    ):
        rows.append(row)
        lower.append(total)
        upper.append(total)
    for size in demand.replica_blocks:
        rows.append([float(s.rollout // size) for _, s in options])
        lower.append(sum(b * n for b, n in demand.replica_blocks.items() if b >= size) / size)
        upper.append(np.inf)
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), lower, upper),
        integrality=np.ones(len(options), dtype=np.int64),
        bounds=Bounds(0, max(len(islands) for _, islands in classes)),
    )
    if found.x is None:
        islands = " and ".join(f"{len(members)} of {size}" for size, members in classes)
        raise PlanError(
            f"{device}: islands ({islands}) cannot hold {demand.train_devices} training devices in blocks of {block}"
            f" and rollout blocks {dict(sorted(demand.replica_blocks.items()))} (size: count)"
        )
    counts = np.rint(found.x).astype(int)
    taken: list[list[Shares]] = [[] for _ in classes]
    for (c, share), count in zip(options, counts, strict=True):
        taken[c] += [share] * count
    return [sorted(found, key=lambda s: (-s.train, -s.rollout)) for found in taken]
