"""The fabric of a fleet as a graph of islands, and how many devices of each type training and rollout need.

An island is a node, or a set of devices that share one fast link. Islands are the vertices, never single devices: a
cut through an all-to-all island costs more than any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The graph of islands.

    Example: two nodes of 8 H20 are ``types=("h20", "h20"), sizes=(8, 8)``.
    """

    types: tuple[str, ...]
    """Device type of each island."""
    sizes: tuple[int, ...]
    """Number of devices in each island."""
    bandwidth: Floats
    """(islands, islands), bytes/s one way between a device of each; on the diagonal between two devices inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The devices of one type that training and rollout need.

    Example: ``train_devices=8, train_block=4, replica_blocks={2: 6}`` needs two training stages of 4 devices and six
    rollout stages of 2.
    """

    train_devices: int = 0
    train_block: int = 1
    """Number of devices of a training stage that must share an island (tensor parallel)."""
    replica_blocks: Mapping[int, int]
    """Number of devices of a replica's stage that must share an island -> number of such blocks."""

    @property
    def rollout_devices(self) -> int:
        return sum(block * count for block, count in self.replica_blocks.items())


@dataclass(frozen=True, slots=True)
class Shares:
    """The numbers of devices of an island that train and that generate rollouts; the rest are idle.

    Example: ``Shares(train=4, rollout=3)`` on an island of 8 devices leaves one idle.
    """

    train: int
    rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one training step moves inside the training set and out of it.

    Example: ``Traffic(train=3.2e10, sync=1.6e10)``: a plan whose training set exchanges 32 GB per step and publishes 16
    GB of weights.
    """

    train: float
    """Traffic inside the training set: data-parallel and pipeline."""
    sync: float
    """Traffic from the training set to the rollout set."""
