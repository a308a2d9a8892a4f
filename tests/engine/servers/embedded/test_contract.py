"""Servers of the embedded engine keep the engine contract, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.servers.embedded.kit import model, opened


class EmbeddedServer(EngineContract):
    settings: dict[str, Any] = {}  # noqa: RUF012
    endless = 20_000

    gives_kept = True

    @pytest.fixture(autouse=True)
    def _server(self, url: str, folder: Path, new: Path, tmp_path: Path) -> None:
        self.url, self.folder, self.new, self.tmp_path = url, folder, new, tmp_path

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with opened(self.url, self.folder, **self.settings) as engine:
            yield engine

    def new_weights(self, version: int) -> WeightSource:
        return FolderWeights(version, self.new)

    def bad_weights(self) -> WeightSource:
        return FolderWeights(1, model(self.tmp_path, hidden_size=64))


class TestServerThatRecomputesKeepsTheContract(EmbeddedServer):
    pass


class TestServerThatKeepsItsCacheAndIsSentWeightsKeepsTheContract(EmbeddedServer):
    settings = {"kv_on_update": "keep", "weight_transfer": "gloo"}  # noqa: RUF012
