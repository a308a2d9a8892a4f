"""Listening on a port, in the event loop of its owner: the gateway and the live page both do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from rollover.errors import ConfigError

QUIET: dict[str, Any] = {"log_config": None, "log_level": "critical", "access_log": False, "lifespan": "off"}
"""Settings of uvicorn inside another program."""


class PortServer(uvicorn.Server):
    """A server on a port that was taken before. It leaves the process's signal handlers to their owner.

    Example: ``server = PortServer(settings, listen_on(address, setting="engine.admin"))``, then ``server.begin()``.
    """

    def __init__(self, settings: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(settings)
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None
        self.port: int = listener.getsockname()[1]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        """Answer from now on, in the running event loop."""
        self._serving = asyncio.create_task(self.serve(sockets=[self._listener]))

    async def end(self) -> None:
        """Stop listening."""
        self.should_exit = True
        try:
            if self._serving is not None:
                await self._serving
        finally:
            self._listener.close()


def listen_on(address: tuple[str, int], *, setting: str, backlog: int = 1024) -> socket.socket:
    """Take an address; port 0 takes a free one. Raises ``ConfigError`` naming ``setting`` when it is in use or cannot
    be had.

    Example: ``listen_on(("127.0.0.1", 0), setting="engine.admin").getsockname()[1]`` is 40121, say.
    """
    host, port = address
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise ConfigError(
            f"cannot listen on {setting} = {shown!r}: {e.strerror or e}; stop the program that uses this address, or"
            " choose another one (port 0 takes a free port)"
        ) from e
    return listener
