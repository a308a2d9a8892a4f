"""A swarm in pull mode keeps the engine contract, with a real worker that dials in over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.joining import work_for
from rollover.weights.base import WeightSource
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.models import saved, tiny_model
from tests.swarm.test_worker_real import ENGINE, swarm

CONTEXT = 16384
"""An iteration of the tiny model takes microseconds: a call must not be over before a publication."""


class TestASwarmKeepsTheContract(EngineContract):
    deadline_s = 120.0
    endless = CONTEXT - 400

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.model = saved(tiny_model(max_position_embeddings=CONTEXT), tmp_path / "model")

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        torch.set_num_threads(1)
        root, lines = self.tmp_path / "swarm", list[str]()
        stop: list[Callable[[str], None]] = []
        async with swarm(root, self.model, mode="pull", max_context_tokens=CONTEXT) as engine:
            token = Credentials(root / "workers.json").add("w", open_key(root / "publisher.key").public_key())
            joining = work_for(
                CoordinatorAddress.parse(engine.url),
                token,
                WorkerConfig(engine=replace(ENGINE, max_context_tokens=CONTEXT, kv_cache_bytes=2**26)),
                self.tmp_path / "cache",
                None,
                "test",
                lines.append,
                stop.append,
            )
            async with asyncio.TaskGroup() as group:
                running = group.create_task(joining)
                while engine.room() == 0:
                    await asyncio.sleep(0.01)
                yield engine
                stop[0]("done")
                await running

    def new_weights(self, version: int) -> WeightSource:
        return MemoryWeights(version, tiny_model(seed=1, max_position_embeddings=CONTEXT).state_dict())

    def bad_weights(self) -> WeightSource:
        return MemoryWeights(1, tiny_model(hidden_size=48, head_dim=12).state_dict())
