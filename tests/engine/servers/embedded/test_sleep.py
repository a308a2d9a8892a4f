"""Servers of the embedded engine give their memory back for a step of the trainer, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollover.errors import EngineError
from rollover.weights.publisher import Publisher
from rollover.weights.sources import FolderWeights
from tests.engine.contract import DEADLINE_S, collect, request, tokens
from tests.engine.servers.embedded.kit import ENGINE, RUN, opened, serving

pytestmark = pytest.mark.real_time

SMALL = replace(ENGINE, kv_cache_bytes=2**21, max_context_tokens=1024)


@pytest.mark.parametrize("transfer", ["folder", "gloo"])
async def test_it_sleeps_wakes_with_the_next_weights_and_samples_the_same(folder: Path, transfer: str) -> None:
    with serving(folder, SMALL) as url:
        async with opened(url, folder, colocated=True, weight_transfer=transfer) as engine:
            before = tokens(await collect(engine, request("a", seed=5)))
            await engine.sleep()
            assert (await engine._dialect.weights.label()) == f"rollover:{RUN}:0:asleep"
            call = asyncio.create_task(collect(engine, request("b", seed=5)))
            await Publisher(engine).publish(FolderWeights(1, folder))
            async with asyncio.timeout(DEADLINE_S):
                chunks = await call
            assert tokens(chunks) == before and {chunk.policy_version for chunk in chunks} == {1}
            assert (await engine._dialect.weights.label()) == f"rollover:{RUN}:1"


async def test_foreign_calls_keep_it_awake_and_the_run_is_told(folder: Path) -> None:
    with serving(folder, SMALL) as url:
        async with opened(url, folder, colocated=True) as engine, opened(url, folder) as other:
            stream = other.generate(request("theirs", max_new_tokens=1000))
            await anext(stream)
            with pytest.raises(EngineError, match=f"the trainer needs the memory of {url}.*1 calls are open"):
                await engine.sleep()
            await stream.aclose()  # type: ignore[attr-defined]
