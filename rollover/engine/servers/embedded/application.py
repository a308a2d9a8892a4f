"""The HTTP side of a server: reads bodies, calls the engine, writes answers and streams.

Invariants: nothing is done for a request without the API key, if there is one, nor for a request that a page of the web
could have a browser send; a client that goes away ends its call; whatever fails is one message, never a traceback.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollover.engine.base import GenerateRequest
from rollover.engine.servers.embedded import messages
from rollover.engine.servers.embedded.served import ServedEngine
from rollover.errors import EngineTimeout, RolloverError

MAX_BODY_BYTES = 1 << 26
"""A longer body is refused: the ids of a context of a million tokens take some 7 MB."""


def application(served: ServedEngine, *, key: str | None, host: str) -> ASGIApp:
    """Return the server as an ASGI application.

    Args:
        key: asked for in the ``Authorization`` header, if there is one.
        host: the name that the server was told to listen on.
    """
    acts: Mapping[str, tuple[type[BaseModel], Callable[[Any], Awaitable[object]]]] = {
        "/abort": (messages.AbortBody, served.abort),
        "/pause": (messages.EmptyBody, lambda _: served.pause()),
        "/resume": (messages.EmptyBody, lambda _: served.resume()),
        "/sleep": (messages.EmptyBody, lambda _: served.sleep()),
        "/load_weights": (messages.LoadBody, served.load),
        "/update_weight_version": (messages.LabelBody, served.rename),
        "/group/join": (messages.GroupAddress, served.join),
        "/group/begin": (messages.EmptyBody, lambda _: served.begin()),
        "/group/receive": (messages.Announcement, served.receive),
        "/group/finish": (messages.Reception, served.finish),
        "/group/leave": (messages.EmptyBody, lambda _: served.leave()),
    }
    routes = [
        Route("/health", _health),
        Route("/info", partial(_info, served)),
        Route("/generate", partial(_generate, served), methods=["POST"]),
        *(Route(path, partial(_act, *act), methods=["POST"]) for path, act in acts.items()),
    ]
    return _Guard(Starlette(routes=routes, exception_handlers={ClientDisconnect: _gone}), key=key, host=host)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads


async def _health(request: Request) -> Response:
    return JSONResponse({})


async def _info(served: ServedEngine, request: Request) -> Response:
    return _json(served.info())


async def _generate(served: ServedEngine, request: Request) -> Response:
    try:
        body = messages.GENERATE_REQUEST.validate_json(await request.body(), strict=True)
    except ValidationError as e:
        return _misfit(e)
    return StreamingResponse(_events(served, body), media_type="text/event-stream")


async def _events(served: ServedEngine, request: GenerateRequest) -> AsyncIterator[str]:
    try:
        async with aclosing(served.generate(request)) as events:  # type: ignore[type-var]
            async for event in events:
                yield f"data: {event.model_dump_json()}\n\n"
    except RolloverError as e:
        yield f"data: {json.dumps(_error(str(e)))}\n\n"


async def _act(kind: type[BaseModel], act: Callable[[Any], Awaitable[object]], request: Request) -> Response:
    """Answer once ``act`` has been done with the body."""
    try:
        answer = await act(kind.model_validate_json(await request.body()))
    except ValidationError as e:
        return _misfit(e)
    except RolloverError as e:
        return JSONResponse(_error(str(e)), 504 if isinstance(e, EngineTimeout) else 400)
    return _json(answer) if isinstance(answer, BaseModel) else JSONResponse({})


class _Guard:
    """Refuses requests without the key, and requests that a web page could have made a browser of this machine send: a
    page's own name that points here, or a body that is not said to be JSON."""

    def __init__(self, application: ASGIApp, *, key: str | None, host: str) -> None:
        self._application = application
        self._key = None if key is None else f"Bearer {key}".encode()
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        await (refusal or self._application)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope.get("headers", ()))
        if self._key is not None:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
                return JSONResponse(_error("the API key is missing or wrong"), 401)
        elif not self._is_ours(name := _host_name(headers.get(b"host", b"").decode("latin-1"))):
            return JSONResponse(_error(f"{name!r} is not an address of this server: use its IP address"), 421)
        if scope["method"] == "POST":
            if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
                return JSONResponse(_error("the body must be JSON, with Content-Type: application/json"), 415)
            size = headers.get(b"content-length", b"")
            if not size.isdigit() or int(size) > MAX_BODY_BYTES:
                return JSONResponse(
                    _error(f"the request must state the length of its body, at most {MAX_BODY_BYTES} bytes"), 413
                )
        return None

    def _is_ours(self, name: str) -> bool:
        if name in ("localhost", self._host):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _misfit(error: ValidationError) -> Response:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"])) or "the body"
    return JSONResponse(_error(f"{field}: {first['msg']}"), 422)


def _error(message: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message}}
