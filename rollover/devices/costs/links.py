"""Times of transfers and collectives over one link."""

from __future__ import annotations

from collections.abc import Iterable

from rollover.devices.records import Device, Link, ModelShape, WorkloadSpec


def transfer_s(size: float, link: Link, efficiency: float) -> float:
    """Return the time of ``size`` bytes over a link, of whose bandwidth ``efficiency`` is reached.

    Example: 10 GB over 50 GB/s at an efficiency of 0.8 and a latency of 20 µs take 10 / (50 * 0.8) s + 20 µs = 0.25 s.
    """
    return link.latency_s + size / (link.bytes_per_s * efficiency)


def all_reduce_s(size: float, ranks: int, link: Link, efficiency: float) -> float:
    """Return the time of a ring all-reduce of ``size`` bytes; a single rank reduces nothing."""
    if ranks == 1:
        return 0.0
    return link.latency_s + 2 * (ranks - 1) / ranks * size / (link.bytes_per_s * efficiency)


def narrowest(links: Iterable[Link | None]) -> Link | None:
    """Return the least bandwidth and the greatest latency among ``links``; ``None`` where there is none."""
    found = [link for link in links if link is not None]
    if not found:
        return None
    return Link(bytes_per_s=min(link.bytes_per_s for link in found), latency_s=max(link.latency_s for link in found))


def weight_update_s(model: ModelShape, workload: WorkloadSpec, device: Device, link: Link) -> float:
    """Return the exposed seconds of a weight update: the bytes once over ``link``, and the pause."""
    size = workload.rollout_weight_bytes * model.parameters
    return transfer_s(size, link, device.efficiency.link) + workload.pause_s
