"""The engine of a run: opened from its config, checked against its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from rollover.clock import SystemClock
from rollover.engine import open as engine_open
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.open import TrainedEngine
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.errors import require
from rollover.hf.architecture import Architecture
from rollover.rollout.strategy import OnFull
from rollover.run.config import RunConfig, context_needed
from rollover.run.directory import RunDir
from rollover.swarm.config import SwarmConfig
from rollover.weights.folders import WeightFolders, untied

if TYPE_CHECKING:
    from rollover.engine.servers.places import ServerPlaces


async def open_engine(
    config: RunConfig, run: RunDir, folder: Path, notify: Callable[[str], None]
) -> tuple[TrainedEngine, WeightFolders | None]:
    """Open the engine with the model in ``folder``; also return the folders through which servers get their weights.
    ``notify`` shows the user what he has to know of it."""
    folders: WeightFolders | None = None
    engine_config = config.engine
    if isinstance(engine_config, SwarmConfig):
        from rollover.swarm.coordinator.open import open_swarm

        needed = max(context_needed(config, key) for key in ("rollout", "eval"))
        swarm = await open_swarm(
            engine_config,
            folder,
            root=run.path / "swarm",
            run=run.identity(),
            max_context_tokens=needed,
            keep_versions=config.rollout.staleness_bound + 2,
            clock=SystemClock(),
        )
        notify(
            f"the swarm listens on {swarm.url}; for each worker make out a token with rollover workers {run.path}"
            " --add NAME"
        )
        if swarm.admin is not None:
            notify(f"see the workers on {swarm.admin.url}, or with rollover workers {run.path}")
        return swarm, None
    if isinstance(engine_config, EmbeddedConfig) or _starts_ours(engine_config):
        engine_config = fitted(engine_config, config, Architecture.from_folder(folder))
    places: ServerPlaces | None = None
    if isinstance(config.engine, ServerConfig):
        shared = config.engine.weights_dir
        root = (run.path / "weights" if shared is None else Path(shared) / run.path.name).resolve()
        # vLLM on a CPU does not reload the output side of a tied matrix.
        if config.engine.launch and not _starts_ours(config.engine):
            folder = untied(folder, root / "initial")
        folders = WeightFolders(root, like=folder)
        if config.cluster is not None and config.cluster.num_engines:
            from rollover.run.placed_engines import open_places

            places = await open_places(config.cluster, config.engine, run, folder, root, notify)
    engine = await engine_open.open_engine(
        engine_config,
        folder,
        run=run.identity(),
        logs=run.path / "logs",
        clock=SystemClock(),
        lockstep=config.deterministic,
        adapters=config.published_adapters,
        places=places,
    )
    return engine, folders


def check_engine(config: RunConfig, *, begins: bool = False) -> list[str]:
    """Return what a user should know of the engine. This needs no weights, and so comes before the warm-up. ``begins``:
    the run follows, so that a swarm's object store may be written to.

    Raises ``ModelError`` or ``ConfigError`` for a device that is missing, a model that the embedded engine would
    refuse, an address or certificate that a swarm cannot use, or a cluster that is not there or too small.
    """
    if isinstance(config.engine, SwarmConfig):
        from rollover.swarm.coordinator.blob_places import check_blobs

        blobs = check_blobs(config.engine, writes=begins)
        if config.engine.transport == "nats":
            require("nats", purpose='engine.transport = "nats"')
            from rollover.swarm.coordinator.transports.nats.open import check_nats

            return [f"swarm: {line}" for line in (*check_nats(config.engine), *blobs)]
        from rollover.swarm.coordinator.transports.listening import check_listening

        return [f"swarm: {line}" for line in (*check_listening(config.engine), *blobs)]
    engine = config.engine
    if _starts_ours(engine):
        from rollover.engine.servers.embedded.open import with_program

        engine = with_program(engine).embedded()
    if isinstance(engine, EmbeddedConfig):
        from rollover.engine.embedded.sizing import check

        check(_architecture(config), fitted(engine, config, _architecture(config)))
    if isinstance(config.engine, ServerConfig) and config.cluster is not None and config.cluster.num_engines:
        from rollover.run.placed_engines import check_places

        return [*_turns(config), *check_places(config.cluster, config.engine, config.trainer)]
    return _turns(config)


def _turns(config: RunConfig) -> list[str]:
    """Return what it means that engine and trainer take turns on the same devices, where they do."""
    if not config.engine.declared.is_colocated:
        return []
    line = "engine and trainer take turns: the engine gives weights and cache back while the trainer trains"
    if config.rollout.strategy.builds.on_full is OnFull.PARK:
        kind = config.rollout.strategy.kind
        line += f", so what strategy {kind} leaves unfinished is prefilled again in the next round"
    return [line]


Fitting = TypeVar("Fitting", bound=EmbeddedConfig | EmbeddedServerConfig)


def fitted(engine: Fitting, config: RunConfig, model: Architecture) -> Fitting:
    """Return ``engine`` with room for the longest prompt and response of the run, where the user names no length."""
    needed = max(context_needed(config, key) for key in ("rollout", "eval"))
    if engine.max_context_tokens is not None or needed > model.max_position_embeddings:
        return engine
    return replace(engine, max_context_tokens=needed)


def _starts_ours(engine: object) -> TypeGuard[EmbeddedServerConfig]:
    """Tell whether the run starts servers of the embedded engine."""
    return isinstance(engine, EmbeddedServerConfig) and engine.launch


def _architecture(config: RunConfig) -> Architecture:
    from rollover.hf.hub import resolve_model

    if config.model.scratch is not None:
        return Architecture.from_config(config.model.scratch.model_config(config.model.scratch.vocab_size))
    assert config.model.path is not None
    return Architecture.from_folder(resolve_model(config.model.path, weights=False))
