"""Kinds of rollout replica to choose from: those that fit into memory, without those that another replaces.

Leaving out a dominated choice never changes the optimum: wherever it stands, the better one could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rollover.devices.costs.records import ReplicaKind
from rollover.devices.costs.rollout import ReplicaCosts, replica_costs, replica_kind
from rollover.devices.records import Device, ModelShape, WorkloadSpec
from rollover.planner.shapes import MAX_REPLICA_STAGES, shapes

MAX_BATCH = 1024
"""Samples that an engine decodes at once, at most."""


def replica_kinds(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> list[ReplicaKind]:
    """Undominated replicas of up to ``count`` devices."""
    found = [
        replica_kind(engine, cap)
        for engine in _engines(device, count, model, workload)
        for cap in _caps(max(engine.batch(bucket, MAX_BATCH) for bucket in workload.buckets))
    ]
    return undominated(found, workload)


def _engines(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> Iterator[ReplicaCosts]:
    for tp, pp in shapes(device, model, MAX_REPLICA_STAGES):
        engine = replica_costs(model, workload, device, tp, pp)
        if tp * pp <= count and engine.fits():
            yield engine


def _caps(largest: int) -> list[int]:
    """Batch caps to choose from: the largest, and powers of two (of four below 16) under it."""
    return sorted({largest, *(c for c in (4, 16, 32, 64, 128, 256, 512) if c < largest)})


def undominated(kinds: Sequence[ReplicaKind], workload: WorkloadSpec) -> list[ReplicaKind]:
    """Columns of one device type without those that a whole number of some other's replicas replaces: at least as fast
    for every bucket, with at least as much cache and no later."""
    kept: list[ReplicaKind] = []
    for kind in sorted(kinds, key=lambda c: (c.num_devices, c.latencies_s, c.tp)):
        if not any(_replaces(other, kind, workload) for other in kept):
            kept.append(kind)
    return kept


def _replaces(other: ReplicaKind, kind: ReplicaKind, workload: WorkloadSpec) -> bool:
    copies, rest = divmod(kind.num_devices, other.num_devices)
    if rest:
        return False
    return (
        all(copies * a >= b for a, b in zip(other.rates, kind.rates, strict=True))
        and _below(other.latencies_s, kind.latencies_s)
        and _below(other.updates_s, kind.updates_s)
        and (not workload.held_s or _below(_fill(other, copies), _fill(kind, 1)))
    )


def _below(low: Iterable[float], high: Iterable[float]) -> bool:
    return all(a <= b for a, b in zip(low, high, strict=True))


def _fill(kind: ReplicaKind, copies: int) -> list[float]:
    """Part of the cache that a sample/s fills."""
    return [held / kind.kv_bytes / copies for held in kind.kv_byte_s]
