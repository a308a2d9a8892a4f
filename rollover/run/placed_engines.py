"""The engine servers of a run on a Ray cluster: checked before the run begins, placed when it opens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from rollover.cluster.engines import ClusterEngines, checked_forms, described
from rollover.cluster.fitting import Wanted
from rollover.cluster.nodes import alive_nodes
from rollover.engine.config import EngineConfig
from rollover.engine.servers.config import ServerConfig
from rollover.run.directory import RunDir
from rollover.trainer.config import TrainerConfig

_PROBE = "probe"


def check_places(cluster: ClusterConfig, engine: EngineConfig, trainer: TrainerConfig) -> list[str]:
    """Return lines that say where the servers will go.

    Raises ``ConfigError`` when there is no such cluster, or when it can never hold them beside the trainer's ranks.
    """
    assert isinstance(engine, ServerConfig), "the config refuses other engines on a cluster"
    from rollover.cluster.ranks import rank_demand

    demand = rank_demand(cluster, trainer, alive_nodes(connect(cluster)))
    ranks = [Wanted(name=f"rank {n} of the trainer", resources=demand.bundle) for n in range(demand.count)]
    forms, device = checked_forms(cluster, engine, ranks)
    lines = [f"server {line}" for line in described(forms, device)]
    return [*lines, _way_of_weights(engine)]


async def open_places(
    cluster: ClusterConfig,
    engine: EngineConfig,
    run: RunDir,
    folder: Path,
    root: Path,
    notify: Callable[[str], None],
) -> ClusterEngines:
    """Return the places on the cluster for servers of the model in ``folder``.

    Args:
        root: the folder through which weights reach the servers.
    """
    assert isinstance(engine, ServerConfig), "the config refuses other engines on a cluster"
    connect(cluster)
    must_see = {str(file): file.read_bytes() for file in [(folder / "config.json").resolve()]}
    if _by_folder(engine):
        root.mkdir(parents=True, exist_ok=True)
        probe, content = root / _PROBE, secrets.token_hex(16)
        probe.write_text(content)
        must_see[str(probe)] = content.encode()
    notify(_way_of_weights(engine))
    return await ClusterEngines.open(
        cluster,
        engine,
        run=run.identity(),
        logs=run.path / "logs",
        must_see=must_see,
        remedy="put the model, and engine.weights_dir or the run directory, in a folder with the same path on all"
        " nodes",
    )


def _by_folder(engine: ServerConfig) -> bool:
    return getattr(engine, "weight_transfer", "folder") == "folder"


def _way_of_weights(engine: ServerConfig) -> str:
    if _by_folder(engine):
        return (
            "weights reach the servers through a folder (engine.weights_dir, or weights in the run directory), which"
            " the nodes of all servers must see under the same path"
        )
    return (
        "weights are sent to the servers through a process group; the model that they start with is a folder, which the"
        " nodes of all servers must see under the same path"
    )
