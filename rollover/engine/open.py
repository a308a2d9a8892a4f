"""The engine that a config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollover.clock import Clock
from rollover.engine.base import Engine
from rollover.engine.config import EngineConfig
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.weights.adapters import AdapterShape
from rollover.weights.base import WeightTarget

if TYPE_CHECKING:
    from rollover.engine.servers.places import ServerPlaces


class TrainedEngine(Engine, WeightTarget, Protocol):
    """Decodes, and takes new weights."""


async def open_engine(
    config: EngineConfig,
    folder: Path,
    *,
    run: str,
    logs: Path,
    clock: Clock,
    lockstep: bool = False,
    places: ServerPlaces | None = None,
    adapters: AdapterShape | None = None,
) -> TrainedEngine:
    """An engine that serves the model in ``folder`` as version 0.

    Args:
        run: the run's name among all runs; its servers are labelled with it.
        logs: where servers that are started on this machine write.
        places: where servers are started, if not on this machine.
        adapters: the shape of those that it will be given in place of full weights, if any; for servers.
        lockstep: decode only when all consumers have come back for more; the embedded engine alone can.

    Raises:
        RolloverError: it cannot be had; the message says what to change.
    """
    if isinstance(config, EmbeddedConfig):
        from rollover.engine.embedded.engine import EmbeddedEngine

        return EmbeddedEngine.from_folder(folder, config, lockstep=lockstep)
    assert not lockstep, "the config refuses deterministic = true with a server"
    from rollover.engine.servers.places import ThisMachine

    places = places or ThisMachine(logs)
    if isinstance(config, EmbeddedServerConfig):
        from rollover.engine.servers.embedded.open import open_embedded_servers

        return await open_embedded_servers(config, folder, run=run, places=places, clock=clock)
    if isinstance(config, SGLangConfig):
        from rollover.engine.servers.sglang.open import open_sglang

        return await open_sglang(config, folder, run=run, places=places, clock=clock, adapters=adapters)
    from rollover.engine.servers.vllm.open import open_vllm

    return await open_vllm(config, folder, run=run, places=places, clock=clock, adapters=adapters)
