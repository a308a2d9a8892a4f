"""The engine of a run: opened from its config, checked against its model, and placed on the run's Ray cluster if it has
one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollover.clock import SystemClock
from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from rollover.cluster.engines import ClusterEngines, checked_forms, described
from rollover.cluster.nodes import Wanted, alive_nodes
from rollover.engine.devices import numbered
from rollover.engine.kind import EngineFacts, EngineSetup, OpenedEngine
from rollover.engine.servers.config import ServerConfig
from rollover.hf.architecture import Architecture
from rollover.rollout.strategy import OnFull
from rollover.run.config import RunConfig, longest_tokens
from rollover.run.directory import RunDir
from rollover.run.kinds import ENGINES, open_engine
from rollover.trainer.config import TrainerConfig


async def open_engine_of(config: RunConfig, run: RunDir, folder: Path, notify: Callable[[str], None]) -> OpenedEngine:
    """Open the engine with the model in ``folder``. ``notify`` shows the user messages about the engine."""
    places = None
    if config.cluster is not None and config.cluster.num_engines:
        root = config.engine.weights_root(run.path / "weights", run.identity()) or run.path / "weights"
        adapters = config.published_adapters is not None
        places = partial(open_places, config.cluster, run, root, notify, sends_adapters=adapters)
    setup = EngineSetup(
        folder=folder,
        run=run.identity(),
        root=run.path,
        clock=SystemClock(),
        lockstep=config.deterministic,
        weights_name=run.identity(),
        places=places,
        adapters=config.published_adapters,
        longest_tokens=longest_tokens(config),
        max_staleness=config.rollout.staleness_bound,
        returns_kept=config.rollout.replays_truncation,
        returns_routes=config.trainer.replay_routes,
        device=sending_device(config),
        notify=notify,
    )
    return await open_engine(config.engine, setup)


def check_engine(config: RunConfig) -> list[str]:
    """Return what a user should know about the engine. This needs no weights, and so comes before the warm-up. Raises
    ``ModelError`` or ``ConfigError`` for what the engine would refuse when it is opened (see ``EngineKind.preflight``),
    or a cluster that is not there or too small."""
    rollout, places = config.rollout, None
    if config.cluster is not None and config.cluster.num_engines:
        places = partial(check_places, config.cluster, config.trainer)
    facts = EngineFacts(
        read_model=lambda: _architecture(config),
        longest_tokens=longest_tokens(config),
        cuts_distribution=rollout.is_cut,
        sender=sending_device(config),
        places=places,
    )
    return [*ENGINES[config.engine.kind].preflight(config.engine, facts), *_turns(config)]


def sending_device(config: RunConfig) -> str | None:
    """Return the GPU from which this process sends weights over NCCL; ``None`` if it sends none in this way."""
    if config.engine.weight_transfer != "nccl":
        return None
    if config.trainer.is_sharded or config.cluster is not None:
        return "cuda:0"
    from rollover.trainer.models import pick_device

    device = numbered(pick_device(config.trainer.device))
    return device if device.startswith("cuda") else "cuda:0"


def _turns(config: RunConfig) -> list[str]:
    """Return what the user should know if engine and trainer take turns on the same devices."""
    if not config.engine.declared.is_colocated:
        return []
    line = "engine and trainer take turns: the engine releases weights and cache while the trainer trains"
    if config.rollout.strategy.builds.on_full is OnFull.PARK:
        kind = config.rollout.strategy.kind
        line += f", so rollouts that strategy {kind} leaves unfinished are prefilled again in the next round"
    return [line]


def _architecture(config: RunConfig) -> Architecture:
    from rollover.hf.hub import resolve_model

    if config.model.scratch is not None:
        return Architecture.from_config(config.model.scratch.model_config(config.model.scratch.vocab_size))
    assert config.model.path is not None
    return Architecture.from_folder(resolve_model(config.model.path, weights=False))


_PROBE = "probe"


def check_places(cluster: ClusterConfig, trainer: TrainerConfig, engine: ServerConfig) -> list[str]:
    """Return lines that say where the servers will go. Raises ``ConfigError`` when there is no such cluster, or when it
    can never hold them beside the trainer's ranks."""
    from rollover.cluster.ranks import rank_demand

    demand = rank_demand(cluster, trainer, alive_nodes(connect(cluster)))
    ranks = [Wanted(name=f"rank {n} of the trainer", resources=demand.bundle) for n in range(demand.count)]
    forms, device = checked_forms(cluster, engine, ranks)
    lines = [f"server {line}" for line in described(forms, device)]
    return [*lines, _way_of_weights(_by_folder(engine, sends_adapters=trainer.publishes_adapters))]


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
            " the nodes of all servers must see under the same path, as they must the model"
        )
    return (
        "weights are sent to the servers through a process group; the model that they start with must have the same"
        " path on their nodes"
    )
