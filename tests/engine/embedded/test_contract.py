"""The embedded engine keeps the engine contract, in its thread and in lockstep."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.core_loop import ThreadLoop
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.weights.base import WeightSource
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.models import tiny_model


def pace(loop: ThreadLoop) -> None:
    """Let the event loop take a turn after each iteration. An iteration of the tiny model takes microseconds: a call
    would else be over before a consumer that is held up can abort it."""
    step = loop._step

    def paced() -> None:
        step()
        turned = threading.Event()
        assert loop._event_loop is not None
        loop._event_loop.call_soon_threadsafe(turned.set)
        turned.wait()

    loop._step = paced  # type: ignore[method-assign]


class Embedded(EngineContract):
    config = EmbeddedConfig(device="cpu", max_running=4, kv_cache_bytes=2**20, block_size_tokens=8)
    lockstep = False
    gives_kept = True

    @pytest.fixture(autouse=True)
    def _model(self, folder: Path) -> None:
        self.folder = folder

    def make_engine(self) -> FullEngine:
        engine = EmbeddedEngine.from_folder(self.folder, self.config, lockstep=self.lockstep)
        if isinstance(engine._loop, ThreadLoop):
            pace(engine._loop)
        return engine

    def new_weights(self, version: int) -> WeightSource:
        return MemoryWeights(version, tiny_model(seed=1).state_dict())

    def bad_weights(self) -> WeightSource:
        return MemoryWeights(1, tiny_model(hidden_size=64).state_dict())


class TestThreadedEngineKeepsTheContract(Embedded):
    pass


class TestLockstepEngineKeepsTheContract(Embedded):
    lockstep = True


class TestEngineThatKeepsItsCacheKeepsTheContract(Embedded):
    config = replace(Embedded.config, kv_on_update="keep")
