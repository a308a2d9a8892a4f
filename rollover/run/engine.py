"""The engine of a run: opened from its config, checked against its model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.clock import SystemClock
from rollover.engine import open as engine_open
from rollover.engine.open import EngineSetup, TrainedEngine
from rollover.hf.architecture import Architecture
from rollover.hf.raw_tensors import untied
from rollover.rollout.strategy import OnFull
from rollover.run.checks import longest_tokens
from rollover.run.config import RunConfig
from rollover.run.directory import RunDir
from rollover.run.transfer import check_transfer, sending_device
from rollover.swarm.config import SwarmConfig
from rollover.weights.folders import WeightFolders

if TYPE_CHECKING:
    from rollover.engine.servers.places import ServerPlaces


async def open_engine(
    config: RunConfig, run: RunDir, folder: Path, notify: Callable[[str], None]
) -> tuple[TrainedEngine, WeightFolders | None]:
    """Open the engine with the model in ``folder``; also return the folders through which servers get their weights.
    ``notify`` shows the user messages about the engine."""
    if isinstance(config.engine, SwarmConfig):
        return await _open_swarm(config.engine, config, run, folder, notify), None
    folders: WeightFolders | None = None
    places: ServerPlaces | None = None
    if (root := config.engine.weights_root(run.path / "weights", run.path.name)) is not None:
        if config.engine.unties_first:
            folder = untied(folder, root / "initial")
        folders = WeightFolders(root, like=folder)
        if config.cluster is not None and config.cluster.num_engines:
            from rollover.run.placed_engines import open_places

            places = await open_places(
                config.cluster,
                config.engine,
                run,
                folder,
                root,
                notify,
                sends_adapters=config.published_adapters is not None,
            )
    setup = EngineSetup(
        folder=folder,
        run=run.identity(),
        logs=run.path / "logs",
        clock=SystemClock(),
        lockstep=config.deterministic,
        places=places,
        adapters=config.published_adapters,
        longest_tokens=longest_tokens(config),
        device=sending_device(config),
    )
    return await engine_open.open_engine(config.engine, setup), folders


async def _open_swarm(
    engine: SwarmConfig, config: RunConfig, run: RunDir, folder: Path, notify: Callable[[str], None]
) -> TrainedEngine:
    """Open a swarm, the only kind of engine that is in a package above the others."""
    from rollover.swarm.coordinator.open import open_swarm

    swarm = await open_swarm(
        engine,
        folder,
        root=run.path / "swarm",
        run=run.identity(),
        max_context_tokens=longest_tokens(config),
        keep_versions=config.rollout.staleness_bound + 2,
        clock=SystemClock(),
    )
    notify(
        f"the swarm listens on {swarm.url}; create a token for each worker with rollover workers {run.path} --add NAME"
    )
    if swarm.admin is not None:
        notify(f"see the workers on {swarm.admin.url}, or with rollover workers {run.path}")
    return swarm


def check_engine(config: RunConfig) -> list[str]:
    """Return what a user should know about the engine. This needs no weights, and so comes before the warm-up.

    Raises ``ModelError`` or ``ConfigError`` for a device that is missing, a model that the embedded engine would
    refuse, an address or certificate that a swarm cannot use, weights that cannot be sent over NCCL, or a cluster that
    is not there or too small.
    """
    if isinstance(config.engine, SwarmConfig):
        from rollover.swarm.coordinator.transports.listening import check_listening

        config.engine.blob_sources(os.environ)  # refuses a query that is missing
        return [f"swarm: {line}" for line in (*check_listening(config.engine), *_blind_spots(config))]
    check_transfer(config)
    engine_open.check_model(config.engine, lambda: _architecture(config), longest_tokens(config))
    if config.cluster is not None and config.cluster.num_engines:
        from rollover.run.placed_engines import check_places

        return [*_turns(config), *check_places(config.cluster, config.engine, config.trainer)]
    return _turns(config)


def _blind_spots(config: RunConfig) -> list[str]:
    """Return what workers could do without being found out, where the run's own settings are the reason."""
    if config.rollout.top_p == 1 and config.rollout.top_k == 0:
        return []
    return [
        "warning: top_p or top_k cuts the distribution, so workers are verified by the log-prob check alone, not by"
        " drift: set them to 1 and 0 unless you trust whoever runs the workers"
    ]


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
