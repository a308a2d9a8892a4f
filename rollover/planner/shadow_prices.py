"""Bounds on whole families of plans, by weak duality.

Put a price on every limit: a device of each type, the budget, staleness. What a step's samples cost at these prices, on
the replicas that make them cheapest, is the least that any plan must pay; what a trainer leaves of the limits is all
that it can. A trainer that leaves too little cannot reach the rate, at any prices: so one set of prices judges every
training plan at once, and tells how many replicas of a poor kind the rest of the money could bear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import LinearConstraint

from rollover.planner.milp import minimum
from rollover.planner.rate_demand import Floats, RateDemand

_MOST = 1e5
"""Highest price next to real costs, for work that no price can pay for. Limits are scaled to 1."""
_ROUNDING = 1e-9
_LOSS = 1e-6
"""Smallest loss that counts as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrices:
    """Shadow prices of the limits (dual variables), relative to each other or beside what devices really cost."""

    limits: Floats
    """(G + S + 2,): each type, each scarce size of blocks, the budget, staleness."""
    real: float
    """1 if the devices' real cost counts too, else 0."""


class PriceBounds:
    """Bounds on plans at one rate: what they must pay at given shadow prices, and what they can."""

    def __init__(self, demand: RateDemand) -> None:
        problem = demand.problem
        self.demand = demand
        self.unit = float(demand.stock @ demand.costs)
        """Unit of real costs: the cost of the whole fleet."""
        budget = np.inf if problem.budget_per_hour is None else problem.budget_per_hour
        spent = np.nan_to_num(demand.prices) / budget
        bound = problem.max_staleness + 1
        blocks = np.ones((len(demand.busy), len(demand.scarce)))  # a trainer's are not counted
        left = (demand.stock - demand.training) / demand.stock
        has = np.column_stack([left, blocks, 1 - demand.training @ spent, 1 - demand.busy / bound])
        self.has = np.where(np.abs(has) < _ROUNDING, 0.0, has)
        """(P, G + S + 2): at least what each plan leaves of the limits."""
        whole, scarce = demand.sizes[:, None] * demand.of_type.T, np.array([count for *_, count in demand.scarce])
        self.uses = np.column_stack([whole / demand.stock, demand.in_blocks.T / scarce, whole @ spent])
        """(C, G + S + 1): of a replica."""
        self.waiting = demand.waiting / bound
        self.cost = demand.sizes * (demand.of_type.T @ demand.costs) / self.unit
        """(C,): of a replica."""
        self.training = demand.training @ demand.costs / self.unit
        """(P,)"""

    def prices(self, plans: Sequence[int], *, real: bool = False) -> ShadowPrices:
        """Return the prices that bound the best of ``plans`` most tightly: with ``real`` costs its cost, else its rate.
        Variables: a price for every limit, the worth of all samples, and the means of the richest plan."""
        limits = self.has.shape[1]
        c = np.flatnonzero(self.demand.in_time(plans))
        if not len(c):  # at any prices above zero they must pay without end
            return ShadowPrices(limits=np.ones(limits), real=float(real))
        ones = self._worth(ShadowPrices(limits=np.ones(limits), real=0.0))
        unit = 1.0 if real else float(ones[c].min())  # prices are about 1
        means = np.column_stack([self.has[list(plans)], np.zeros(len(plans)), -np.ones(len(plans))])
        time, waiting = self.demand.time[c, None] / unit, self.waiting[c] / unit
        # Samples are worth no more than any kind can make them for.
        made = np.column_stack([-time * self.uses[c], -waiting, np.ones(len(c)), np.zeros(len(c))])
        highest = np.r_[self.training[list(plans)], time[:, 0] * self.cost[c]] * real
        rows, low = np.vstack([means, made]), np.full(len(highest), -np.inf)
        total = np.r_[np.zeros(limits), 1.0, 0.0]
        if not real:  # prices are relative
            rows, low, highest = np.vstack([rows, total]), np.r_[low, 1.0], np.r_[highest, 1.0]
        objective = np.r_[np.zeros(limits + 1), 1.0] - real * total
        top = np.r_[np.full(limits, _MOST if real else np.inf), np.inf, np.inf]
        bottom = np.r_[np.zeros(limits + 1), -np.inf]
        found = minimum(objective, LinearConstraint(rows, low, highest), bottom, top)
        assert found is not None, "all prices may be zero or as high as they need to be"
        return ShadowPrices(limits=np.maximum(found.x[:limits], 0), real=float(real))

    def room(self, prices: ShadowPrices, cost: float = 0.0) -> Floats:
        """Return (P,): how much more each plan could pay than it must, with ``real`` costs up to a total of ``cost``;
        below zero if it cannot carry the demand."""
        return self.has @ prices.limits - self._must(prices) + prices.real * (cost / self.unit - self.training)

    def promise(self, plans: Sequence[int]) -> float:
        """Return how much more than the demand the best of ``plans`` might meet, relative; below zero if none can."""
        return float(self.beyond(self.prices(plans))[list(plans)].max())

    def beyond(self, prices: ShadowPrices) -> Floats:
        """Return (P,): how much more than the demand each plan might meet, relative: no prices promise too little. It
        is infinite if a demand costs nothing, as on an unpriced type that only a quicker trainer leaves in time."""
        must, can = self._must(prices), self.has @ prices.limits
        return np.divide(can, must, out=np.full(len(must), np.inf), where=must > 0) - 1

    def most(self, prices: ShadowPrices, plan: int, room: float) -> Floats:
        """Return (C,): the number of replicas of each kind that ``plan`` can pay for with ``room``: those of a poor
        kind cost more than they make."""
        usable = self.demand.in_time([plan])
        made = np.where(usable, self._worth(prices), np.inf).min() - self.waiting * prices.limits[-1]
        earns = np.where(usable, np.maximum(made / self.demand.time, 0.0), 0.0)
        loss = self._charge(prices) - earns
        return np.where(loss > _LOSS, np.floor(room / np.maximum(loss, _LOSS) + _LOSS), np.inf)

    def _must(self, prices: ShadowPrices) -> Floats:
        """Return (P,): the cost of all samples on the kinds that are in time beside each plan."""
        demand = self.demand
        worth, order = np.where(demand.usable, self._worth(prices), np.inf), np.argsort(demand.longest, kind="stable")
        least = np.r_[np.inf, np.minimum.accumulate(worth[order])]
        must: Floats = least[np.searchsorted(demand.longest[order], demand.left_s(demand.busy), side="right")]
        return must

    def _charge(self, prices: ShadowPrices) -> Floats:
        """Return (C,): the charge for one replica."""
        return self.uses @ prices.limits[:-1] + prices.real * self.cost

    def _worth(self, prices: ShadowPrices) -> Floats:
        """Return (C,): the cost of decoding all samples on a kind."""
        return self.demand.time * self._charge(prices) + self.waiting * prices.limits[-1]
