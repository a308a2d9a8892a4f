"""SGLang engines keep the engine contract, before a scripted server and in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.servers.sglang.kit import opened
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.engine.servers.vllm.kit import model_folder
from tests.virtual_time import run


class SGLang(EngineContract):
    server: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.initial = model_folder(tmp_path / "v0")
        self.fitting = model_folder(tmp_path / "v1")
        self.misfit = model_folder(tmp_path / "v2", hidden=8)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with opened(ScriptedSGLang(**self.server), self.initial, **self.settings) as engine:
            yield engine

    def run(self, law: Callable[[FullEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.engine() as engine:
                await law(engine)

        run(main())

    def new_weights(self, version: int) -> WeightSource:
        return FolderWeights(version, self.fitting)

    def bad_weights(self) -> WeightSource:
        return FolderWeights(1, self.misfit)


class TestSGLangThatRecomputesKeepsTheContract(SGLang):
    pass


class TestSGLangThatKeepsItsCacheKeepsTheContract(SGLang):
    settings = {"kv_on_update": "keep"}  # noqa: RUF012


class TestSGLangThatStreamsIncrementsInPiecesKeepsTheContract(SGLang):
    server = {"incremental": True, "lag_s": 0.3}  # noqa: RUF012
    settings = {"stream_interval_tokens": 7}  # noqa: RUF012
