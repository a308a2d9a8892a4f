"""vLLM engines keep the engine contract, before a scripted server and in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.servers.scripted_server import ScriptedVLLM
from tests.engine.servers.vllm.kit import model_folder, opened
from tests.virtual_time import run


class VLLM(EngineContract):
    kv_on_update = "recompute"

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.initial = model_folder(tmp_path / "v0")
        self.fitting = model_folder(tmp_path / "v1")
        self.misfit = model_folder(tmp_path / "v2", hidden=8)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with opened(ScriptedVLLM(), self.initial, kv_on_update=self.kv_on_update) as engine:
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


class TestVLLMThatRecomputesKeepsTheContract(VLLM):
    pass


class TestVLLMThatKeepsItsCacheKeepsTheContract(VLLM):
    kv_on_update = "keep"
