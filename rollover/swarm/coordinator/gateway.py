"""The gateway: one port where workers dial in by WebSocket and fetch blobs by HTTP.

====================  ============================================  ==================================================
route                 answers                                       refuses
====================  ============================================  ==================================================
``GET /v1/session``   a WebSocket of frames (``messages``)          without a valid token, or another subprotocol
``GET /v1/blobs/..``  a blob by its digest, with ``Range``          without a valid token; names that are no digest
====================  ============================================  ==================================================

::

    worker ──frames──▶ gateway ──messages──▶ the coordinator's shell
    worker ◀──frames── gateway ◀── Connection ◀───┘

It decides nothing: it says who a worker is, carries frames in order, and ends what breaks the protocol.

Invariants: a peer without a token of this run gets no further than the refusal; a frame of a connection is
handed on only after those before it; a worker that does not read what it is sent is disconnected, not waited for; one
that reads learns that the run is over, whatever it is sending itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from rollover.engine.background import cancel
from rollover.engine.ports import PortServer, authority, listen_on, punctual
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.shell import Shell
from rollover.swarm.publication.manifest import DIGEST
from rollover.swarm.wire.address import BLOBS_PATH, SESSION_PATH
from rollover.swarm.wire.messages import MAX_FRAME_BYTES, SUBPROTOCOL, Goodbye, Hello, ProtocolError, decode_up, encode

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""Seconds of silence after which a peer that has opened a connection is disconnected."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Unread bytes at which a worker is disconnected; it comes back and continues."""
_KEEP = "public, max-age=31536000, immutable"
"""A blob never changes. Its name, which members alone are told, is what a cache asks of whoever fetches it."""

_LAST_WORDS_S = 2.0
"""Seconds that a worker may take to read why its connection ends."""
_FAREWELL_S = 5.0
"""Seconds that workers may take at the end of the run to close their connections. A socket that is closed here while
they send something is reset, and then they may never read that the run is over."""
_FRAMES_PER_TURN = 4
"""Frames taken from one connection while others wait; thousands may be there, each for some 50 µs. The frames of a
turn of the event loop are journaled in one transaction, so turns of few frames cost much."""


class Gateway:
    """Serves workers on one port, in the event loop of its owner.

    Args:
        member_of: returns the name of the worker that sent an ``Authorization`` header, ``None`` when it may not join.
        blobs: the folder of blobs.

    Raises ``ConfigError`` when the address is in use or cannot be had, or the certificate cannot be used.
    """

    def __init__(
        self, config: SwarmConfig, shell: Shell, *, member_of: Callable[[str | None], str | None], blobs: Path
    ) -> None:
        self._shell, self._member_of, self._blobs = shell, member_of, blobs
        self._connections: set[_WorkerSession] = set()
        self._server = self._take_address(config)
        self.serve = self._server.begin
        """Answers from now on; workers that dialled in before have waited."""
        host = "HOST" if config.address[0] in ("0.0.0.0", "::") else config.address[0]
        self.url = f"{'ws' if config.tls_certificate is None else 'wss'}://{authority(host, self._server.port)}"
        """The address that workers are to join, with ``HOST`` if it listens on all addresses of the machine."""

    def _take_address(self, config: SwarmConfig) -> PortServer:
        routes = [
            WebSocketRoute(SESSION_PATH, self._session),
            WebSocketRoute("/{path:path}", _no_session),  # the framework's answer is 403, as to a refused token
            Route(f"{BLOBS_PATH}/{{digest}}", self._blob, methods=["GET"]),
        ]
        settings = punctual(
            Starlette(routes=routes),
            ws=WebSocketsSansIOProtocol,
            ws_max_size=MAX_FRAME_BYTES,
            ws_ping_interval=config.lease_s / 3,
            ws_ping_timeout=config.lease_s,
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
            timeout_graceful_shutdown=2,
        )
        listener = listen_on(config.address, setting="engine.listen")
        try:
            settings.load()
        except OSError as e:  # ssl.SSLError is one
            listener.close()
            files = f"{config.tls_certificate!r} and engine.tls_key: {config.tls_key!r}"
            raise ConfigError(f"engine.tls_certificate: {files} cannot be used: {e}") from e
        return PortServer(settings, listener)

    async def close(self) -> None:
        """End all connections after everything that was sent, and stop listening."""
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                while any(isinstance(c, WebSocketsSansIOProtocol) for c in self._server.server_state.connections):
                    await asyncio.sleep(0.01)
        with contextlib.suppress(InvalidState):  # of a connection that its peer is closing, which takes a while
            await self._server.end()

    async def _session(self, websocket: WebSocket) -> None:
        name = self._member_of(websocket.headers.get("authorization"))
        if name is None:
            self._shell.refused("login")
            await websocket.send_denial_response(_unauthorized())
            return
        if SUBPROTOCOL not in websocket.scope["subprotocols"]:
            self._shell.refused("protocol")
            offered = ", ".join(websocket.scope["subprotocols"]) or "none"
            text = f"this run speaks {SUBPROTOCOL}, but the worker offers {offered}\n"
            await websocket.send_denial_response(PlainTextResponse(text, status_code=426))
            return
        await websocket.accept(subprotocol=SUBPROTOCOL)
        session = _WorkerSession(websocket, name, self._shell)
        self._connections.add(session)
        try:
            await session.run()
        finally:
            self._connections.discard(session)

    async def _blob(self, request: Request) -> Response:
        if self._member_of(request.headers.get("authorization")) is None:
            self._shell.refused("login")
            return _unauthorized()
        digest = request.path_params["digest"]
        path = self._blobs / digest
        if not DIGEST.fullmatch(digest) or not path.is_file():
            return PlainTextResponse("there is no such blob\n", status_code=404)
        headers = {"etag": f'"{digest}"', "cache-control": _KEEP}
        return _BlobResponse(path, media_type="application/octet-stream", headers=headers)


async def _no_session(websocket: WebSocket) -> None:
    text = f"workers join this run at the path {SESSION_PATH}\n"
    await websocket.send_denial_response(PlainTextResponse(text, status_code=404))


class _WorkerSession:
    """The WebSocket of one worker, as a ``Connection``: what it sends goes to ``sessions``, a hello first, and what it
    is sent waits until it reads, up to ``MAX_UNSENT_BYTES``.
    """

    def __init__(self, websocket: WebSocket, name: str, shell: Shell) -> None:
        self._websocket, self._name, self._shell = websocket, name, shell
        self._lease: int | None = None
        self._unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_unsent_bytes = 0
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        if self._is_closed:
            return
        self._num_unsent_bytes += len(frame)
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self.close()
            return
        self._unsent.put_nowait(frame)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._unsent.put_nowait(None)

    async def run(self) -> None:
        """Carry frames both ways; tell the worker why the session ends, if the reason is a frame that it has sent."""
        sending, receiving = asyncio.create_task(self._send()), asyncio.create_task(self._receive())
        try:
            await asyncio.wait([receiving, sending], return_when=asyncio.FIRST_COMPLETED)
            receiving.cancel()
            await asyncio.wait([receiving])
            if not receiving.cancelled() and (broken := receiving.result()) is not None:
                self._shell.refused("frame")
                logger.warning("%s broke the protocol and was disconnected: %s", self._name, broken)
                # It may come back: perhaps the way was to blame.
                reason = f"this worker violates the protocol: {broken}"
                self.send(encode(self._lease or 0, Goodbye(reason=reason, is_final=False)))
                self.close()
                await asyncio.wait([sending], timeout=_LAST_WORDS_S)
        finally:
            if self._lease is not None:
                self._shell.disconnected(self._lease)
            await cancel((receiving, sending))
            if self._websocket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await self._websocket.close()

    async def _send(self) -> None:
        while (frame := await self._unsent.get()) is not None:
            await self._websocket.send_bytes(frame)
            self._num_unsent_bytes -= len(frame)
            await asyncio.sleep(0)  # lets the event loop notice that the connection is lost

    async def _receive(self) -> ProtocolError | None:
        """Hand on frames until there are no more, or one breaks the protocol, which is returned."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await self._next_frame()
            for number in itertools.count():
                if frame is None:
                    return None
                self._take(frame)
                if number % _FRAMES_PER_TURN == 0:
                    await asyncio.sleep(0)
                frame = await self._next_frame()
        except ProtocolError as e:
            return e
        except TimeoutError:
            return ProtocolError(f"no hello came within {HELLO_TIMEOUT_S:g} s")
        return None

    async def _next_frame(self) -> bytes | None:
        """Return the next frame; ``None`` when the peer is gone. Raises ``ProtocolError`` when it has sent text."""
        try:
            return await self._websocket.receive_bytes()
        except KeyError:
            raise ProtocolError("it sent a text frame, but all frames are binary") from None
        except (WebSocketDisconnect, RuntimeError):  # gone while we looked away
            return None

    def _take(self, frame: bytes) -> None:
        """Hand on the message of a frame. Raises ``ProtocolError``: the session must then be ended."""
        envelope = decode_up(frame)
        if self._lease is not None:
            if envelope.lease == self._lease:
                self._shell.received(self._lease, envelope.message)
            else:  # leases are small numbers: nobody may speak for another by naming theirs
                self._shell.fenced(envelope.message)
        elif isinstance(envelope.message, Hello):
            self._lease = self._shell.connected(self._name, envelope.message, self)
        else:
            raise ProtocolError("the first message of a connection must be a hello")


class _BlobResponse(FileResponse):
    """A file in large parts: each part costs the event loop the same, whatever its size."""

    chunk_size = 2**20


def _unauthorized() -> Response:
    text = "it does not belong to this run, or was revoked\n"
    return PlainTextResponse(text, status_code=401, headers={"www-authenticate": "Bearer"})
