"""SGLang engines before scripted servers, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.dialect import SGLangDialect
from rollover.engine.servers.weights.ownership import Ownership
from rollover.types import AdapterShape
from tests.engine.servers.scripted_server import ScriptedServer, ScriptedTransport
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.engine.servers.vllm.kit import RUN

Server = ScriptedSGLang


def settings(url: str = "http://one", **changes: Any) -> SGLangConfig:
    return replace(SGLangConfig(urls=(url,), stream_interval_tokens=1), **changes)


def engine_over(
    client: HTTPClient,
    config: SGLangConfig,
    folder: Path,
    ownership: Ownership | None = None,
    adapters: AdapterShape | None = None,
    device: str | None = None,
) -> ServerEngine:
    model = ModelFolder.read(folder)
    dialect = SGLangDialect(client, config, model, adapters=adapters, device=device)
    return ServerEngine(client, config, model, dialect, ownership=ownership or Ownership("any"))


def make_engine(
    server: ScriptedServer,
    folder: Path,
    url: str = "http://one",
    *,
    ownership: Ownership | None = None,
    adapters: AdapterShape | None = None,
    device: str | None = None,
    **changes: Any,
) -> ServerEngine:
    config = settings(url, **changes)
    client = HTTPClient(url, config, transport=ScriptedTransport({url.removeprefix("http://"): server}))
    return engine_over(client, config, folder, ownership or Ownership(RUN), adapters, device)


@asynccontextmanager
async def opened(server: ScriptedServer, folder: Path, **changes: Any) -> AsyncIterator[ServerEngine]:
    engine = make_engine(server, folder, **changes)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()
