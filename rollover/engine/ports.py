"""Listening on a port, in the event loop of its owner.

Invariants: a connection to a ``Punctual`` application that waits longer than ``REQUEST_TIMEOUT_S`` for the head of its
next request is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollover.errors import ConfigError

REQUEST_TIMEOUT_S = 30.0
"""Seconds that a peer may take from its connection, or from the end of its last request, to the end of the next
request's head."""


class Punctual:
    """An ASGI application that ends connections on which no request comes in time; uvicorn itself waits for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: dict[Any, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        """Connections without a request, by the peer's address."""

    def settings(self, **changes: Any) -> uvicorn.Config:
        """Return settings of uvicorn inside another program."""
        owner = self

        class Protocol(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                if self.client is not None:  # else it is gone already
                    owner._wait(self.client, transport)

            def connection_lost(self, exc: Exception | None) -> None:
                owner._waits_no_more(self.client)
                super().connection_lost(exc)

        quiet: dict[str, Any] = {"log_config": None, "log_level": "critical", "access_log": False, "lifespan": "off"}
        # A proxy's word for who the peer is would hide the connection.
        return uvicorn.Config(self, http=Protocol, proxy_headers=False, **quiet, **changes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = self._waits_no_more(scope["client"])
        await self._app(scope, receive, send)
        if scope["type"] == "http" and transport is not None and not transport.is_closing():
            self._wait(scope["client"], transport)

    def _wait(self, peer: Any, transport: asyncio.Transport) -> None:
        self._waiting[peer] = transport, asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self._end, peer)

    def _end(self, peer: Any) -> None:
        self._waiting.pop(peer)[0].abort()

    def _waits_no_more(self, peer: Any) -> asyncio.Transport | None:
        transport, timer = self._waiting.pop(peer, (None, None))
        if timer is not None:
            timer.cancel()
        return transport


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
    """Return an address as URLs write it.

    Example: ``authority("::1", 8790)`` is "[::1]:8790".
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_on(address: tuple[str, int], *, setting: str, backlog: int | None = 1024) -> socket.socket:
    """Take an address; port 0 takes a free one. Raises ``ConfigError`` naming ``setting`` when it is in use or cannot
    be had. With a ``backlog`` of ``None``, connections are refused until a server answers.

    Example: ``listen_on(("127.0.0.1", 0), setting="engine.admin").getsockname()[1]`` is 40121, say.
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
