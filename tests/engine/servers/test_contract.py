"""vLLM and SGLang engines keep the engine contract, before scripted servers and in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import model_folder


class Scripted(EngineContract):
    in_virtual_time = True
    kit: ModuleType
    script: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def server(self) -> Any:
        return self.kit.Server(**self.script)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with self.kit.opened(self.server(), model_folder(self.place / "v0"), **self.settings) as engine:
            yield engine

    def new_weights(self, version: int) -> WeightSource:
        return FolderWeights(version, model_folder(self.place / "v1"))

    def bad_weights(self) -> WeightSource:
        return FolderWeights(1, model_folder(self.place / "v2", hidden=8))


class TestVLLMThatRecomputesKeepsTheContract(Scripted):
    kit, num_at_once = vllm_kit, 1000


class TestVLLMThatKeepsItsCacheKeepsTheContract(Scripted):
    kit, settings = vllm_kit, {"kv_on_update": "keep"}


class TestSGLangThatRecomputesKeepsTheContract(Scripted):
    kit, num_at_once = sglang_kit, 1000


class TestSGLangThatKeepsItsCacheKeepsTheContract(Scripted):
    kit, settings = sglang_kit, {"kv_on_update": "keep"}


class TestSGLangThatStreamsIncrementsInPiecesKeepsTheContract(Scripted):
    kit, settings = sglang_kit, {"stream_interval_tokens": 7}
    script = {"incremental": True, "lag_s": 0.3}  # noqa: RUF012
