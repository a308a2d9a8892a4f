"""The listener for people: the live page, its data and metrics, which programs of this machine alone can ask for.

====================  ==============================================================================================
route                 answers
====================  ==============================================================================================
``GET /``             one page that loads nothing from elsewhere and asks for the state every two seconds
``GET /status.json``  the state as it was written last
``GET /metrics``      the same for Prometheus
====================  ==============================================================================================

Invariants: it changes nothing and listens on the loopback interface only; a request that was sent to another
name is refused, so that no page of the web can have its own name point here and read what is shown.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rollover.engine.ports import PortServer, authority, listen_on, punctual
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.wire.address import is_loopback

_GUARDS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


class AdminListener:
    """Serves the live page of a swarm at ``url``, in the event loop of its owner: from ``serve`` to ``close``.

    Args:
        address: host, which is a loopback address, and port; port 0 takes a free one.

    Raises ``ConfigError`` when the address is in use or cannot be had.
    """

    def __init__(self, address: tuple[str, int], board: StatusBoard) -> None:
        assert is_loopback(address[0]), "the config refuses other addresses"
        settings = punctual(application(board), timeout_graceful_shutdown=1)
        server = PortServer(settings, listen_on(address, setting="engine.admin", backlog=64))
        self.serve, self.close = server.begin, server.end
        self.url = f"http://{authority(address[0], server.port)}/"


def application(board: StatusBoard) -> Starlette:
    """Return the page, its data and metrics as an ASGI application."""
    page = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    policy = {"content-security-policy": _policy(page)}

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=policy)

    async def state(request: Request) -> Response:
        parts = {"status": board.status, **board.curves(), "now_s": time.time()}
        return Response(msgspec.json.encode(parts), media_type="application/json")

    async def metrics(request: Request) -> Response:
        from rollover.swarm.coordinator.status.pages.prometheus import CONTENT_TYPE, exposition

        content = b"" if board.status is None else exposition(board.status)
        return Response(content, headers={"content-type": CONTENT_TYPE})

    routes = [Route("/", show), Route("/status.json", state), Route("/metrics", metrics)]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=_only_here)])


async def _only_here(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse what was not sent to this machine by name, and have nothing kept or read by others."""
    host = request.headers.get("host", "")
    if not names_this_machine(host):
        text = f"this page is only for programs on this machine: use the address 127.0.0.1 or localhost, not {host!r}\n"
        return PlainTextResponse(text, status_code=421)
    response = await call_next(request)
    response.headers.update(_GUARDS)
    return response


def names_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine, with whatever port: a tunnel may have changed that."""
    match = re.fullmatch(r"(?:\[(?P<ipv6>[0-9a-fA-F:]+)\]|(?P<name>[^:\s]+))(?::\d{1,5})?", host)
    return match is not None and is_loopback((match["ipv6"] or match["name"]).lower())


def _policy(page: str) -> str:
    """Allow the styles and the script that stand in the page, its own data, and nothing else."""

    def digest(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; connect-src 'self'; style-src 'sha256-{digest('style')}';"
        f" script-src 'sha256-{digest('script')}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
