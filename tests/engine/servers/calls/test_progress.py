"""Progress is a token: a server that ends calls which nobody asked it to end is asked a bounded number of times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.complete import complete
from rollover.errors import EngineError, EnginesAway, EngineTimeout, RolloverError
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, SamplingParams
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, tokens
from tests.engine.fake import FakeEngine
from tests.engine.servers.pool.kit import new_pool, pool_of_two
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import model_folder
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


def number_of_calls(server: Any) -> int:
    return sum(bool(body and body.get("stream")) for _, path, _, body in server.log if path == server.generate_path)


async def test_an_abort_that_nobody_asked_for_is_an_error_behind_its_tokens(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server()
    async with kind.opened(server, model_folder(tmp_path / "v0")) as engine:
        for count in (0, 3):
            server.mangle = lambda _, count=count: EVENT[kind]("abort", count)
            received: list[Chunk] = []
            with pytest.raises(EngineError, match=f"stopped a{count}#0 after {count} tokens without being asked to"):
                async for chunk in engine.generate(request(f"a{count}")):
                    received.append(chunk)
            assert tokens(received) == (1,) * count
            assert not any(chunk.finish_reason for chunk in received)


@pytest.mark.parametrize("stop_strings", [(), ("<end>",)])
async def test_a_stop_without_token_is_no_stop(kind: ModuleType, tmp_path: Path, stop_strings: tuple[str, ...]) -> None:
    server = kind.Server()
    async with kind.opened(server, model_folder(tmp_path / "v0")) as engine:
        engine._calls._stop_strings = type("Never", (), {"complete": lambda *_: False})()
        server.mangle = lambda _: EVENT[kind]("stop", 0)
        asked = request("a", stop_token_ids=(1,), stop_strings=stop_strings)
        with pytest.raises(EngineError, match="reached a stop token, but sent no token"):
            await collect(engine, asked)


async def test_a_stream_of_events_without_tokens_is_given_up_in_time(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server(tick_s=1.0)
    async with kind.opened(server, model_folder(tmp_path / "v0"), first_token_timeout_s=50.0) as engine:
        server.mangle = lambda _: EVENT[kind](None, 0)
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimeout, match="its first token for 50 s"):
            await collect(engine, request("a", max_new_tokens=400))
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(50.0, abs=2.0)


# -- the driver ---------------------------------------------------------------------------------------------


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
async def test_servers_that_stop_every_call_end_the_run_after_bounded_calls(
    kind: ModuleType, tmp_path: Path, num_servers: int
) -> None:
    folder = model_folder(tmp_path / "v0")
    servers = [kind.Server() for _ in range(num_servers)]
    engines = [kind.make_engine(s, folder, f"http://s{i}") for i, s in enumerate(servers)]
    for engine in engines:
        await engine.open()
    pool = new_pool(engines, FolderWeights(0, folder))
    await pool.open()
    for server in servers:
        server.mangle = lambda _: EVENT[kind]("abort", 0)
        server.log.clear()
    started_s = asyncio.get_running_loop().time()
    driver = driver_of(pool)
    with pytest.raises(RolloverError, match=r"http://s\d stopped .* after 0 tokens without being asked to"):
        await driver.next_batch()
    assert asyncio.get_running_loop().time() - started_s < 60.0
    assert sum(map(number_of_calls, servers)) <= 200
    await driver.stop()
    await pool.close()


class Aborting(FakeEngine):
    """Ends calls by itself after ``after`` tokens of each, ``times`` times in all; then it is well."""

    def __init__(self, after: int, times: int) -> None:
        super().__init__(lambda _: 10**6, auto=True, clock=VirtualClock(), tick_s=0.01)
        self.after, self.times = after, times

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        count = 0
        if self.times and self.after == 0:
            self.times -= 1
            yield Chunk(token_ids=(), logprobs=(), policy_version=0, kv_version=0, finish_reason=FinishReason.ABORT)
            return
        async for chunk in super().generate(request):
            count += len(chunk.token_ids)
            if self.times and count == self.after:
                self.times -= 1
                yield replace(chunk, finish_reason=FinishReason.ABORT)
                return
            yield chunk


async def test_an_unrequested_abort_is_a_failure_with_a_growing_wait() -> None:
    engine = Aborting(after=0, times=10**9)
    driver = driver_of(engine, max_retries=5)
    with pytest.raises(EngineError, match=r"the engine stopped g\d\.\d after 0 tokens without being asked to"):
        await driver.next_batch()
    waited_s = asyncio.get_running_loop().time()
    assert waited_s == pytest.approx(0.1 * (1 + 2 + 4 + 8 + 16), rel=0.2)
    await driver.stop()


@pytest.mark.parametrize("after", [0, 1, 7])
async def test_aborts_that_end_cost_no_token(after: int) -> None:
    engine = Aborting(after=after, times=16)
    driver = driver_of(engine)
    batch = await driver.next_batch()
    assert all(t.num_tokens == 20 and t.finish_reason is FinishReason.LENGTH for t in batch.trajectories)
    await driver.stop()
    counted = driver.ledger.tokens
    assert counted.decoded == counted.trained + counted.live and not counted.wasted


async def test_a_sample_that_rests_after_a_failure_is_stopped_at_once() -> None:
    engine = Aborting(after=0, times=10**9)
    driver = driver_of(engine, max_retries=60)
    waiting = asyncio.create_task(driver.next_batch())
    await asyncio.sleep(100.0)
    before_s = asyncio.get_running_loop().time()
    await driver.stop()
    assert asyncio.get_running_loop().time() - before_s < 0.01
    assert not driver.ledger.running
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


class Empty(FakeEngine):
    """Sends chunks without tokens for ever."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        while True:
            await asyncio.sleep(1.0)
            yield Chunk(token_ids=(), logprobs=(), policy_version=0, kv_version=0)


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


class Lying(FakeEngine):
    """Ends each call with ``reason`` after ``count`` tokens."""

    def __init__(self, reason: FinishReason, count: int) -> None:
        super().__init__(lambda _: 10**6)
        self.reason, self.count = reason, count

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        ids, logprobs = (1,) * self.count, (-1.0,) * self.count
        yield Chunk(token_ids=ids, logprobs=logprobs, policy_version=0, kv_version=0, finish_reason=self.reason)


@pytest.mark.parametrize(
    ("reason", "count", "complaint"),
    [
        (FinishReason.STOP, 0, "reached a stop token, but sent no token"),
        (FinishReason.LENGTH, 3, "for its length after 3 tokens"),
        (FinishReason.LENGTH, 0, "for its length after 0 tokens"),
    ],
)
async def test_an_end_that_cannot_be_true_is_a_failure_and_no_trajectory(
    reason: FinishReason, count: int, complaint: str
) -> None:
    engine = Lying(reason, count)
    driver = driver_of(engine)
    with pytest.raises(EngineError, match=complaint):
        await driver.next_batch()
    await driver.stop()
    assert len(engine.requests) <= 40
    with pytest.raises(EngineError, match=complaint):
        async for _ in complete(engine, request("b", max_new_tokens=20)):
            pass


# -- one whole response -------------------------------------------------------------------------------------


async def completed(engine: FakeEngine, **settings: Any) -> list[Chunk]:
    return [chunk async for chunk in complete(engine, request("a", max_new_tokens=20), **settings)]


async def test_a_response_stopped_again_and_again_is_given_up() -> None:
    engine = Aborting(after=0, times=10**9)
    with pytest.raises(EngineError, match=r"the engine stopped a#0.* after 0 tokens without being asked to"):
        await completed(engine)
    assert asyncio.get_running_loop().time() == pytest.approx(0.1 + 0.2 + 0.4)
    assert engine.times == 10**9 - 4
    assert len(tokens(await completed(Aborting(after=0, times=3)))) == 20
    assert len(tokens(await completed(Aborting(after=2, times=9)))) == 20


async def test_a_response_of_chunks_without_tokens_is_given_up() -> None:
    with pytest.raises(EngineTimeout, match=r"the engine sent no token of a#0.* for 40 s"):
        await completed(Empty(lambda _: 5), stall_s=40.0)
    assert asyncio.get_running_loop().time() < 4 * 40.0 + 1.0
