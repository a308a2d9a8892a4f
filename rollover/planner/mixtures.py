"""All training plans of a problem: those that it lists, and those that its mixtures stand for.

A mixture of two types stands for as many plans as there are pairs of parts. Of the pairs with equal numbers of devices
the fastest is kept, of those the ones that no smaller one beats: a table of device counts and cycle times. Shadow
prices judge the whole table at once, again at each rate, and only what they leave is listed as plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from rollover.devices.costs.records import Mixture, PartCost, TrainingPart, TrainingPlan
from rollover.devices.costs.training import balanced_shares
from rollover.planner.rate_load import Floats, RateLoad
from rollover.planner.records import Problem
from rollover.planner.shadow_prices import PriceBounds, ShadowPrices

Ints = npt.NDArray[np.int64]

_CHUNK = 1 << 17
"""Number of plans judged at a time."""
_EXACT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureTable:
    """Plans over two types that are not listed yet, by the devices and the time they need. Arrays run over plans
    (N).

    Example: ``mixture=[0, 0], first=[8, 16], second=[4, 4], cycle_s=[60.0, 41.0]`` holds two plans of the first
    mixture: one of 8 + 4 devices, which needs 60 s for a step, and one of 16 + 4, which needs 41 s.
    """

    mixture: Ints
    """Index in the problem's mixtures."""
    first: Ints
    """Devices of the mixture's first type."""
    second: Ints
    cycle_s: Floats

    @classmethod
    def of(cls, problem: Problem) -> MixtureTable:
        """Return the plans of all the problem's mixtures, without the shapes that it already lists."""
        listed = _listed(problem)
        found = [_cells(mixture, listed, _alone(problem, mixture)) for mixture in problem.mixtures]
        index = np.repeat(np.arange(len(found)), [len(cycle_s) for _, _, cycle_s in found])
        first, second, cycle_s = (np.concatenate(part) for part in zip(*found, strict=True)) if found else [[]] * 3
        return cls(
            mixture=index.astype(np.int64),
            first=np.asarray(first, dtype=np.int64),
            second=np.asarray(second, dtype=np.int64),
            cycle_s=np.asarray(cycle_s, dtype=np.float64),
        )

    def kept(self, which: npt.NDArray[np.bool_] | Ints) -> MixtureTable:
        return MixtureTable(**{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def without(self, problem: Problem, plan: TrainingPlan) -> MixtureTable:
        """Return the table without the plans of exactly these devices."""
        same = np.ones(len(self), dtype=bool)
        for index, mixture in enumerate(problem.mixtures):
            first, second = plan.count(_device(mixture.first)), plan.count(_device(mixture.second))
            if len(plan.parts) == 2 and first and second:
                same = (self.mixture == index) & (self.first == first) & (self.second == second)
        return self.kept(~same)

    def __len__(self) -> int:
        return len(self.cycle_s)

    def training(self, problem: Problem) -> Floats:
        """Return the devices of each type, (N, G)."""
        places = {supply.device: g for g, supply in enumerate(problem.supplies)}
        found = np.zeros((len(self), len(places)))
        at = np.arange(len(self))
        for side, counts in ((0, self.first), (1, self.second)):
            types = np.array([places[_device((m.first, m.second)[side])] for m in problem.mixtures], dtype=np.int64)
            found[at, types[self.mixture]] = counts
        return found

    def plan(self, problem: Problem, index: int) -> TrainingPlan:
        """Return the fastest unlisted training plan with the devices of row ``index``."""
        mixture = problem.mixtures[self.mixture[index]]
        listed = _listed(problem)
        pairs = [
            (x, y)
            for x in mixture.first
            if x.part.num_devices == self.first[index]
            for y in mixture.second
            if y.part.num_devices == self.second[index] and _shape((x.part, y.part)) not in listed
        ]
        return min((_plan(mixture, x, y) for x, y in pairs), key=lambda plan: plan.cycle_s)


class UnlistedPlans:
    """The plans of a table that may carry a load: fewer with every set of shadow prices."""

    def __init__(self, table: MixtureTable, load: RateLoad) -> None:
        self._load = load
        self._table = table.kept(table.cycle_s * load.rate <= 1 + _EXACT)
        able = np.concatenate([load.can_train(*means) for means in self._means()] or [np.zeros(0, dtype=bool)])
        self._keep(able, np.full(len(able), np.inf))

    def judge(self, bounds: PriceBounds, prices: ShadowPrices, cost: float) -> None:
        """Keep only the plans that have room at these prices, and had room at all earlier ones."""
        found = [bounds.room(*means, prices, cost) for means in self._means()]
        room = np.minimum(self.room, np.concatenate(found) if found else self.room)
        self._keep(room >= -_EXACT, room)

    def beyond(self, bounds: PriceBounds, prices: ShadowPrices) -> float:
        """Return how much more than the load the best of them might carry, relative."""
        return max((float(bounds.beyond(*means, prices).max()) for means in self._means()), default=-1.0)

    @property
    def most_room(self) -> float:
        return float(self.room.max(initial=-np.inf))

    def taken(self, problem: Problem) -> tuple[TrainingPlan, float]:
        """Return the plan with most room, listed, and its room; it leaves the table."""
        best = int(np.argmax(self.room))
        plan, room = self._table.plan(problem, best), float(self.room[best])
        left = np.arange(len(self.room)) != best
        self._keep(left, self.room)
        return plan, room

    def _keep(self, which: npt.NDArray[np.bool_], room: Floats) -> None:
        self._table, self.room = self._table.kept(which), room[which]

    def _means(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield the devices of the plans and the parts of the time for which they are busy, ``_CHUNK`` plans at a
        time."""
        for start in range(0, len(self._table), _CHUNK):
            part = self._table.kept(np.arange(start, min(start + _CHUNK, len(self._table))))
            yield part.training(self._load.problem), part.cycle_s * self._load.rate


def _cells(
    mixture: Mixture, listed: set[tuple[TrainingPart, ...]], alone: tuple[Floats, Floats]
) -> tuple[Ints, Ints, Floats]:
    """Return (devices of the first type, devices of the second, cycle time) of every plan that no plan with as few
    devices of each type beats, neither one of the mixture nor one of a single type (``alone``)."""
    one, other = _Side(mixture.first), _Side(mixture.second)
    step_s = np.full((len(one.sizes), len(other.sizes)), np.inf)
    known = set(_listed_pairs(mixture, listed))
    for row, (start, end) in enumerate(one.groups):
        every = _step_s(one.batch_s[start:end, None], one.fixed_s[start:end, None], other.batch_s, other.fixed_s)
        for x, y in known:
            if start <= x < end:
                every[x - start, y] = np.inf
        step_s[row] = np.minimum.reduceat(every.min(axis=0), [group[0] for group in other.groups])
    cycle_s = step_s + mixture.across_s + mixture.sync_s
    least = np.minimum.accumulate(np.minimum.accumulate(cycle_s, axis=0), axis=1)
    beaten = np.minimum(alone[0][one.sizes][:, None], alone[1][other.sizes][None])
    beaten[1:] = np.minimum(beaten[1:], least[:-1])
    beaten[:, 1:] = np.minimum(beaten[:, 1:], least[:, :-1])
    i, j = np.nonzero(cycle_s < beaten)
    return one.sizes[i], other.sizes[j], cycle_s[i, j]


class _Side:
    """The parts of one type as arrays, which grow in devices."""

    def __init__(self, choices: Sequence[PartCost]) -> None:
        counts = np.array([choice.part.num_devices for choice in choices], dtype=np.int64)
        self.batch_s = np.array([choice.batch_s for choice in choices])
        self.fixed_s = np.array([choice.fixed_s for choice in choices])
        self.sizes, starts = np.unique(counts, return_index=True)
        self.groups = list(zip(starts.tolist(), [*starts[1:].tolist(), len(counts)], strict=True))


def _step_s(batch_s: Floats, fixed_s: Floats, other_batch_s: Floats, other_fixed_s: Floats) -> Floats:
    """Compute ``balanced_shares`` for arrays of pairs; the result is infinite where one of a pair would only delay the
    other."""
    step_s: Floats = (1 + (fixed_s / batch_s + other_fixed_s / other_batch_s)) / (1 / batch_s + 1 / other_batch_s)
    step_s[np.maximum(fixed_s, other_fixed_s) >= step_s] = np.inf
    return step_s


def _plan(mixture: Mixture, x: PartCost, y: PartCost) -> TrainingPlan:
    shares, step_s = balanced_shares((x, y))
    parts = tuple(replace(c.part, share=share) for c, share in zip((x, y), shares, strict=True))
    return TrainingPlan(parts=parts, step_s=step_s + mixture.across_s, sync_s=mixture.sync_s)


def _alone(problem: Problem, mixture: Mixture) -> tuple[Floats, Floats]:
    """Return, for each side of the mixture and each number of devices from 0, the least cycle time of a plan of that
    type alone with at most that many devices."""
    found = []
    for side in (mixture.first, mixture.second):
        least = np.full(1 + max(choice.part.num_devices for choice in side), np.inf)
        for plan in problem.plans:
            if len(plan.parts) == 1 and plan.parts[0].device == _device(side) and plan.num_devices < len(least):
                least[plan.num_devices] = min(least[plan.num_devices], plan.cycle_s)
        found.append(np.minimum.accumulate(least))
    return found[0], found[1]


def _listed_pairs(mixture: Mixture, listed: Iterable[tuple[TrainingPart, ...]]) -> Iterator[tuple[int, int]]:
    """Yield the indices of the pairs of parts that are listed."""
    first, second = ({choice.part: i for i, choice in enumerate(s)} for s in (mixture.first, mixture.second))
    for parts in listed:
        for x, y in (parts, parts[::-1]):
            if x in first and y in second:
                yield first[x], second[y]


def _listed(problem: Problem) -> set[tuple[TrainingPart, ...]]:
    return {_shape(plan.parts) for plan in problem.plans if len(plan.parts) == 2}


def _shape(parts: Iterable[TrainingPart]) -> tuple[TrainingPart, ...]:
    """Identify a plan by its parts alone, whatever their order and shares."""
    return tuple(sorted((replace(part, share=1.0) for part in parts), key=lambda p: p.device))


def _device(side: Sequence[PartCost]) -> str:
    return side[0].part.device
