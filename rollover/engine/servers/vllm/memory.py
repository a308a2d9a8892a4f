"""The memory of a vLLM server: its sleep mode, level 2, which drops weights and cache.

What is peculiar to it:

* A server that was started without ``--enable-sleep-mode`` answers that it sleeps and gives nothing back; one on a CPU
  cannot be started with it. So its settings are looked at first.
* When the last part is taken again it resumes by itself: it has not been sent a call yet.
"""

from __future__ import annotations

from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.ownership import Part
from rollover.engine.servers.vllm.answers import VLLMServerInfo
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.errors import EngineError

_TAGS: dict[Part, str] = {"weights": "weights", "cache": "kv_cache"}


class VLLMMemory:
    """Implements ``MemoryEndpoint``."""

    def __init__(self, client: HTTPClient, config: VLLMConfig) -> None:
        self._client = client
        self._timeout_s = config.load_timeout_s

    async def check(self) -> None:
        info = await self._client.ask(
            VLLMServerInfo, "GET", "/server_info", params={"config_format": "json"}, timeout_s=self._timeout_s
        )
        if not info.vllm_config.model.enable_sleep_mode:
            raise EngineError(
                f"{self._client} cannot give its memory back to the trainer, which engine.colocated = true asks for:"
                " start it with --enable-sleep-mode, on a GPU"
            )

    async def release(self) -> None:
        await self._client.call("POST", "/sleep", params={"level": "2"}, timeout_s=self._timeout_s)

    async def take(self, part: Part) -> None:
        await self._client.call("POST", "/wake_up", params={"tags": _TAGS[part]}, timeout_s=self._timeout_s)
