"""The memory of a server of the embedded engine.

What is peculiar to it: nothing has to be taken again. The next load makes room for weights and cache itself, and fails
as a whole where there is none.
"""

from __future__ import annotations

from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.ownership import Part


class EmbeddedServerMemory:
    """Implements ``MemoryEndpoint``.

    Example: ``await memory.release()`` sends ``POST /sleep``.
    """

    def __init__(self, client: HTTPClient, config: EmbeddedServerConfig) -> None:
        self._client = client
        self._timeout_s = config.load_timeout_s

    async def check(self) -> None:
        """Accept every server: each can give its memory back."""

    async def release(self) -> None:
        await self._client.call("POST", "/sleep", body={}, timeout_s=self._timeout_s)

    async def take(self, part: Part) -> None:
        """Do nothing: the load takes the memory."""
