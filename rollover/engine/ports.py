"""Listening on a port, in the event loop of its owner.

Invariants: a connection to a ``punctual`` server that waits longer than ``REQUEST_TIMEOUT_S`` for the head of its next
request is closed; none is closed while a request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollover.errors import ConfigError

REQUEST_TIMEOUT_S = 30.0
"""Seconds that a peer may take from its connection, or from the end of its last request, to the end of the next
request's head."""


class _PunctualProtocol(H11Protocol):
    """Ends a connection on which no request comes in time; uvicorn itself waits for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._wait_no_more()
        self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._end)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        is_answering = self.cycle and not self.cycle.response_complete
        if not is_answering and self.transport.get_protocol() is self:  # else it has become a WebSocket
            self.transport.abort()


def punctual(app: ASGIApp, **changes: Any) -> uvicorn.Config:
    """Return settings of uvicorn inside another program, with connections that end when no request comes in time."""
    quiet: dict[str, Any] = {"log_config": None, "log_level": "critical", "access_log": False, "lifespan": "off"}
    return uvicorn.Config(app, http=_PunctualProtocol, proxy_headers=False, **quiet, **changes)


class PortServer(uvicorn.Server):
    """A server on a port that was taken before. It leaves the process's signal handlers to their owner."""

    def __init__(self, settings: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(settings)
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None
        self.port: int = listener.getsockname()[1]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def begin(self) -> asyncio.Task[None]:
        """Answer from now on, in the running event loop. Returns the task that does."""
        self._serving = asyncio.create_task(self.serve(sockets=[self._listener]))
        return self._serving

    async def end(self) -> None:
        self.should_exit = True
        try:
            if self._serving is not None:
                await self._serving
        finally:
            self._listener.close()


def authority(host: str, port: int) -> str:
    """Return an address as URLs write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_on(address: tuple[str, int], *, setting: str, backlog: int | None = 1024) -> socket.socket:
    """Take an address; port 0 takes a free one. Raises ``ConfigError`` naming ``setting`` when it is in use or cannot
    be had. With a ``backlog`` of ``None``, connections are refused until a server answers.
    """
    host, port = address
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        if backlog is not None:
            listener.listen(backlog)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"cannot listen on {setting} = {authority(host, port)!r}: {e.strerror or e}; stop the program that uses"
            " this address, or choose another one (port 0 takes a free port)"
        ) from e
    return listener
