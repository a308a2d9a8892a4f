"""The engine servers of a run on a Ray cluster: checked before the run begins, placed when it opens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from rollover.cluster.engines import ClusterEngines, checked_forms, described
from rollover.cluster.nodes import Wanted, alive_nodes
from rollover.engine.servers.config import ServerConfig
from rollover.run.directory import RunDir
from rollover.trainer.config import TrainerConfig

_PROBE = "probe"


def check_places(cluster: ClusterConfig, trainer: TrainerConfig, engine: ServerConfig) -> list[str]:
    """Return lines that say where the servers will go. Raises ``ConfigError`` when there is no such cluster, or when it
    can never hold them beside the trainer's ranks."""
    from rollover.cluster.ranks import rank_demand

    demand = rank_demand(cluster, trainer, alive_nodes(connect(cluster)))
    ranks = [Wanted(name=f"rank {n} of the trainer", resources=demand.bundle) for n in range(demand.count)]
    forms, device = checked_forms(cluster, engine, ranks)
    lines = [f"server {line}" for line in described(forms, device)]
    lora = trainer.lora
    return [*lines, _way_of_weights(_by_folder(engine, sends_adapters=lora is not None and lora.publish == "adapter"))]


async def open_places(
    cluster: ClusterConfig,
    run: RunDir,
    root: Path,
    notify: Callable[[str], None],
    engine: ServerConfig,
    folder: Path,
    *,
    sends_adapters: bool,
) -> ClusterEngines:
    """Return the places on the cluster for servers of the model in ``folder``.

    Args:
        root: the folder through which weights reach the servers.
        sends_adapters: they are given adapters alone.
    """
    connect(cluster)
    probe, by_folder = None, _by_folder(engine, sends_adapters=sends_adapters)
    if by_folder:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / _PROBE
        probe.write_text(secrets.token_hex(16))
    notify(_way_of_weights(by_folder))
    return ClusterEngines(
        cluster,
        engine,
        run=run.identity(),
        logs=run.path / "logs",
        model=folder,
        probe=probe,
        remedy="set engine.weights_dir to a folder with the same path on all nodes, or send weights through a process"
        " group (engine.weight_transfer)",
    )


def _by_folder(engine: ServerConfig, *, sends_adapters: bool) -> bool:
    """Say whether weights reach the servers through a folder, as adapters always do."""
    return sends_adapters or engine.weight_transfer == "folder"


def _way_of_weights(by_folder: bool) -> str:
    if by_folder:
        return (
            "weights reach the servers through a folder (engine.weights_dir, or weights in the run directory), which"
            " the nodes of all servers must see under the same path; nodes that lack the model are sent it"
        )
    return (
        "weights are sent to the servers through a process group, and the model that they start with to nodes that lack"
        " it: no folder has to be shared"
    )
