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
    """Engine servers of one form, where not all servers are alike.

    Example: ``EngineGroup(count=2, max_running=256, resources={"h100": 1.0})`` is two servers on nodes that have the
    resource ``h100``, each of which decodes 256 samples at a time.
    """

    count: int = 1
    """Servers of this form."""
    devices: int | None = None
    """GPUs of each server; when left out, what the engine's arguments say (tensor times pipeline parallel size)."""
    max_running: int | None = None
    """Samples decoded at the same time by each server; `engine.max_running` when left out."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that the node of each server must have, beside `cluster.engine_resources`."""
    args: tuple[str, ...] = ()
    """Arguments of the server program beside those of the engine."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"cluster.engines.count must be at least 1, got {self.count}")
        for key in ("devices", "max_running"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ValueError(f"cluster.engines.{key} must be at least 1, got {value}")
        _check_resources("cluster.engines.resources", self.resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A Ray cluster that exists already. Needs `rollover[ray]`, of the same version on every node.

    Example: ``ClusterConfig(address="10.0.0.1:6379", trainer_resources={"h100": 1.0})`` puts the ranks of the trainer
    on nodes that have the resource ``h100``.
    """

    address: str = "auto"
    """`auto` is the cluster that `RAY_ADDRESS` names, or else the one that this machine belongs to; or `HOST:PORT` of
    its head. The process of the run must be on a node of the cluster."""
    trainer_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that the node of each rank of the trainer must have, and of which the rank takes so much:
    `{ h100 = 1 }`. Beside them a rank takes a GPU, or one CPU when it trains there."""
    engines: int | tuple[EngineGroup, ...] = 0
    """Servers of `engine.kind` to start on the cluster, each with as many GPUs as the engine's arguments say; or a list
    of tables where servers differ. 0 leaves the engine where the process of the run is."""
    engine_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that the node of each engine server must have, and of which the server takes so much."""
    placement_timeout_s: float = 60.0
    """Longest wait for the cluster to answer, for room on its nodes while others use them, and for a node to replace
    one that was lost. A run that asks for more than the nodes have when it begins is refused at once."""
    engine_lease_s: float = 600.0
    """How long engine servers stay when the process of the run has died and no resumed run has taken them over."""

    @property
    def num_engines(self) -> int:
        """Return the number of engine servers on the cluster."""
        return self.engines if isinstance(self.engines, int) else sum(group.count for group in self.engines)

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise ValueError(
                f"cluster.address {self.address!r} is one of Ray Client, through which ranks cannot be led: start the"
                " run on a node of the cluster, with cluster.address = 'auto' or HOST:PORT of the head"
            )
        match = _ADDRESS.fullmatch(self.address)
        if self.address != "auto" and (match is None or not 1 <= int(match["port"]) <= 65535):
            raise ValueError(f"cluster.address must be 'auto' or HOST:PORT, got {self.address!r}")
        if isinstance(self.engines, int) and self.engines < 0:
            raise ValueError(f"cluster.engines must be at least 0, got {self.engines}")
        for key in ("placement_timeout_s", "engine_lease_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"cluster.{key} must be above 0, got {getattr(self, key)}")
        _check_resources("cluster.trainer_resources", self.trainer_resources)
        _check_resources("cluster.engine_resources", self.engine_resources)
