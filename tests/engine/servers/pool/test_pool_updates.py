"""New weights for a pool whose members hang, die or are left alone: the others go on, and nobody stands still for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.publisher import Publisher
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, tokens
from tests.engine.servers.pool.kit import Flaky, Fleet, pool_of, pool_of_two
from tests.engine.servers.scripted_server import Answer
from tests.engine.servers.vllm import kit as vllm_kit
from tests.weights.kit import FakeWeights


def now_s() -> float:
    return asyncio.get_running_loop().time()


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@pytest.mark.parametrize(("call", "limit_s"), [("pause", 20.0), ("load", 50.0), ("resume", 20.0)])
async def test_a_hung_member_is_out_at_a_deadline(call: str, limit_s: float, caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of_two(control_timeout_s=5.0, abort_timeout_s=5.0, load_timeout_s=30.0) as (one, two, pool):
        calls = [asyncio.create_task(collect(pool, request(f"r{i}", prompt_ids=(i + 1,)))) for i in range(8)]
        await asyncio.sleep(0.02)
        two.hanging_in = {call}
        started_s = now_s()
        await Publisher(pool, timeout_s=1000.0).publish(FakeWeights(1))
        assert now_s() - started_s == pytest.approx(limit_s, abs=0.1)
        assert (one.version, pool.stats().policy_version) == (1, 1)
        assert pool.capabilities.max_running == 64
        assert len(tokens(await collect(pool, request("new")))) == 12
        (line,) = lines(caplog, "two is taken out")
        assert f"within {limit_s:g} s" in line
        await asyncio.gather(*calls, return_exceptions=True)
        two.hanging_in = set()
        await asyncio.sleep(60.0)
        assert two.version == 1 and pool.capabilities.max_running == 128


async def test_a_silent_member_is_found_by_its_probes_during_an_update() -> None:
    async with pool_of_two(control_timeout_s=75.0) as (one, two, pool):
        two.hanging = True
        started_s = now_s()
        await Publisher(pool, timeout_s=1000.0).publish(FakeWeights(1))
        assert now_s() - started_s < 10.0  # two probes, 2 s apart, of 1 s each
        assert one.version == 1 and two.version == 0


async def test_when_all_hang_in_a_load_the_run_waits_for_one_to_return() -> None:
    async with pool_of_two(control_timeout_s=5.0, load_timeout_s=25.0, all_down_timeout_s=500.0) as (one, two, pool):
        one.hanging_in = two.hanging_in = {"load"}
        await Publisher(pool, timeout_s=1000.0).publish(FakeWeights(1))
        call = asyncio.create_task(collect(pool, request("a")))
        await asyncio.sleep(30.0)
        assert not call.done()
        two.hanging_in = set()
        assert {chunk.policy_version for chunk in await call} == {1}


async def test_a_pause_waits_for_a_member_when_all_are_out() -> None:
    one = Flaky("one")
    async with pool_of(one, all_down_timeout_s=100.0) as pool:
        one.failing = "ill"
        await asyncio.sleep(30.0)
        publishing = asyncio.create_task(Publisher(pool).publish(FakeWeights(1)))
        await asyncio.sleep(30.0)
        assert not publishing.done()
        one.failing = None
        await publishing
        assert one.version == 1
        one.failing = "ill"
        await asyncio.sleep(30.0)
        with pytest.raises(EngineError, match="no engine could be paused; one: one: ill"):
            await Publisher(pool).publish(FakeWeights(2))


async def test_waiting_for_any_engine_is_reported_at_its_start_and_end(caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of_two(all_down_timeout_s=500.0) as (one, two, pool):
        for _ in range(2):
            caplog.clear()
            one.failing = two.failing = "power cut"
            await asyncio.sleep(30.0)
            calls = [asyncio.create_task(collect(pool, request(f"{now_s()}/{i}"))) for i in range(50)]
            await asyncio.sleep(60.0)
            assert lines(caplog, "no engine is up") == [
                "no engine is up: waiting up to 500 s for one (engine.all_down_timeout_s), or 900 s if one is started"
                " again (engine.launch_timeout_s)"
            ]
            one.failing = two.failing = None
            await asyncio.gather(*calls)
            await asyncio.sleep(30.0)
            assert len(lines(caplog, "no engine is up")) == 1
            (end,) = lines(caplog, "without any engine")
            assert float(end.split(" up after ")[1].split()[0]) >= 60.0


@pytest.fixture
def fleet(kind: ModuleType, folder: Path) -> Fleet:
    return Fleet(kind, folder, token_timeout_s=3.0, first_token_timeout_s=6.0)


def hang_in_load(fleet: Fleet) -> asyncio.Event:
    """The second server accepts the call for new weights and does not answer before the event is set."""
    server, go_on = fleet.servers[1], asyncio.Event()
    name = f"_post{server.load_path.replace('/', '_')}"
    load = getattr(server, name)

    async def hanging(query: dict[str, str], body: Any) -> Answer:
        await go_on.wait()
        answer: Answer = await load(query, body)
        return answer

    setattr(server, name, hanging)
    return go_on


async def test_a_hung_load_costs_its_deadline_alone(fleet: Fleet, new: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet:
        well, hung = fleet.servers
        go_on = hang_in_load(fleet)
        started_s = now_s()
        await Publisher(fleet.pool, timeout_s=1000.0).publish(FolderWeights(1, new))
        assert now_s() - started_s == pytest.approx(40.0, abs=1.0)
        (line,) = lines(caplog, "is taken out")
        assert line.startswith("http://s1 is taken out: http://s1 did not answer POST /") and "within 40 s" in line
        assert (well.weights, well.paused) == (str(new), False)
        chunks = await collect(fleet.pool, request("a"))
        assert {chunk.policy_version for chunk in chunks} == {1}
        go_on.set()
        await asyncio.sleep(120.0)
        assert (hung.weights, hung.paused) == (str(new), False)
        assert len(lines(caplog, "http://s1 is back with weights version 1")) == 1


async def test_a_cancelled_publication_leaves_no_server_standing_still(fleet: Fleet, new: Path) -> None:
    async with fleet:
        hang_in_load(fleet)
        publishing = asyncio.create_task(Publisher(fleet.pool).publish(FolderWeights(1, new)))
        await asyncio.sleep(5.0)
        assert [server.paused for server in fleet.servers] == [True, True]
        started_s = now_s()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
    assert now_s() - started_s < 10.0
    assert [server.paused for server in fleet.servers] == [False, False]


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_pool_closed_during_an_update_resumes_what_it_paused(fleet: Fleet, frozen: bool) -> None:
    async with fleet:
        await fleet.pool.pause()
        if frozen:
            fleet.servers[1].freeze()
        started_s = now_s()
    assert now_s() - started_s <= 2 * 4.0 + 0.5
    assert [server.paused for server in fleet.servers] == [False, frozen]
    fleet.servers[1].thaw()


async def test_a_lost_server_is_one_line_for_all_of_its_calls(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet:
        caplog.clear()
        calls = [
            asyncio.create_task(collect(fleet.pool, request(f"r{i}", prompt_ids=(i + 1,), max_new_tokens=400)))
            for i in range(40)
        ]
        await asyncio.sleep(0.5)
        fleet.servers[1].freeze()
        await asyncio.sleep(0.5)
        await fleet.pool.abort([f"r{i}#0" for i in range(40)])
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(20.0)
        fleet.servers[1].thaw()
        assert 1 <= len(caplog.records) <= 2, [record.getMessage() for record in caplog.records]


async def test_who_decodes_nothing_is_left_out_until_it_decodes(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    async def ends(call: int) -> list[Any]:
        calls = (collect(fleet.pool, request(f"r{i}", call=call, prompt_ids=(i + 1,))) for i in range(4))
        return await asyncio.gather(*calls, return_exceptions=True)

    async with fleet:
        fleet.servers[1].is_wedged = True
        started_s = now_s()
        failed = [end for end in await ends(0) if isinstance(end, BaseException)]
        assert now_s() - started_s < 10.0
        assert len(failed) == 2 and all(isinstance(end, EngineTimeout) for end in failed), failed
        await asyncio.sleep(10.0)
        assert len(lines(caplog, "http://s1 is taken out")) == 1
        assert {chunk.engine for chunks in await ends(1) for chunk in chunks} == {"http://s0"}
        fleet.servers[1].is_wedged = False
        await asyncio.sleep(120.0)
        assert len(lines(caplog, "http://s1 is back with weights version 0")) == 1


async def test_a_server_that_ignores_a_pause_is_not_waited_for_for_ever(folder: Path) -> None:
    server = vllm_kit.Server()
    async with vllm_kit.opened(server, folder, control_timeout_s=5.0) as engine:
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=500)))
        await asyncio.sleep(0.2)
        server.tick_s = 0.1
        deaf = AsyncMock(return_value=Answer(body={"status": "paused"}))
        server._post_pause = deaf  # type: ignore[method-assign]
        with pytest.raises(EngineTimeout, match="still samples 5 s after it was paused"):
            await engine.pause()
        await engine.resume()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
