"""The door at which agents' programs call the model: an OpenAI-compatible server on this machine.

====================================  ====================================================================
``POST /v1/chat/completions``         a turn; its reply comes when the model has decoded it, however late
``GET /v1/models``                    a list of one model
``POST /v1/reward``                   ``{"reward": 1.0}`` sets the reward of the episode
====================================  ====================================================================

While a reply is not there, bytes that mean nothing keep the connection alive: spaces before JSON, comments in a stream.
So a client may wait for longer than it waits for a byte. Every program has a key of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from itertools import count
from typing import Any

from rollover.environments.episodes.conversation import ChatReply, ChatRequest, RefusedRequest, read_request
from rollover.environments.episodes.guest import Asked, Guest
from rollover.errors import DataError
from rollover.types import MAX_REWARD

MODEL = "rollover"
MOST_BYTES = 2**20
"""Largest body of a request."""
_KEEP_ALIVE_S = 3.0
_BACKLOG = 2048
_IDLE_S = 3600
"""Seconds that a connection may be idle: a tool may take long between two requests."""
_LEAVE_S = 1
"""Seconds in which a connection that is left is seen to be gone."""

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_JSON = (b"content-type", b"application/json")


class Door:
    """Serves the programs of a run. Belongs to one event loop."""

    def __init__(self, keep_alive_s: float = _KEEP_ALIVE_S) -> None:
        self._keep_alive_s = keep_alive_s
        self._guests: dict[str, tuple[str, Guest]] = {}
        self._numbers = count()
        self._socket: socket.socket | None = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Return the base URL. Listens from the first call on."""
        if self._socket is None:
            import uvicorn

            self._socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            self._socket.setblocking(False)
            settings = uvicorn.Config(
                self._serve,
                log_config=None,
                log_level="critical",
                access_log=False,
                interface="asgi3",
                lifespan="off",
                backlog=_BACKLOG,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_LEAVE_S,
            )
            self._server = uvicorn.Server(settings)
            self._server.capture_signals = nullcontext  # they are the run's
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    def let_in(self, guest: Guest) -> str:
        """Return a new key, with which a program is this guest."""
        number, secret = str(next(self._numbers)), secrets.token_urlsafe(24)
        self._guests[number] = secret, guest
        return f"sk-{number}-{secret}"

    def let_out(self, key: str) -> None:
        """Close the door to a program. What it has asked before is still answered."""
        del self._guests[key.split("-", 2)[1]]

    async def close(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    # -- one request -----------------------------------------------------------------------------------------

    async def _serve(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        guest = self._guest(headers.get(b"authorization", b""))
        route = f"{scope['method']} {scope['path'].rstrip('/')}"
        if guest is None:
            await _send(send, 401, _error(RefusedRequest("not the key of a running episode", "invalid_api_key")))
        elif route == "GET /v1/models":
            models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rollover"}]
            await _send(send, 200, {"object": "list", "data": models})
        elif route not in ("POST /v1/chat/completions", "POST /v1/reward"):
            message = f"there is no {route} here: have the client use chat completions (POST /v1/chat/completions)"
            await _send(send, 404, _error(RefusedRequest(message)))
        elif (body := await _body(receive)) is None:
            await _send(send, 413, _error(RefusedRequest(f"the request has more than {MOST_BYTES:,} bytes")))
        else:
            try:
                if route == "POST /v1/reward":
                    guest.reward = _reward(body)
                    await _send(send, 200, {"reward": guest.reward})
                    return
                request, loop = read_request(body), asyncio.get_running_loop()
                is_retry = headers.get(b"x-stainless-retry-count", b"0").strip() not in (b"", b"0")
                async with guest.asking:
                    until_s = loop.time() + _LEAVE_S
                    while is_retry and guest.is_unclear(request) and loop.time() < until_s:
                        await asyncio.sleep(0.01)
                    asked = await guest.ask(request, is_retry=is_retry)
            except (RefusedRequest, DataError) as error:
                await _send(send, 400, _error(error))
                return
            await self._reply(guest, asked, request, receive, send)

    def _guest(self, authorization: bytes) -> Guest | None:
        key = authorization.removeprefix(b"Bearer ").decode("latin-1")
        number, _, secret = key.removeprefix("sk-").partition("-")
        known, guest = self._guests.get(number, ("", None))
        return guest if hmac.compare_digest(known.encode(), secret.encode("latin-1")) else None

    async def _reply(self, guest: Guest, asked: Asked, request: ChatRequest, receive: _Receive, send: _Send) -> None:
        """Send the reply when it comes, and until then what keeps the connection alive."""
        response = _Response(send, request)
        gone = asyncio.create_task(_gone(receive))
        asked.num_listening += 1
        try:
            while not asked.reply.done():
                waited = (asked.reply, gone)
                await asyncio.wait(waited, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not asked.reply.done():
                    return
                if not asked.reply.done():
                    await response.wait()
            asked.was_heard = True
            await response.end(guest.refused() if asked.reply.cancelled() else asked.reply.result())
        finally:
            asked.num_listening -= 1
            gone.cancel()


class _Response:
    """The response to one connection, which begins when it has to."""

    def __init__(self, send: _Send, request: ChatRequest) -> None:
        self._send = send
        self._request = request
        self._has_begun = False

    async def wait(self) -> None:
        await self._write(b": waiting\n\n" if self._request.streams else b" ")

    async def end(self, reply: ChatReply | RefusedRequest) -> None:
        """Send the reply, or why there is none. JSON that has begun with status 200 is then cut off: clients try again,
        and get status 400."""
        if isinstance(reply, RefusedRequest):
            if not self._has_begun:
                await _send(self._send, 400, _error(reply))
            elif self._request.streams:
                await self._write(_events([_error(reply)]), more=False)
        elif self._request.streams:
            await self._write(_events(reply.pieces(self._request)), more=False)
        elif self._has_begun:
            await self._write(json.dumps(reply.completion(self._request)).encode(), more=False)
        else:
            await _send(self._send, 200, reply.completion(self._request))

    async def _write(self, content: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            kind = (b"content-type", b"text/event-stream") if self._request.streams else _JSON
            await self._send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await self._send({"type": "http.response.body", "body": content, "more_body": more})


def _events(pieces: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(piece).encode() for piece in pieces) + b"data: [DONE]\n\n"


async def _send(send: _Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: _Receive) -> bytes | None:
    """Return the body of a request, or ``None`` if it is too long."""
    body = b""
    while len(body) <= MOST_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body if len(body) <= MOST_BYTES else None
    return None


async def _gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(error: RefusedRequest | DataError) -> dict[str, Any]:
    code = getattr(error, "code", None)
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": code}}


def _reward(body: bytes) -> float:
    try:
        reward = float(json.loads(body)["reward"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise RefusedRequest('the body must read {"reward": NUMBER}') from None
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        raise RefusedRequest(f"the reward is {reward}: not a finite number within {MAX_REWARD:g}")
    return reward
