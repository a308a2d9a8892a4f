"""The embedded engine gives its memory back for a step of the trainer, and wakes with the next weights."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rollover.errors import EngineError, ResourceError
from rollover.weights.sources import FolderWeights
from tests.engine.contract import DEADLINE_S, collect, request, tokens
from tests.engine.embedded.harness import Calls, core_of, digests_in, opened
from tests.engine.models import saved, tiny_model

pytestmark = pytest.mark.real_time

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Memory is to be given back at once, not when Python looks for cycles."""
    gc.disable()
    yield
    gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_asleep_the_cache_and_the_weights_are_gone_from_memory(folder: Path, tmp_path: Path, kernels: Any) -> None:
    core = core_of(folder, kv_cache_bytes=2**28, cpu_kernels=kernels)
    core._model_runner.kv._keys.add_(1)  # a page that nobody has written takes no memory
    core._model_runner.kv._values.add_(1)
    runner: Any = core._model_runner
    held = [weakref.ref(part) for part in (runner, runner.kv, runner._weights, runner._weights.embedding)]
    del runner
    before = resident_bytes()
    core.sleep()
    assert [ref() for ref in held] == [None] * 4
    assert before - resident_bytes() > 0.95 * 2**28
    other = saved(tiny_model(seed=1), tmp_path / "other")
    core.load(1, FolderWeights(1, other))
    assert digests_in(core) == digests_in(core_of(other, cpu_kernels=kernels))
    assert len(tokens(Calls(core, [request("a")]).finish()["a#0"])) == 12


def test_sleep_changes_no_sample_and_empties_the_caches(folder: Path) -> None:
    drawn, cached = [], []
    for sleeps in (False, True):
        core = core_of(folder)
        calls = Calls(core, [request(f"r{i}", seed=i) for i in range(3)])
        calls.step(4)
        calls.abort(*calls.chunks)
        heads = {name: tokens(chunks) for name, chunks in calls.chunks.items()}
        if sleeps:
            core.sleep()
        calls.take(core.load(1, FolderWeights(1, folder)))
        again = [
            request(name.partition("#")[0], seed=i, response_ids=heads[name], call=1) for i, name in enumerate(heads)
        ]
        calls.add(*again)
        calls.finish()
        drawn.append([tokens(calls.chunks[r.request_id]) for r in again])
        cached.append(core.stats().cached_tokens)
        assert {c.policy_version for r in again for c in calls.chunks[r.request_id]} == {1}
        assert core.stats().reprefilled_tokens > 0
    assert drawn[0] == drawn[1]
    assert cached[0] == cached[1]


def test_recordings_do_not_keep_a_runner_alive(folder: Path) -> None:
    core = core_of(folder, recorded=True)
    Calls(core, [request("a")]).finish()
    runner = weakref.ref(core._model_runner)
    core.sleep()
    assert runner() is None
    core.load(1, FolderWeights(1, folder))
    assert len(tokens(Calls(core, [request("b")]).finish()["b#0"])) == 12


@pytest.mark.parametrize("lockstep", [False, True])
async def test_a_call_that_is_opened_while_it_sleeps_waits_for_the_weights(folder: Path, *, lockstep: bool) -> None:
    async with opened(folder, lockstep=lockstep, colocated=True) as engine:
        await engine.sleep()
        call = asyncio.create_task(collect(engine, request("a")))
        await engine.pause()
        await engine.resume()
        assert not call.done()
        with pytest.raises(EngineError, match="sleeps"):
            digests_in(engine._core)
        await engine.load(3, FolderWeights(3, folder))
        async with asyncio.timeout(DEADLINE_S):
            assert {chunk.policy_version for chunk in await call} == {3}


async def test_weights_or_caches_that_do_not_fit_leave_it_asleep_with_advice(folder: Path, tmp_path: Path) -> None:
    other = saved(tiny_model(num_hidden_layers=3), tmp_path / "other")
    async with opened(folder) as engine:
        before = digests_in(engine._core)
        await engine.sleep()
        with pytest.raises(EngineError, match="do not fit"):
            await engine.load(1, FolderWeights(1, other))
        with pytest.raises(EngineError, match="sleeps"):
            digests_in(engine._core)
        no_room = Mock(side_effect=RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"))
        make, engine._core._make_model_runner = engine._core._make_model_runner, no_room  # type: ignore[assignment]
        with pytest.raises(ResourceError, match=r"lower engine\.kv_cache_bytes"):
            await engine.load(1, FolderWeights(1, folder))
        engine._core._make_model_runner = make
        await engine.load(1, FolderWeights(1, folder))
        assert digests_in(engine._core) == before
