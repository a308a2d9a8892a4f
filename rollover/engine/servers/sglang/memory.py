"""The memory of an SGLang server, as its memory saver gives it back: weights, cache and what it has recorded.

What is peculiar to it:

* Without ``--enable-memory-saver`` it gives nothing back and says nothing of that, so its settings are looked at first.
* It dies when it is asked to give memory back while it decodes, and when it is asked to take what it has. It says of
  neither how it stands: the label of its weights does.
"""

from __future__ import annotations

from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.ownership import Part
from rollover.engine.servers.sglang.answers import SGLangServerInfo
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.errors import EngineError

_TAGS: dict[Part, list[str]] = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}


class SGLangMemory:
    """Implements ``MemoryEndpoint``."""

    def __init__(self, client: HTTPClient, config: SGLangConfig) -> None:
        self._client = client
        self._timeout_s = config.load_timeout_s

    async def check(self) -> None:
        info = await self._client.ask(SGLangServerInfo, "GET", "/server_info")
        if not info.enable_memory_saver:
            raise EngineError(
                f"{self._client} cannot give its memory back to the trainer, which engine.colocated = true asks for:"
                " start it with --enable-memory-saver (it needs the package torch-memory-saver, and a GPU)"
            )

    async def release(self) -> None:
        await self._post("/release_memory_occupation", [tag for tags in _TAGS.values() for tag in tags])

    async def take(self, part: Part) -> None:
        await self._post("/resume_memory_occupation", _TAGS[part])

    async def _post(self, path: str, tags: list[str]) -> None:
        await self._client.call("POST", path, body={"tags": tags}, timeout_s=self._timeout_s)
