"""Decides which replicas decode which lengths. A response's length is unknown before it ends: unless lengths are
predicted, every replica gets the same mixture, and the buckets of a problem become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from rollover.devices.costs.records import ReplicaKind
from rollover.devices.records import LengthBucket
from rollover.planner.records import Problem

Routing = Literal["load", "length"]
"""``load`` sends a sample where there is room; ``length`` predicts lengths and sends each where it suits."""


def routed(problem: Problem, routing: Routing) -> Problem:
    """Return the problem as the optimiser sees it under a routing."""
    return problem if routing == "length" else mixed(problem)


def mixed(problem: Problem) -> Problem:
    """Return the problem in which every replica decodes all lengths in proportion.

    Of a mixture, times add up: the time a replica spends on a sample, the cache it holds, and the latencies, each
    weighted by who meets them (samples, or the longest of groups and batches).
    """
    buckets = problem.workload.buckets
    shares = [bucket.share for bucket in buckets]

    def mean(weights: Sequence[float], value: Callable[[LengthBucket], float]) -> float:
        return sum(weight * value(bucket) for weight, bucket in zip(weights, buckets, strict=True))

    one = LengthBucket(
        share=1.0,
        tokens=mean(shares, lambda b: b.tokens),
        max_tokens=buckets[-1].max_tokens,
        group_share=1.0,
        group_tokens=mean([b.group_share for b in buckets], lambda b: b.group_tokens),
        batch_share=1.0,
        batch_tokens=mean([b.batch_share for b in buckets], lambda b: b.batch_tokens),
    )
    return replace(
        problem,
        replica_kinds=tuple(_mixed(kind, buckets) for kind in problem.replica_kinds),
        workload=replace(problem.workload, buckets=(one,)),
    )


def _mixed(kind: ReplicaKind, buckets: tuple[LengthBucket, ...]) -> ReplicaKind:
    shares = [bucket.share for bucket in buckets]

    def dot(weights: Sequence[float], values: Sequence[float]) -> tuple[float]:
        return (sum(weight * value for weight, value in zip(weights, values, strict=True)),)

    time_s = dot(shares, [1 / rate for rate in kind.rates])[0]
    # What runs at an update is what takes long: buckets weigh by the time they occupy the replica.
    busy = [share / rate / time_s for share, rate in zip(shares, kind.rates, strict=True)]
    return replace(
        kind,
        rates=(1 / time_s,),
        latencies_s=dot(shares, kind.latencies_s),
        group_latencies_s=dot([b.group_share for b in buckets], kind.group_latencies_s),
        batch_latencies_s=dot([b.batch_share for b in buckets], kind.batch_latencies_s),
        max_latencies_s=kind.max_latencies_s[-1:],
        kv_byte_s=dot(shares, kind.kv_byte_s),
        updates_s=dot(busy, kind.updates_s),
    )
