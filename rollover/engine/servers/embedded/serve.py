"""The server program: takes an address, opens the engine, answers until it is told to stop.

::

    listen_on ──▶ engine opened ──▶ announce(url) ──▶ requests answered ──▶ stop: calls end as aborted ──▶ closed

Invariants: an address in use is reported before any weight is read. Once the server announces its URL, calls succeed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

import uvicorn

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.ports import PortServer, authority, listen_on
from rollover.engine.servers.embedded.application import application
from rollover.engine.servers.embedded.served import ServedEngine

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than a client keeps a connection that it does not use: else one could be closed under a call."""
_LEAVE_S = 3
"""Longest wait, at the end, for answers to be read."""


class EngineServer:
    """Serves one model on one address, from ``run`` to ``stop``.

    Args:
        address: host and port; port 0 takes a free one.
        key: asked of each request, if there is one.
    """

    def __init__(self, address: tuple[str, int], key: str | None) -> None:
        self._host, self._key = address[0], key
        self._socket = listen_on(address, setting="--host and --port", backlog=None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Return True from the moment at which ``stop`` has an effect."""
        return self._loop is not None

    @property
    def url(self) -> str:
        """Return the address at which clients of the same host can call it."""
        return f"http://{authority(self._host, self._socket.getsockname()[1])}"

    async def run(self, folder: Path, config: EmbeddedConfig, announce: Callable[[str], None]) -> None:
        """Serve the model in ``folder`` until ``stop``. Raises ``RolloverError`` when it cannot be opened."""
        self._loop = asyncio.get_running_loop()
        try:
            engine = await asyncio.to_thread(EmbeddedEngine.from_folder, folder, config)
            served = ServedEngine(engine, folder, label=f"initial-{secrets.token_hex(8)}")
            try:
                await self._answer(served, announce)
            finally:
                await served.close()
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Have ``run`` return soon; callable from a signal handler and from other threads."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _answer(self, served: ServedEngine, announce: Callable[[str], None]) -> None:
        settings = uvicorn.Config(
            application(served, key=self._key, host=self._host),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LEAVE_S,
        )
        server = PortServer(settings, self._socket)
        self._socket.listen(_BACKLOG)
        stopping = asyncio.create_task(self._stopping.wait())
        announce(self.url)
        await asyncio.wait([server.begin(), stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await served.close()  # ends the streams of open calls
        await server.end()
