"""SGLang servers as a kind of engine."""

from __future__ import annotations

from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.kind import check_servers, opened
from rollover.engine.servers.sglang.config import SGLangConfig


async def _open(config: SGLangConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.sglang.open import open_sglang

    return opened(await open_sglang(config, setup), config)


SGLANG = EngineKind(config=SGLangConfig, open=_open, preflight=check_servers)
