"""Progress is a token: a server that ends calls which nobody asked it to end is asked a bounded number of times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.engine.base import Chunk
from rollover.errors import EngineError, EnginesAway, EngineTimeout, RolloverError
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, SamplingParams
from tests.engine.contract import collect, request, tokens
from tests.engine.servers.kit import bodies
from tests.engine.servers.pool.kit import Fleet, pool_of_two
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.test_complete import Empty, Failing
from tests.rollout.kit import SEED, ParityScorer, Prompts, strategy_of
from tests.virtual_time import VirtualClock


def of_vllm(reason: str | None, count: int) -> bytes:
    choice = {"token_ids": [1] * count, "logprobs": {"token_logprobs": [-1.0] * count}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def of_sglang(reason: str | None, count: int) -> bytes:
    meta: dict[str, Any] = {"completion_tokens": count, "output_token_logprobs": [[-1.0, 1, None]] * count}
    if reason is not None:
        spans = [{"version": "rollover:ours:0", "start": 0, "end": count}]
        meta |= {"finish_reason": {"type": reason, "matched": 1}, "weight_versions": spans}
    return f"data: {json.dumps({'output_ids': [1] * count, 'meta_info': meta})}\n\n".encode()


EVENT: dict[ModuleType, Callable[[str | None, int], bytes]] = {vllm_kit: of_vllm, sglang_kit: of_sglang}


async def test_an_abort_that_nobody_asked_for_is_an_error_behind_its_tokens(kind: ModuleType, folder: Path) -> None:
    async with kind.serving(folder) as (engine, server):
        for count in (0, 3):
            server.mangle = lambda _, count=count: EVENT[kind]("abort", count)
            received: list[Chunk] = []
            with pytest.raises(EngineError, match=f"stopped a{count}#0 after {count} tokens without being asked to"):
                async for chunk in engine.generate(request(f"a{count}")):
                    received.append(chunk)
            assert tokens(received) == (1,) * count
            assert not any(chunk.finish_reason for chunk in received)


@pytest.mark.parametrize("stop_strings", [(), ("<end>",)])
async def test_a_stop_without_token_is_no_stop(kind: ModuleType, folder: Path, stop_strings: tuple[str, ...]) -> None:
    async with kind.serving(folder) as (engine, server):
        engine._calls._stop_strings = type("Never", (), {"complete": lambda *_: False})()
        server.mangle = lambda _: EVENT[kind]("stop", 0)
        asked = request("a", stop_token_ids=(1,), stop_strings=stop_strings)
        with pytest.raises(EngineError, match="reached a stop token, but sent no token"):
            await collect(engine, asked)


async def test_a_stream_of_events_without_tokens_is_given_up_in_time(kind: ModuleType, folder: Path) -> None:
    async with kind.serving(folder, kind.Server(tick_s=1.0), first_token_timeout_s=50.0) as (engine, server):
        server.mangle = lambda _: EVENT[kind](None, 0)
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimeout, match="its first token for 50 s"):
            await collect(engine, request("a", max_new_tokens=400))
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(50.0, abs=2.0)


def driver_of(engine: Any, **limits: Any) -> RolloutDriver:
    return RolloutDriver(
        engine=engine,
        strategy=strategy_of("april", max_running=8, rollout_batch_size=2, group_size=2, max_new_tokens=20),
        source=Prompts(),
        scorer=ParityScorer(),
        sampling=SamplingParams(max_new_tokens=20),
        seed=SEED,
        clock=VirtualClock(),
        state=RolloutState(),
        limits=Limits(**limits),
    )


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_who_stops_every_call_ends_the_run_in_time(kind: ModuleType, folder: Path, num_servers: int) -> None:
    async with Fleet(kind, folder, num_servers=num_servers) as fleet:
        for server in fleet.servers:
            server.mangle = lambda _: EVENT[kind]("abort", 0)
            server.log.clear()
        started_s = asyncio.get_running_loop().time()
        driver = driver_of(fleet.pool)
        with pytest.raises(RolloverError, match=r"http://s\d stopped .* after 0 tokens without being asked to"):
            await driver.next_batch()
        assert asyncio.get_running_loop().time() - started_s < 60.0
        calls = [body for s in fleet.servers for body in bodies(s, s.generate_path) if body.get("stream")]
        assert len(calls) <= 200
        await driver.stop()


async def test_an_unrequested_abort_is_a_failure_with_a_growing_wait() -> None:
    engine = Failing(0, 10**9, error=None)
    driver = driver_of(engine, max_retries=5)
    with pytest.raises(EngineError, match=r"the engine stopped g\d\.\d after 0 tokens without being asked to"):
        await driver.next_batch()
    waited_s = asyncio.get_running_loop().time()
    assert waited_s == pytest.approx(0.1 * (1 + 2 + 4 + 8 + 16), rel=0.2)
    await driver.stop()


@pytest.mark.parametrize("after", [0, 1, 7])
async def test_aborts_that_end_cost_no_token(after: int) -> None:
    engine = Failing(after, 16, error=None)
    driver = driver_of(engine)
    batch = await driver.next_batch()
    assert all(t.num_tokens == 20 and t.finish_reason is FinishReason.LENGTH for t in batch.trajectories)
    await driver.stop()
    counted = driver.ledger.tokens
    assert counted.decoded == counted.trained + counted.live and not counted.wasted


async def test_a_sample_that_rests_after_a_failure_is_stopped_at_once() -> None:
    engine = Failing(0, 10**9, error=None)
    driver = driver_of(engine, max_retries=60)
    waiting = asyncio.create_task(driver.next_batch())
    await asyncio.sleep(100.0)
    before_s = asyncio.get_running_loop().time()
    await driver.stop()
    assert asyncio.get_running_loop().time() - before_s < 0.01
    assert not driver.ledger.running
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_chunks_without_tokens_are_no_progress() -> None:
    driver = driver_of(Empty(lambda _: 5), stall_timeout_s=300.0)
    with pytest.raises(EngineTimeout, match=r"no reward for 300 s \(rollout.stall_timeout_s; .*plus engine.all_down"):
        await driver.next_batch()
    assert asyncio.get_running_loop().time() == pytest.approx(300.0, abs=1.0)
    await driver.stop()


async def test_a_run_whose_servers_stay_away_ends_once_calls_have_waited_for_them() -> None:
    async with pool_of_two(all_down_timeout_s=500.0) as (one, two, pool):
        one.failing = two.failing = "power cut"
        await asyncio.sleep(30.0)
        began_s = asyncio.get_running_loop().time()
        driver = driver_of(pool)
        with pytest.raises(EnginesAway, match=r"^no engine has been up for 500 s \(engine.all_down_timeout_s\): one: "):
            await driver.next_batch()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(500.0, abs=1.0)
        await driver.stop()
