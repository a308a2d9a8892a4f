"""Servers on loopback: one of HTTP, in a thread that ends with the test, and a gateway without a coordinator."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.gateway import Gateway
from rollover.swarm.coordinator.shell import Connection
from rollover.swarm.wire.messages import FromWorker, Goodbye, Hello, encode


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and says nothing of what it is asked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(handler: type[QuietHandler], certificate: tuple[str, str] | None = None) -> Iterator[str]:
    """Serve, over TLS with a certificate and its key, and yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http{'' if certificate is None else 's'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@asynccontextmanager
async def listening(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """A server that answers each connection as told, over TLS with a context; yield its port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    asyncio.get_running_loop().set_exception_handler(lambda loop, details: None)  # connections that break are meant to
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Greeter:
    """Answers each hello with the worker's name, and that is all."""

    def connected(self, name: str, hello: Hello, connection: Connection) -> int:
        connection.send(encode(7, Goodbye(reason=f"hello {name}", is_final=False)))
        return 7

    def received(self, lease: int, message: FromWorker) -> None: ...

    def fenced(self, message: FromWorker) -> None: ...

    def disconnected(self, lease: int) -> None: ...

    def refused(self, cause: str) -> None: ...


@asynccontextmanager
async def greeting(
    blobs: Path, member_of: Callable[[str | None], str | None], certificate: tuple[str, str] | None = None
) -> AsyncIterator[Gateway]:
    """A port that serves ``blobs`` and greets workers, over TLS with a certificate and its key."""
    tls = {} if certificate is None else dict(zip(("tls_certificate", "tls_key"), certificate, strict=True))
    gateway = Gateway(SwarmConfig(listen="127.0.0.1:0", **tls), Greeter(), member_of=member_of, blobs=blobs)
    gateway.serve()
    try:
        yield gateway
    finally:
        await gateway.close()
