"""Servers of the embedded engine as a kind of engine."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.engine.embedded.kind import check_embedded
from rollover.engine.kind import EngineFacts, EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.kind import check_servers, opened


async def _open(config: EmbeddedServerConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.embedded.open import open_embedded_servers

    return opened(await open_embedded_servers(config, setup), config)


def _preflight(config: EmbeddedServerConfig, facts: EngineFacts) -> Sequence[str]:
    from rollover.engine.servers.embedded.open import with_program

    lines = check_servers(config, facts)
    if config.launch:
        check_embedded(with_program(config).embedded(), facts)
    return lines


EMBEDDED_SERVERS = EngineKind(config=EmbeddedServerConfig, open=_open, preflight=_preflight)
