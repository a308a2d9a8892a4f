"""Settings of the Ray cluster that a run uses. Torch-free, and free of Ray."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})")


def _check_resources(key: str, resources: Mapping[str, float]) -> None:
    for name, amount in resources.items():
        if not name or not (math.isfinite(amount) and amount > 0):
            raise ValueError(f"{key}: {name!r} must be a name with an amount above 0, got {amount!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Engine servers of one form, for clusters whose servers differ.

    Example: ``EngineGroup(count=2, max_running=256, resources={"h100": 1.0})`` is two servers on nodes that have the
    resource ``h100``, each of which decodes 256 samples at a time.
    """

    count: int = 1
    """Number of servers of this form."""
    devices: int | None = None
    """GPUs of each server; by default the number in the engine's arguments (tensor times pipeline times data parallel
    size)."""
    max_running: int | None = None
    """Maximum number of samples that each server decodes at the same time; `engine.max_running` by default."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that the node of each server must have, in addition to `cluster.engine_resources`."""
    args: tuple[str, ...] = ()
    """Arguments of the server program in addition to the engine's."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"cluster.engines.count must be at least 1, got {self.count}")
        for key in ("devices", "max_running"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ValueError(f"cluster.engines.{key} must be at least 1, got {value}")
        _check_resources("cluster.engines.resources", self.resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """An existing Ray cluster. Needs `rollover[ray]`, of the same version on every node.

    Example: ``ClusterConfig(address="10.0.0.1:6379", trainer_resources={"h100": 1.0})`` puts the ranks of the trainer
    on nodes that have the resource ``h100``.
    """

    address: str = "auto"
    """`auto` is the cluster that `RAY_ADDRESS` names, or else the one that this machine belongs to; or `HOST:PORT` of
    its head. The process of the run must be on a node of the cluster."""
    trainer_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources, with amounts, that each rank of the trainer takes of its node: `{ h100 = 1 }`. In addition, a
    rank takes a GPU, or one CPU if it trains on CPUs."""
    engines: int | tuple[EngineGroup, ...] = 0
    """Number of servers of `engine.kind` to start on the cluster, each with as many GPUs as the engine's arguments say;
    or a list of tables if servers differ. 0 leaves the engine with the process of the run."""
    engine_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources, with amounts, that each engine server takes of its node."""
    placement_timeout_s: float = 60.0
    """Maximum wait for the cluster to answer, for room on nodes that others are using, and for a node to replace a lost
    one. A run that needs more than the nodes have when it begins is refused at once."""

    @property
    def num_engines(self) -> int:
        return self.engines if isinstance(self.engines, int) else sum(group.count for group in self.engines)

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise ValueError(
                f"cluster.address {self.address!r} belongs to Ray Client, which cannot be used to control ranks: start"
                " the run on a node of the cluster, with cluster.address = 'auto' or HOST:PORT of the head"
            )
        match = _ADDRESS.fullmatch(self.address)
        if self.address != "auto" and (match is None or not 1 <= int(match["port"]) <= 65535):
            raise ValueError(f"cluster.address must be 'auto' or HOST:PORT, got {self.address!r}")
        if isinstance(self.engines, int) and self.engines < 0:
            raise ValueError(f"cluster.engines must be at least 0, got {self.engines}")
        if self.placement_timeout_s <= 0:
            raise ValueError(f"cluster.placement_timeout_s must be above 0, got {self.placement_timeout_s}")
        _check_resources("cluster.trainer_resources", self.trainer_resources)
        _check_resources("cluster.engine_resources", self.engine_resources)
