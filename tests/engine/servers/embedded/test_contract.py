"""Servers of the embedded engine keep the engine contract, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.servers.embedded.kit import model, opened, serving


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "initial": model(root / "initial"),
        "fitting": model(root / "fitting", seed=1),
        "misfit": model(root / "misfit", hidden_size=64),
    }


@pytest.fixture(scope="module")
def url(folders: dict[str, Path]) -> Iterator[str]:
    with serving(folders["initial"]) as url:
        yield url


class EmbeddedServer(EngineContract):
    settings: dict[str, Any] = {}  # noqa: RUF012
    endless = 20_000

    gives_kept = True

    @pytest.fixture(autouse=True)
    def _server(self, url: str, folders: dict[str, Path]) -> None:
        self.url, self.folders = url, folders

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with opened(self.url, self.folders["initial"], **self.settings) as engine:
            yield engine

    def new_weights(self, version: int) -> WeightSource:
        return FolderWeights(version, self.folders["fitting"])

    def bad_weights(self) -> WeightSource:
        return FolderWeights(1, self.folders["misfit"])


class TestServerThatRecomputesKeepsTheContract(EmbeddedServer):
    pass


class TestServerThatKeepsItsCacheAndIsSentWeightsKeepsTheContract(EmbeddedServer):
    settings = {"kv_on_update": "keep", "weight_transfer": "gloo"}  # noqa: RUF012
