"""The demand that training at a given rate puts on replicas, trainers and limits.

Replica counts times rate is not linear, and weight updates cost replicas time in proportion to the rate; at a rate that
is given, both are. So is the tail: a kind may be used or may not. A problem can be done at some rates, from zero up to
its optimum: ``rollover.planner.optimum`` looks for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollover.devices.costs.records import TrainingPart
from rollover.planner.blocks import block, in_blocks, powers
from rollover.planner.records import Problem

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

USABLE = 1e-3
"""Fraction of its time that weight updates must leave a replica; replicas below it are not used."""
_ROUNDING = 1e-9


class RateDemand:
    """``problem`` at ``rate`` steps/s. Arrays run over kinds (C), training plans (P) and types (G)."""

    def __init__(self, problem: Problem, rate: float) -> None:
        self.problem = problem
        self.rate = rate
        self._alone = problem.max_staleness == 0
        self._read_columns()
        self._read_plans()
        self._read_blocks()

    def _read_columns(self) -> None:
        workload, kinds = self.problem.workload, self.problem.replica_kinds
        away_s = workload.reward_s + workload.held_s
        rho = 1 - self.rate * np.array([c.update_s for c in kinds])
        self.usable: Mask = rho > USABLE
        """(C,): weight updates leave the kind time."""
        rho = np.where(self.usable, rho, 1.0)

        def batches(latencies: Sequence[float]) -> Floats:
            return self.rate * ((np.array(latencies) - away_s) / rho + away_s)

        running_s = np.array([c.latency_s for c in kinds]) - away_s
        held = np.array([c.kv_byte_s / c.kv_bytes for c in kinds])
        self.samples_per_s = self.rate * workload.batch_size
        self.time: Floats = self.samples_per_s / (np.array([c.rate for c in kinds]) * rho)
        """(C,): replicas that decode all samples."""
        longer = (running_s / rho + workload.held_s) / (running_s + workload.held_s)
        self.cache: Floats = self.samples_per_s * held * longer
        """(C,): replicas whose caches hold all samples."""
        self.waiting = batches([c.batch_latency_s if self._alone else c.group_latency_s for c in kinds])
        """(C,): batches between admission and the last reward of their groups, where the kind decodes all."""
        self.longest = batches([c.max_latency_s for c in kinds])
        """(C,): the same for the longest response there is."""
        self.sizes = np.array([c.num_devices for c in kinds], dtype=np.float64)
        shapes: dict[tuple[str, int, int], list[int]] = {}
        for index, kind in enumerate(kinds):
            shapes.setdefault((kind.device, kind.tp, kind.pp), []).append(index)
        self.shapes = [sorted(members, key=lambda i: kinds[i].batch_cap) for members in shapes.values()]
        """Columns that differ in their batch caps only."""

    def _read_plans(self) -> None:
        problem = self.problem
        self.busy: Floats = self.rate * np.array([plan.cycle_s for plan in problem.plans])
        """(P,): part of the trainer's time."""
        devices = [[plan.count(supply.device) for supply in problem.supplies] for plan in problem.plans]
        self.training = np.array(devices, dtype=np.float64).reshape(len(problem.plans), len(problem.supplies))
        """(P, G): the trainer's devices."""
        self.of_type = np.array(
            [[c.device == supply.device for c in problem.replica_kinds] for supply in problem.supplies]
        )
        """(G, C)"""
        self.stock = np.array([s.count for s in problem.supplies], dtype=np.float64)
        self.prices = np.array([np.nan if s.price_per_hour is None else s.price_per_hour for s in problem.supplies])
        self._tail = np.inf if problem.tail == "none" else problem.max_staleness + (problem.tail == "soft")

    def _read_blocks(self) -> None:
        kinds, largest = self.problem.replica_kinds, [max(s.node_sizes, default=0) for s in self.problem.supplies]
        stages = np.array([kind.tp for kind in kinds])
        blocks = np.where(self.sizes <= self.of_type.T @ np.array(largest), self.sizes, stages)
        self.scarce: list[tuple[int, int, int]] = [
            (g, size, in_blocks(size, supply.node_sizes))
            for g, supply in enumerate(self.problem.supplies)
            for size in powers(largest[g])
            if in_blocks(size, supply.node_sizes) < supply.count or (size > 1 and supply.device in self.problem.inside)
        ]
        """(S): (type, size of blocks, devices in whole blocks), for the sizes that leave devices of nodes over."""
        in_use = [self.sizes * self.of_type[g] * (blocks >= size) for g, size, _ in self.scarce]
        self.in_blocks: Floats = np.array(in_use).reshape(-1, len(kinds))
        """(S, C): devices of a replica that are in blocks of a scarce size or larger."""

    def training_in_blocks(self, g: int, size: int, plans: Sequence[int]) -> list[int]:
        """Return the devices of type ``g`` that each of ``plans`` takes away from blocks of at least ``size``. Inside
        nodes that all train, these are the blocks that a pipeline in each node leaves no room for."""
        supply = self.problem.supplies[g]
        sizes, name = supply.node_sizes, supply.device

        def taken(part: TrainingPart) -> int:
            its_block, apart, whole = block(part, max(sizes)), part.num_devices, 0
            if name in self.problem.inside:
                left = tuple(max(0, n - its_block) for n in sizes)
                apart, whole = max(0, apart - its_block * len(sizes)), in_blocks(size, sizes) - in_blocks(size, left)
            return whole + apart * (its_block >= size)

        return [sum(taken(part) for part in self.problem.plans[p].parts if part.device == name) for p in plans]

    @property
    def costs(self) -> Floats:
        """Return (G,): the cost of a device of each type: its price, or 1 where some price is unknown."""
        return np.ones_like(self.prices) if np.isnan(self.prices).any() else self.prices

    def cost(self, replicas: Floats, plan: int) -> float:
        """Return the cost of these replicas of each kind and of a training plan, at ``costs``."""
        return float(self.sizes * (self.of_type.T @ self.costs) @ replicas + self.training[plan] @ self.costs)

    def in_time(self, plans: Sequence[int]) -> Mask:
        """Return (C,): the kinds with which the longest response keeps the bound beside one of ``plans``."""
        return self.usable & (self.longest <= self.left_s(self.busy[list(plans)].min()))

    def left_s(self, busy: Floats) -> Floats:
        """Return for how many batches the longest response may be under way beside trainers that are ``busy`` for a
        part of the time. The allowance for rounding is a part of the bound: a bound of zero leaves no time at any rate,
        however low."""
        return self._tail * (1 + _ROUNDING) - busy

    def able(self) -> list[int]:
        """Return the plans that are fast enough, and within stock and budget."""
        fits = (self.training <= self.stock).all(axis=1)
        if self.problem.budget_per_hour is not None:
            fits &= self.training @ self.prices <= self.problem.budget_per_hour
        return np.flatnonzero((self.busy <= 1 + _ROUNDING) & fits).tolist()
