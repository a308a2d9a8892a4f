"""The asyncio shell: lockstep with consumers, streaming, failures, deadlines."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rollover.engine.base import Chunk
from rollover.engine.embedded.core import EngineCore, Output
from rollover.engine.embedded.core_loop import ThreadLoop
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.embedded.sampler import Drawn
from rollover.errors import EngineError, EngineTimeout, ResourceError
from rollover.types import FinishReason
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import DEADLINE_S, assert_wellformed, collect, request, tokens
from tests.engine.embedded.harness import CONFIG
from tests.engine.models import tiny_model

pytestmark = pytest.mark.real_time


def engine_of(folder: Path, *, lockstep: bool = False, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine.from_folder(folder, replace(CONFIG, **settings), lockstep=lockstep)


async def lockstep_log(folder: Path, **settings: Any) -> list[tuple[str, int, int, str | None]]:
    """A small scheduler over a lockstep engine: refill on every finish, abort two when the third is done, resume them.
    Each entry is a chunk: call, number of tokens, iteration it was seen at, finish reason."""
    log: list[tuple[str, int, int, str | None]] = []
    engine = engine_of(folder, lockstep=True, stream_interval_tokens=3, **settings)
    tasks: list[asyncio.Task[None]] = []
    heads: dict[str, tuple[int, ...]] = {}

    async def consume(name: str, length: int, call: int = 0) -> None:
        req = request(name, seed=len(name) + length, max_new_tokens=length, response_ids=heads.get(name, ()), call=call)
        async for chunk in engine.generate(req):
            heads[name] = heads.get(name, ()) + chunk.token_ids
            log.append((req.request_id, len(chunk.token_ids), engine.stats().decode_iterations, chunk.finish_reason))
            if chunk.finish_reason is FinishReason.LENGTH:
                for _ in range(length % 5):  # a reward that takes its time
                    await asyncio.sleep(0)
                if name == "c":
                    await engine.abort(["a#0", "b#0"])
                    tasks.append(asyncio.create_task(consume("a", 23, call=1)))
                    tasks.append(asyncio.create_task(consume("b", 31, call=1)))
                elif len(tasks) < 8:
                    tasks.append(asyncio.create_task(consume(f"n{len(tasks)}", 4 + len(tasks))))

    lengths = {"a": 23, "b": 31, "c": 12, "d": 7, "e": 9}
    tasks += [asyncio.create_task(consume(name, length)) for name, length in lengths.items()]
    async with asyncio.timeout(DEADLINE_S):
        while pending := [t for t in tasks if not t.done()]:
            await asyncio.gather(*pending)
    await engine.close()
    return log


async def test_lockstep_gives_the_same_interleaving_twice(folder: Path) -> None:
    first = await lockstep_log(folder)
    assert first == await lockstep_log(folder)
    assert [e for e in first if e[3] == "abort"] == [("a#0", 0, 12, "abort"), ("b#0", 0, 12, "abort")]
    assert {e[0]: e[3] for e in first if e[3]} | {"a#1": "length", "b#1": "length"} == {
        e[0]: e[3] for e in first if e[3]
    }


async def test_in_lockstep_a_consumer_that_holds_a_chunk_holds_the_engine(folder: Path) -> None:
    engine = engine_of(folder, lockstep=True)
    other = asyncio.create_task(collect(engine, request("b", max_new_tokens=50)))
    stream = engine.generate(request("a", max_new_tokens=50))
    await anext(stream)
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine.stats().decode_iterations == 1 and engine.stats().decoded_tokens == 2
    late = asyncio.create_task(collect(engine, request("c", max_new_tokens=2)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.stats().num_waiting == 1 and engine.stats().decode_iterations == 1
    assert (await anext(stream)).token_ids
    assert engine.stats().decode_iterations == 2  # the late call was in the very next iteration
    await stream.aclose()  # type: ignore[attr-defined]  # closing processes what is left
    await asyncio.gather(other, late)
    await engine.close()


async def test_in_lockstep_calls_of_one_turn_start_together_in_call_order(folder: Path) -> None:
    engine = engine_of(folder, lockstep=True, max_running=2, stream_interval_tokens=100)
    order: list[str] = []

    async def consume(name: str) -> None:
        await collect(engine, request(name, max_new_tokens=3))
        order.append(name)

    await asyncio.gather(*(consume(name) for name in "dacb"))
    assert order == ["d", "a", "c", "b"]
    assert engine.stats().decode_iterations == 6
    await engine.close()


@pytest.mark.parametrize("lockstep", [False, True])
async def test_chunks_come_at_the_interval_and_the_last_one_has_the_rest(folder: Path, lockstep: bool) -> None:
    engine = engine_of(folder, lockstep=lockstep, stream_interval_tokens=8)
    chunks = await collect(engine, request("a", max_new_tokens=20))
    assert [len(c.token_ids) for c in chunks] == [8, 8, 4]
    assert_wellformed(chunks)
    await engine.close()


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    ("cause", "error", "message"),
    [
        (RuntimeError("kernel broke"), EngineError, "RuntimeError: kernel broke"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ResourceError, "kv_cache_bytes"),
        (MemoryError(), ResourceError, "lower"),
    ],
)
async def test_a_failed_iteration_fails_every_open_call_and_the_engine_lives_on(
    folder: Path,
    lockstep: bool,
    cause: Exception,
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(folder, lockstep=lockstep)
    runner = engine._core._model_runner
    decode = runner.decode

    def broken(*inputs: Any) -> Drawn:
        if engine._core.stats().decode_iterations >= 3:
            raise cause
        return decode(*inputs)

    monkeypatch.setattr(runner, "decode", broken)
    monkeypatch.setattr(runner.kv, "zero_", Mock(side_effect=RuntimeError("every call fails on this device")))
    await engine.pause()  # or one call may fail before the other is there
    calls = [asyncio.create_task(collect(engine, request(name, max_new_tokens=50))) for name in "ab"]
    async with asyncio.timeout(DEADLINE_S):
        while engine.stats().num_running + engine.stats().num_waiting < 2:
            await asyncio.sleep(0)
        await engine.resume()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, error)
            with pytest.raises(error, match=message):
                raise result
            assert result.__cause__ is cause
        with pytest.raises(EngineError, match="every call fails on this device"):
            await collect(engine, request("d"))
        monkeypatch.undo()
        assert len(tokens(await collect(engine, request("c")))) == 12
        await engine.close()


@pytest.mark.parametrize("lockstep", [False, True])
async def test_a_call_that_ends_in_the_iteration_that_fails_fails_with_the_others(folder: Path, lockstep: bool) -> None:
    engine = engine_of(folder, lockstep=lockstep)
    weights = tiny_model(sharpness=3.0).state_dict()
    weights["model.embed_tokens.weight"][63] = math.nan
    await engine.load(1, MemoryWeights(1, weights))
    calls = [collect(engine, request("ends", max_new_tokens=1)), collect(engine, request("b", prompt_ids=(5, 6, 63)))]
    async with asyncio.timeout(DEADLINE_S):
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert "version 1 gave logits that are not finite for request 'b#0'" in str(result)
        await engine.close()


async def test_a_lost_thread_is_a_timeout_that_names_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    engine = engine_of(folder, command_timeout_s=0.05)

    def hang(core: EngineCore) -> list[Output]:
        release.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(EngineCore, "step", hang)

    async def hangs_in(name: str) -> asyncio.Task[list[Chunk]]:
        call = asyncio.create_task(collect(engine, request(name)))
        await asyncio.sleep(0)
        with pytest.raises(EngineTimeout, match=r"'abort'.*0\.05"):
            while True:  # the first may still slip in before the step
                await engine.abort(["nobody"])
        return call

    call = await hangs_in("a")
    release.set()
    monkeypatch.undo()
    assert len(tokens(await call)) == 12
    release.clear()
    monkeypatch.setattr(EngineCore, "step", hang)
    call = await hangs_in("b")
    with pytest.raises(EngineTimeout, match="'close'"):
        await engine.close()
    loop: Any = engine._loop
    assert loop._thread.is_alive()  # the event loop was not held up until it came back
    release.set()
    assert [chunk.finish_reason for chunk in await call] == [FinishReason.ABORT]


def test_one_engine_serves_one_event_loop_after_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, command_timeout_s=5.0)
    runs: list[list[Chunk]] = [asyncio.run(collect(engine, request(name))) for name in "ab"]
    assert tokens(runs[0]) == tokens(runs[1])
    left, posted, loop = threading.Event(), threading.Event(), cast(ThreadLoop, engine._loop)
    post = loop._post

    def watched(*call: Any) -> None:
        try:
            post(*call)
        finally:
            posted.set()

    async def leave() -> None:
        loop.submit(lambda core: [] if left.wait(DEADLINE_S) else None)

    monkeypatch.setattr(loop, "_post", watched)
    asyncio.run(leave())
    left.set()
    assert posted.wait(DEADLINE_S), "a command ends when its event loop has been closed"
    assert tokens(asyncio.run(collect(engine, request("c")))) == tokens(runs[0])
    asyncio.run(engine.close())
