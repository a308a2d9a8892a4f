"""Places for engine servers on a Ray cluster: the form of each server, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from rollover.cluster.config import ClusterConfig, EngineGroup
from rollover.cluster.engine_server import ClusterServer, EngineTerms
from rollover.cluster.files import SharedFiles
from rollover.cluster.nodes import Wanted, alive_nodes, refusal, written
from rollover.engine.servers.config import ServerConfig, num_devices
from rollover.engine.servers.start.places import ServerProgram
from rollover.errors import ConfigError

C = TypeVar("C", bound=ServerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """The place that one engine server takes, and the settings in which it differs from the others."""

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
        return replace(config, max_running=self.max_running, launch_args=self.args)


def engine_forms(cluster: ClusterConfig, engine: ServerConfig) -> tuple[EngineForm, ...]:
    """Return the form of each server, in the order of ``cluster.engines``.

    Raises ``ConfigError`` when the engine's arguments do not say how many GPUs a server takes.
    """
    groups = cluster.engines
    if isinstance(groups, int):
        groups = (EngineGroup(count=groups),) if groups else ()
    forms: list[EngineForm] = []
    for group in groups:
        args = (*engine.launch_args, *group.args)
        form = EngineForm(
            devices=num_devices(args) if group.devices is None else group.devices,
            resources={**cluster.engine_resources, **group.resources},
            max_running=engine.running() if group.max_running is None else group.max_running,
            args=args,
        )
        forms += [form] * group.count
    return tuple(forms)


class ClusterEngines:
    """Implements ``ServerPlaces``; the process is connected to the cluster before ``open``.

    Args:
        model: the folder of the model that servers start with, which their nodes must have at the same path.
        probe: a file, just written, that the nodes of all servers must see at the same path, if weights reach them
            through a folder.
        remedy: what to change when one of them does not see ``probe``.

    Raises ``ConfigError`` when the cluster's nodes can never hold all servers.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        engine: ServerConfig,
        *,
        run: str,
        logs: Path,
        model: Path,
        probe: Path | None,
        remedy: str,
    ) -> None:
        self._forms, self._device = checked_forms(cluster, engine)
        self._terms = EngineTerms(
            prefix=f"rollover-{run}",
            placement_timeout_s=cluster.placement_timeout_s,
            logs=logs,
            shared=[
                (SharedFiles.of_model(model), "put the model at the same path on all nodes, as on a shared disk"),
                *([] if probe is None else [(SharedFiles.of(probe), remedy)]),
            ],
        )

    def configs(self, config: C) -> Sequence[C]:
        return [form.config(config) for form in self._forms]

    def server(self, number: int, program: ServerProgram, config: ServerConfig) -> ClusterServer:
        resources = self._forms[number].bundle(self._device)
        return ClusterServer(number, program, config, resources, self._terms)


def described(forms: Sequence[EngineForm], device: str) -> Iterator[str]:
    """Say who goes where, equal servers in one line."""
    for form, same in groupby(enumerate(forms), key=lambda entry: entry[1]):
        numbers = [number for number, _ in same]
        names = f"engine-{numbers[0]}" + (f" to engine-{numbers[-1]}: each" if len(numbers) > 1 else ":")
        yield f"{names} {written(form.bundle(device))} of a node, up to {form.max_running} samples at a time"


def checked_forms(
    cluster: ClusterConfig, engine: ServerConfig, beside: Sequence[Wanted] = ()
) -> tuple[tuple[EngineForm, ...], str]:
    """Return the form of each server, and the device that servers take: ``GPU``, or ``CPU`` if no node has one.

    Args:
        beside: what else the run takes of the cluster.

    Raises ``ConfigError`` when the nodes that are alive can never hold all servers.
    """
    import ray

    forms = engine_forms(cluster, engine)
    nodes = alive_nodes(ray)
    device = "GPU" if any(node.resources.get("GPU") for node in nodes) else "CPU"
    wanted = [Wanted(name=f"engine-{n}", resources=form.bundle(device)) for n, form in enumerate(forms)]
    if (problem := refusal([*beside, *wanted], nodes)) is not None:
        raise ConfigError(f"cluster.engines: {problem}")
    return forms, device
