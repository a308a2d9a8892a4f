"""vLLM servers as a kind of engine."""

from __future__ import annotations

from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.kind import check_servers, opened, places_of
from rollover.engine.servers.vllm.config import VLLMConfig


async def _open(config: VLLMConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.vllm.open import open_vllm

    pool = await open_vllm(
        config,
        setup.folder,
        run=setup.run,
        places=await places_of(config, setup),
        clock=setup.clock,
        adapters=setup.adapters,
        device=setup.device,
    )
    return opened(pool, config)


VLLM = EngineKind(config=VLLMConfig, open=_open, preflight=check_servers)
