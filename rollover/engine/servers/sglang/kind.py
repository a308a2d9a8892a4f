"""SGLang servers as a kind of engine."""

from __future__ import annotations

from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.kind import check_servers, opened, places_of
from rollover.engine.servers.sglang.config import SGLangConfig


async def _open(config: SGLangConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.sglang.open import open_sglang

    pool = await open_sglang(
        config,
        setup.folder,
        run=setup.run,
        places=await places_of(config, setup),
        clock=setup.clock,
        adapters=setup.adapters,
        device=setup.device,
    )
    return opened(pool, config)


SGLANG = EngineKind(config=SGLangConfig, open=_open, preflight=check_servers)
