"""Engines before scripted servers, in virtual time, of whichever kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.engine.servers.weights.ownership import Ownership
from rollover.errors import EngineError
from rollover.types import AdapterShape
from tests.engine.servers.scripted_server import ScriptedServer, ScriptedTransport
from tests.virtual_time import run

RUN = "ours"


def bodies(server: ScriptedServer, path: str) -> list[Any]:
    """What was sent to a path."""
    return [body for _, p, _, body in server.log if p == path]


class Kit:
    """Makes engines of a kind, each before one server.

    Args:
        config: of the engines, but for what a test changes.
        dialect: of the kind.
        server: makes a scripted server of the kind.
    """

    def __init__(
        self, config: type[Any], dialect: Callable[..., Any], server: Callable[[], Any] = ScriptedServer
    ) -> None:
        self._config, self._dialect, self._server = config, dialect, server

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
        *,
        ownership: Ownership | None = None,
        adapters: AdapterShape | None = None,
        device: str | None = None,
        **changes: Any,
    ) -> ServerEngine:
        config = self.settings(**changes)
        client = HTTPClient("http://one", config, transport=ScriptedTransport({"one": server}))
        return self.engine_over(client, config, folder, ownership or Ownership(RUN), adapters, device)

    @asynccontextmanager
    async def opened(self, server: ScriptedServer, folder: Path, **changes: Any) -> AsyncIterator[ServerEngine]:
        engine = self.make_engine(server, folder, **changes)
        try:
            await engine.open()
            yield engine
        finally:
            await engine.close()

    @asynccontextmanager
    async def serving(
        self, folder: Path, server: Any = None, **changes: Any
    ) -> AsyncIterator[tuple[ServerEngine, Any]]:
        """An open engine and its server, which has been asked for nothing since."""
        server = server or self._server()
        async with self.opened(server, folder, **changes) as engine:
            server.log.clear()
            yield engine, server

    def refused(self, folder: Path, message: str, *, settings: Mapping[str, Any] | None = None, **script: Any) -> None:
        """A server with this script is not opened and gets no weights."""

        async def main() -> None:
            server = self._server()
            for name, value in script.items():
                assert hasattr(server, name)
                setattr(server, name, value)
            engine = self.make_engine(server, folder, **(settings or {}))
            with pytest.raises(EngineError, match=message):
                await engine.open()
            await engine.close()
            assert server.weights == "initial" or "aborts_by_id" in script

        run(main())
