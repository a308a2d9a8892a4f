"""Parallel shapes to choose from: powers of two that fit into a node and divide the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from rollover.devices.records import Device, ModelShape

MAX_TRAINING_STAGES = 64
"""Pipeline stages of a training plan, at most."""
MAX_REPLICA_STAGES = 4
"""Pipeline stages of a replica, at most."""


def shapes(device: Device, model: ModelShape, max_stages: int) -> Iterator[tuple[int, int]]:
    """Yield (tensor parallel, pipeline parallel) sizes.

    Tensor parallel sizes divide the heads and, so that replicas pack without gaps, the node.
    """
    widths = [n for n in _powers(device.node_size) if device.node_size % n == 0 and model.num_heads % n == 0]
    return product(widths, _powers(min(max_stages, model.num_layers)))


def _powers(largest: int) -> list[int]:
    """List the powers of two up to ``largest``."""
    return [1 << i for i in range(largest.bit_length())]
