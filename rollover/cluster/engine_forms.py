"""Forms of engine servers: what each of a run's servers takes of a node, and with which settings it is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from rollover.cluster.config import ClusterConfig, EngineGroup
from rollover.engine.servers.config import ServerConfig, num_devices

C = TypeVar("C", bound=ServerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """The place that one engine server takes, and the settings in which it differs from the others.

    Example: with ``launch_args = ["--tensor-parallel-size", "2"]`` and ``engine_resources = {h20 = 1}`` the form of
    every server has ``devices == 2`` and ``resources == {"h20": 1.0}``.
    """

    devices: int
    """GPUs; CPUs on a cluster without any."""
    resources: Mapping[str, float]
    """Custom resources of its node."""
    max_running: int
    """Maximum number of samples that it decodes at the same time."""
    args: tuple[str, ...]
    """Its complete ``launch_args``."""

    def bundle(self, device: str) -> dict[str, float]:
        """Return what it takes of a node, where ``device`` is ``GPU`` or ``CPU``."""
        return {device: float(self.devices), **self.resources}

    def config(self, config: C) -> C:
        """Return the config of the engine with the settings of this server."""
        return replace(config, max_running=self.max_running, launch_args=self.args)


def engine_forms(cluster: ClusterConfig, engine: ServerConfig) -> tuple[EngineForm, ...]:
    """Return the form of each server, in the order of ``cluster.engines``.

    Raises ``ConfigError`` when the engine's arguments do not say how many GPUs a server takes.
    """
    groups = cluster.engines
    if isinstance(groups, int):
        groups = (EngineGroup(count=groups),) if groups else ()
    return tuple(form for group in groups for form in _forms(cluster, engine, group))


def _forms(cluster: ClusterConfig, engine: ServerConfig, group: EngineGroup) -> Iterator[EngineForm]:
    args = (*engine.launch_args, *group.args)
    form = EngineForm(
        devices=num_devices(args) if group.devices is None else group.devices,
        resources={**cluster.engine_resources, **group.resources},
        max_running=engine.running() if group.max_running is None else group.max_running,
        args=args,
    )
    for _ in range(group.count):
        yield form
