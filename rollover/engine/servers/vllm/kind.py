"""vLLM servers as a kind of engine."""

from __future__ import annotations

from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.kind import check_servers, opened
from rollover.engine.servers.vllm.config import VLLMConfig


async def _open(config: VLLMConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.vllm.open import open_vllm

    return opened(await open_vllm(config, setup), config)


VLLM = EngineKind(config=VLLMConfig, open=_open, preflight=check_servers)
