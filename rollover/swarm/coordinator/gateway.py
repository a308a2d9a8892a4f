"""The gateway: one port where workers dial in by WebSocket and fetch blobs by HTTP.

====================  ============================================  ==================================================
route                 answers                                       refuses
====================  ============================================  ==================================================
``GET /v1/session``   a WebSocket of frames (``messages``)          without a valid token, or another subprotocol
``GET /v1/blobs/..``  a blob by its digest, with ``Range``          without a valid token; names that are no digest
====================  ============================================  ==================================================

It decides nothing: connections and frames go to the coordinator's shell, which answers through ``Connection``.

What it keeps true: nobody without a token of this run gets further than the refusal; a frame of a connection is handed
on only after those before it; a worker that does not read what it is sent is disconnected, not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.listening import open_listener
from rollover.swarm.publication.manifest import DIGEST
from rollover.swarm.wire.messages import MAX_FRAME_BYTES, SUBPROTOCOL, FromWorker, Hello, ProtocolError, decode_up

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_MAX_UNSENT_BYTES = 64 * 2**20
"""A worker that leaves so much unread is disconnected; it comes back and goes on."""


class Sessions(Protocol):
    """The coordinator's shell, as the gateway sees it.

    Example: ``connected("laptop", hello, connection)`` returns the lease under which its messages are then
    ``received``.
    """

    def connected(self, name: str, hello: Hello, connection: Connection) -> int: ...

    def received(self, lease: int, message: FromWorker) -> None: ...

    def disconnected(self, lease: int) -> None: ...


class Connection:
    """The sending side of one worker's connection.

    Example: ``connection.send(frame)`` returns at once; ``connection.close()`` ends it behind what was sent.
    """

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_unsent_bytes = 0
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        if self._is_closed:
            return
        self._num_unsent_bytes += len(frame)
        if self._num_unsent_bytes > _MAX_UNSENT_BYTES:
            self.close()
            return
        self._frames.put_nowait(frame)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._frames.put_nowait(None)

    async def relay(self, websocket: WebSocket) -> None:
        """Send what comes until the connection is closed."""
        while (frame := await self._frames.get()) is not None:
            await websocket.send_bytes(frame)
            self._num_unsent_bytes -= len(frame)


class Gateway:
    """Serves workers on one port, in the event loop of its owner.

    Args:
        member_of: returns the name of the worker that sent an ``Authorization`` header, ``None`` when it may not join.
        blobs: the folder of blobs.

    Example: ``gateway.bind()``, then ``await gateway.serve()``; ``gateway.url`` is ``"ws://127.0.0.1:8790"``.
    """

    def __init__(
        self, config: SwarmConfig, sessions: Sessions, *, member_of: Callable[[str | None], str | None], blobs: Path
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._member_of = member_of
        self._blobs = blobs
        self._connections: set[Connection] = set()
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address that workers are to join."""
        assert self._socket is not None, "the gateway is open"
        host, port = self._config.address[0], self._socket.getsockname()[1]
        scheme = "ws" if self._config.tls_certificate is None else "wss"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def bind(self) -> None:
        """Take the address. Raises ``ConfigError`` when it is in use or cannot be had, or the certificate is no
        good."""
        self._socket = open_listener(self._config)
        routes = [
            WebSocketRoute("/v1/session", self._session),
            Route("/v1/blobs/{digest}", self._blob, methods=["GET"]),
        ]
        settings = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            log_level="critical",  # what it would say of a worker that is refused, the worker says itself
            access_log=False,
            lifespan="off",
            ws="websockets-sansio",
            ws_max_size=MAX_FRAME_BYTES,
            ws_ping_interval=self._config.lease_s / 3,
            ws_ping_timeout=self._config.lease_s,
            ssl_certfile=self._config.tls_certificate,
            ssl_keyfile=self._config.tls_key,
            timeout_graceful_shutdown=2,
        )
        try:
            settings.load()
        except OSError as e:  # ssl.SSLError is one
            self._socket.close()
            files = f"{self._config.tls_certificate!r} and engine.tls_key = {self._config.tls_key!r}"
            raise ConfigError(f"engine.tls_certificate = {files} cannot be used: {e}") from e
        self._server = _Server(settings)

    async def serve(self) -> None:
        """Answer from now on; workers that dialled in before have waited."""
        assert self._server is not None and self._socket is not None, "the address was taken before"
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """End all connections, behind what was sent, and stop listening."""
        for connection in list(self._connections):
            connection.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._socket is not None:
            self._socket.close()

    async def _session(self, websocket: WebSocket) -> None:
        name = self._member_of(websocket.headers.get("authorization"))
        if name is None:
            await websocket.send_denial_response(_unauthorized())
            return
        if SUBPROTOCOL not in websocket.scope["subprotocols"]:
            offered = ", ".join(websocket.scope["subprotocols"]) or "none"
            text = f"this run speaks {SUBPROTOCOL}, the worker offers: {offered}\n"
            await websocket.send_denial_response(PlainTextResponse(text, status_code=426))
            return
        await websocket.accept(subprotocol=SUBPROTOCOL)
        connection = Connection()
        self._connections.add(connection)
        sending = asyncio.create_task(connection.relay(websocket))
        try:
            await self._converse(websocket, name, connection, sending)
        finally:
            self._connections.discard(connection)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if websocket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await websocket.close()

    async def _converse(
        self, websocket: WebSocket, name: str, connection: Connection, sending: asyncio.Task[None]
    ) -> None:
        """Hand on the frames of one connection until one side ends it."""
        lease: int | None = None
        try:
            while not sending.done():
                receiving = asyncio.ensure_future(websocket.receive_bytes())
                limit_s = _HELLO_TIMEOUT_S if lease is None else None
                await asyncio.wait([receiving, sending], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    await asyncio.gather(receiving, return_exceptions=True)
                    return
                message = decode_up(receiving.result())
                if lease is not None:
                    self._sessions.received(message.lease, message.message)
                elif isinstance(message.message, Hello):
                    lease = self._sessions.connected(name, message.message, connection)
                else:
                    raise ProtocolError("the first message of a connection must be a hello")
        except (WebSocketDisconnect, RuntimeError, KeyError):  # gone while we looked away; a text frame
            pass
        except ProtocolError as e:
            logger.warning("%s broke the protocol and was disconnected: %s", name, e)
        finally:
            if lease is not None:
                self._sessions.disconnected(lease)

    async def _blob(self, request: Request) -> Response:
        if self._member_of(request.headers.get("authorization")) is None:
            return _unauthorized()
        digest = request.path_params["digest"]
        path = self._blobs / digest
        if not DIGEST.fullmatch(digest) or not path.is_file():
            return PlainTextResponse("there is no such blob\n", status_code=404)
        return FileResponse(path, media_type="application/octet-stream", headers={"etag": f'"{digest}"'})


class _Server(uvicorn.Server):
    """A server that leaves the process's signal handlers to their owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _unauthorized() -> Response:
    text = "the worker's token is not one of this run, or was revoked\n"
    return PlainTextResponse(text, status_code=401, headers={"www-authenticate": "Bearer"})
