"""A worker with the embedded engine and real weights, joined to a real coordinator over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.clock import SystemClock
from rollover.engine.base import Chunk, Engine
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.run.worker import opener
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.open import open_swarm
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.joining import work_for
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.engine.contract import request, update
from tests.engine.models import saved, tiny_model
from tests.speed import within

ENGINE = EmbeddedConfig(
    max_running=4, max_context_tokens=128, kv_cache_bytes=2**22, stream_interval_tokens=4, cpu_kernels="torch"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a model."""
    root = tmp_path_factory.mktemp("models")
    return [saved(tiny_model(seed=seed), root / f"v{seed}") for seed in range(2)]


def weights(version: int, folder: Path) -> MemoryWeights:
    return MemoryWeights(version, dict(FolderWeights(version, folder).tensors()))


@asynccontextmanager
async def swarm(
    root: Path, model: Path, *, port: int = 0, max_context_tokens: int = 128, **config: Any
) -> AsyncIterator[SwarmEngine]:
    engine = await open_swarm(
        SwarmConfig(**{"listen": f"127.0.0.1:{port}", "lease_s": 6.0, **config}),
        model,
        root=root,
        run="sums",
        max_context_tokens=max_context_tokens,
        keep_versions=4,
        clock=SystemClock(),
        checks=False,
    )
    try:
        await engine.load(0, weights(0, model))
        await engine.start()
        yield engine
    finally:
        await engine.close()


def token_of(root: Path, name: str = "laptop") -> WorkerToken:
    """Make a token of the run whose swarm has its files in ``root``."""
    return Credentials(root / "workers.json").add(name, open_key(root / "publisher.key").public_key())


@asynccontextmanager
async def worker(
    root: Path, engine: SwarmEngine, cache: Path, name: str = "laptop", settings: EmbeddedConfig = ENGINE
) -> AsyncIterator[list[str]]:
    lines, stops = list[str](), list[Callable[[str], None]]()
    address, token, config = CoordinatorAddress.parse(engine.url), token_of(root, name), WorkerConfig(engine=settings)
    open_on = opener(config, name=name, root=cache)
    joining = work_for(address, token, config, open_on, cache, None, "test", lines.append, stops.append)
    async with asyncio.TaskGroup() as group:  # a worker that ends early ends the test
        running = group.create_task(joining)
        yield lines
        stops[0]("done")
        await running


async def collected(engine: Engine, **settings: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request(**settings))]


async def expected(model: Path, **settings: Any) -> list[Chunk]:
    engine = EmbeddedEngine.from_folder(model, ENGINE)
    try:
        return await collected(engine, **settings)
    finally:
        await engine.close()


def flat(chunks: list[Chunk]) -> list[tuple[int, float]]:
    return [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]


LOGPROBS = 1e-4
"""Bound on the rounding of a log-prob between batches of other sizes, for which matrix products sum in another order.

A logit is a product of about 630 sums (those along the longest path through two layers), each with an error of u =
2^-24, as a random walk: u sqrt(630) ``|w| |h|`` = 6e-8 * 25 * 8 * 5.9 = 7e-5, where rows of the output matrix have
length 8 and the last hidden states 5.9. Seen: 1.5e-5 with AVX-512.
"""


async def test_a_worker_samples_what_an_engine_beside_the_trainer_does(tmp_path: Path, models: list[Path]) -> None:
    torch.set_num_threads(1)
    root = tmp_path / "swarm"
    async with (
        asyncio.timeout(within(90)),
        swarm(root, models[0]) as engine,
        worker(root, engine, tmp_path / "w") as lines,
    ):
        names = [{"name": f"s{i}", "seed": i, "max_new_tokens": 40} for i in range(3)]
        found = await asyncio.gather(*(collected(engine, **each) for each in names))
        for each, chunks in zip(names, found, strict=True):
            alone = flat(await expected(models[0], **each))
            assert [token for token, _ in flat(chunks)] == [token for token, _ in alone]
            assert [p for _, p in flat(chunks)] == pytest.approx([p for _, p in alone], abs=LOGPROBS)
            assert {chunk.policy_version for chunk in chunks} == {0}
        await update(engine, weights(1, models[1]))
        async with asyncio.timeout(within(30)):
            while engine.coordinator.members["laptop"].version != 1:
                await asyncio.sleep(0)
        chunks = await collected(engine, name="t", seed=5, max_new_tokens=40)
        assert {chunk.policy_version for chunk in chunks} == {1}
        alone = flat(await expected(models[1], name="t", seed=5, max_new_tokens=40))
        assert [token for token, _ in flat(chunks)] == [token for token, _ in alone]
        assert any("serving version 1" in line for line in lines), lines


async def test_a_killed_coordinator_asks_for_the_rest_when_it_is_back(tmp_path: Path, models: list[Path]) -> None:
    torch.set_num_threads(1)
    root = tmp_path / "swarm"
    settings = {"name": "s", "seed": 3, "max_new_tokens": 90}
    alone = flat(await expected(models[0], **settings))
    async with asyncio.timeout(within(90)), AsyncExitStack() as stack:
        before = await stack.enter_async_context(swarm(root, models[0]))
        lines = await stack.enter_async_context(worker(root, before, tmp_path / "w"))
        stream = before.generate(replace(request(**settings), is_journaled=True))
        journaled = [await anext(stream), await anext(stream)]
        assert before.gateway is not None
        port = int(before.gateway.url.rpartition(":")[2])
        await before.gateway.close()  # nothing is said: the process is gone
        after = await stack.enter_async_context(swarm(root, models[0], port=port))
        assert after.coordinator.run.run_epoch == 2
        done = tuple(token for token, _ in flat(journaled))
        again = replace(request(**settings, response_ids=done, call=1), is_journaled=True)
        rest = [chunk async for chunk in after.generate(again)]
        assert after.coordinator.counters["adopted_calls"] == 1, lines
        assert [token for token, _ in flat(journaled) + flat(rest)] == [token for token, _ in alone]
        assert sum(chunk.num_prefilled_tokens for chunk in rest) == 0
        assert after.coordinator.members["laptop"].distrust == ""
