"""Servers of the embedded engine on real sockets, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.dialect import EmbeddedServerDialect
from rollover.engine.servers.embedded.serve import EngineServer
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.ownership import Ownership
from tests.engine.models import saved, tiny_model
from tests.engine.servers.kit import Kit
from tests.speed import within

RUN = "this-run"
CONTEXT = 32_768
"""Long enough for a call that is aborted before its end, whatever the machine does meanwhile."""
ENGINE = EmbeddedConfig(
    device="cpu", cpu_kernels="torch", max_running=4, kv_cache_bytes=2**27, stream_interval_tokens=4
)


def model(folder: Path, **settings: Any) -> Path:
    return saved(tiny_model(**({"max_position_embeddings": CONTEXT} | settings)), folder)


@contextmanager
def serving(folder: Path, config: EmbeddedConfig = ENGINE, *, key: str | None = None) -> Iterator[str]:
    """The address of a server, in a thread with an event loop of its own."""
    server, ready, failures = EngineServer(("127.0.0.1", 0), key), threading.Event(), list[BaseException]()
    addresses: list[str] = []

    def announce(url: str) -> None:
        addresses.append(url)
        ready.set()

    def run() -> None:
        try:
            asyncio.run(server.run(folder, config, announce))
        except BaseException as e:
            failures.append(e)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(within(60)), "the server does not answer"
        assert not failures, failures
        yield addresses[0]
    finally:
        server.stop()
        thread.join(within(60))
    assert not thread.is_alive() and not failures, failures


def make_engine(url: str, folder: Path, *, run: str = RUN, **settings: Any) -> ServerEngine:
    config = EmbeddedServerConfig(urls=(url,), max_running=4, **settings)
    kit = Kit(EmbeddedServerConfig, EmbeddedServerDialect)
    return kit.engine_over(HTTPClient(url, config), config, folder, Ownership(run))


@asynccontextmanager
async def opened(url: str, folder: Path, **settings: Any) -> AsyncIterator[ServerEngine]:
    engine = make_engine(url, folder, **settings)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()
