"""A swarm keeps the engine contract, with real workers that dial in over loopback: one in pull mode, two in push-pull."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.weights.base import WeightSource
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import LONG, EngineContract, FullEngine, assert_wellformed, collect, law, request, tokens
from tests.engine.embedded.test_experts import chosen, routes_of
from tests.engine.models import EXPERTS, saved, tiny_model
from tests.swarm.test_worker_real import ENGINE, swarm, worker

CONTEXT = 16384
"""An iteration of the tiny model takes microseconds: a call must not be over before a publication."""


class TestASwarmInPullMode(EngineContract):
    deadline_s = 120.0
    endless = CONTEXT - 400
    mode = "pull"
    gives_kept = True
    workers: tuple[str, ...] = ("a",)

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.model = saved(tiny_model(max_position_embeddings=CONTEXT), tmp_path / "model")

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        torch.set_num_threads(1)
        root, settings = self.tmp_path / "swarm", replace(ENGINE, max_context_tokens=CONTEXT, kv_cache_bytes=2**26)
        async with (
            swarm(root, self.model, mode=self.mode, max_context_tokens=CONTEXT) as engine,
            AsyncExitStack() as stack,
        ):
            for name in self.workers:
                await stack.enter_async_context(worker(root, engine, self.tmp_path / name, name, settings))
            while not all(self.serves(engine, name) for name in self.workers):
                await asyncio.sleep(0.01)
            yield engine

    def serves(self, engine: SwarmEngine, name: str) -> bool:
        member = engine.coordinator.members.get(name)
        return member is not None and member.serves(checked=False) is not None

    def new_weights(self, version: int) -> WeightSource:
        return MemoryWeights(version, tiny_model(seed=1, max_position_embeddings=CONTEXT).state_dict())

    def bad_weights(self) -> WeightSource:
        return MemoryWeights(1, tiny_model(hidden_size=48, head_dim=12).state_dict())


class TestASwarmInPushPullMode(TestASwarmInPullMode):
    mode = "push_pull"
    num_at_once = 1000
    workers = ("a", "b")
    decodes_through_updates = True

    @law
    async def test_a_call_decodes_on_between_pause_and_resume(self, engine: FullEngine) -> None:
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        chunks = [await anext(stream)]
        await engine.pause()
        for _ in range(20):
            chunks.append(await anext(stream))
        late = await collect(engine, request("b"))
        assert len(tokens(late)) == 12, "and others begin"
        await engine.resume()
        await engine.abort(["a#0"])
        chunks += [c async for c in stream]
        assert_wellformed(chunks)

    @law
    async def test_both_workers_decode(self, engine: FullEngine) -> None:
        room = ENGINE.max_running * len(self.workers)
        assert cast(SwarmEngine, engine).placement.room() == room
        calls = (collect(engine, request(f"c{i}", seed=i, max_new_tokens=LONG)) for i in range(room))
        by = [{chunk.engine for chunk in chunks} for chunks in await asyncio.gather(*calls)]
        assert all(len(names) == 1 for names in by) and set.union(*by) == {*self.workers}


def test_workers_send_the_routes_of_their_engines(tmp_path: Path) -> None:
    contract, model = TestASwarmInPullMode(), tiny_model("qwen3_moe", max_position_embeddings=CONTEXT, **EXPERTS)
    contract.tmp_path, contract.model = tmp_path, saved(model, tmp_path / "model")

    async def law(engine: FullEngine) -> None:
        req = request("a", returns_routes=True, max_new_tokens=20)
        chunks = await collect(engine, req)
        assert [list(route) for route in routes_of(chunks)] == chosen(model, req, tokens(chunks))
        assert routes_of(await collect(engine, request("b"))) == ()

    contract.run(law)
