"""Servers of the embedded engine as a kind of engine."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.engine.embedded.kind import check_embedded
from rollover.engine.kind import EngineFacts, EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.kind import check_servers, opened, places_of


async def _open(config: EmbeddedServerConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.embedded.open import open_embedded_servers
    from rollover.hf.architecture import Architecture

    if setup.longest_tokens is not None:
        config = config.fitted(setup.longest_tokens, Architecture.from_folder(setup.folder).max_position_embeddings)
    places = await places_of(config, setup)
    pool = await open_embedded_servers(
        config, setup.folder, run=setup.run, places=places, clock=setup.clock, device=setup.device
    )
    return opened(pool, config)


def _preflight(config: EmbeddedServerConfig, facts: EngineFacts) -> Sequence[str]:
    from rollover.engine.servers.embedded.open import with_program

    lines = check_servers(config, facts)
    if config.launch:
        check_embedded(with_program(config).embedded(), facts)
    return lines


EMBEDDED_SERVERS = EngineKind(config=EmbeddedServerConfig, open=_open, preflight=_preflight)
