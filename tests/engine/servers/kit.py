"""Engines before scripted servers, in virtual time, of whichever kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.engine.servers.weights.ownership import Ownership
from rollover.types import AdapterShape
from tests.engine.servers.scripted_server import ScriptedServer, ScriptedTransport

RUN = "ours"


class Kit:
    """Makes engines of a kind, each before one server.

    Args:
        config: of the engines, but for what a test changes.
        dialect: of the kind.
    """

    def __init__(self, config: type[Any], dialect: Callable[..., Any]) -> None:
        self._config, self._dialect = config, dialect

    def settings(self, url: str = "http://one", **changes: Any) -> Any:
        return replace(self._config(urls=(url,), stream_interval_tokens=1), **changes)

    def engine_over(
        self,
        client: HTTPClient,
        config: ServerConfig,
        folder: Path,
        ownership: Ownership | None = None,
        adapters: AdapterShape | None = None,
        device: str | None = None,
    ) -> ServerEngine:
        model = ModelFolder.read(folder)
        dialect = self._dialect(client, config, model, WeightTerms(adapters=adapters, device=device))
        return ServerEngine(client, config, model, dialect, ownership=ownership or Ownership("any"))

    def make_engine(
        self,
        server: ScriptedServer,
        folder: Path,
        url: str = "http://one",
        *,
        ownership: Ownership | None = None,
        adapters: AdapterShape | None = None,
        device: str | None = None,
        **changes: Any,
    ) -> ServerEngine:
        config = self.settings(url, **changes)
        client = HTTPClient(url, config, transport=ScriptedTransport({url.removeprefix("http://"): server}))
        return self.engine_over(client, config, folder, ownership or Ownership(RUN), adapters, device)

    @asynccontextmanager
    async def opened(self, server: ScriptedServer, folder: Path, **changes: Any) -> AsyncIterator[ServerEngine]:
        engine = self.make_engine(server, folder, **changes)
        try:
            await engine.open()
            yield engine
        finally:
            await engine.close()
