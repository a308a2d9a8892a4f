"""A pool of scripted engines: the contract, and what happens when members fail. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.errors import CallDisplaced, ConfigError, EngineError, EngineMismatch
from rollover.types import FinishReason
from rollover.weights.base import WeightSource
from tests.engine.contract import EngineContract, FullEngine, collect, request, tokens, update
from tests.engine.servers.pool.kit import Flaky, pool_of, pool_of_two
from tests.weights.kit import FakeWeights


class Pool(EngineContract):
    in_virtual_time = True
    num_members = 1

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with pool_of(*(Flaky(f"e{i}") for i in range(self.num_members))) as pool:
            yield pool

    def new_weights(self, version: int) -> WeightSource:
        return FakeWeights(version)

    def bad_weights(self) -> WeightSource:
        return FakeWeights(1, fit=False)


class TestAPoolOfOneKeepsTheContract(Pool):
    pass


class TestAPoolOfThreeKeepsTheContract(Pool):
    num_members = 3


async def test_the_pool_can_what_all_can_and_has_the_room_of_healthy_members() -> None:
    one, two = Flaky("one", max_running=4, max_context_tokens=500), Flaky("two", max_running=8)
    async with pool_of(one, two) as pool:
        assert pool.capabilities.max_running == 12
        assert pool.capabilities.max_context_tokens == 500
        assert pool.capabilities.in_flight_update
        assert pool.capabilities.prefill_tokens_per_iteration == 2 * one.capabilities.prefill_tokens_per_iteration
        assert not pool.capabilities.keeps_kv_on_abort  # a sample may be resumed by another member
        two.failing = "ill"
        await pool.pause()
        await pool.resume()
        assert pool.capabilities.max_running == 4


@pytest.mark.parametrize("how", ["failing", "hanging"])
async def test_a_call_of_a_failing_member_goes_on_elsewhere(how: str) -> None:
    async with pool_of_two() as (one, two, pool):
        stream = pool.generate(request("a", max_new_tokens=400))
        head = [await anext(stream) for _ in range(5)]
        ill, well = (one, two) if one.requests else (two, one)
        setattr(ill, how, "500" if how == "failing" else True)
        with pytest.raises(EngineError, match=ill.name):
            async for chunk in stream:
                head.append(chunk)
        prefix = tokens(head)
        rest = await collect(pool, request("a", call=1, max_new_tokens=400, response_ids=prefix))
        assert len(prefix + tokens(rest)) == 400
        assert well.requests[-1].response_ids == prefix


async def test_a_member_comes_back_only_with_the_weights_of_the_pool() -> None:
    async with pool_of_two() as (one, two, pool):
        two.failing = "ill"
        await asyncio.sleep(30.0)
        for version in (1, 2):
            await update(pool, FakeWeights(version))
        assert (one.version, two.version) == (2, 0)
        two.failing = None
        await asyncio.sleep(40.0)
        assert two.version == 2
        assert two.num_revivals > 0
        chunks = await asyncio.gather(*(collect(pool, request(f"r{i}", prompt_ids=(i + 1,))) for i in range(8)))
        assert {c.policy_version for call in chunks for c in call} == {2}
        assert two.requests and one.requests


@pytest.mark.parametrize("slow", ["revival_s", "probe_s"])
async def test_a_member_whose_return_takes_longer_than_the_pool_is_awake_comes_back(slow: str) -> None:
    class Starting(Flaky):
        async def revive(self) -> None:
            await super().revive()
            self.failing, self.revival_s = None, 0.0

    two = Starting("two")
    two.failing = "dead"
    setattr(two, slow, 60.0)
    async with pool_of(Flaky("one"), two, rejoin_max_interval_s=1.0) as pool:
        for version in range(1, 4):
            await asyncio.sleep(20.0)
            await pool.sleep()
            await update(pool, FakeWeights(version))
        assert pool.capabilities.max_running == 128 and (two.num_revivals, two.version) == (1, 3)


async def test_the_turn_of_the_trainer_waits_once_for_a_start_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    class Hanging(Flaky):
        async def revive(self) -> None:
            await super().revive()
            if self.failing is not None:
                raise EngineError("it did not start")

    two, waits_s = Hanging("two"), []
    two.failing, two.revival_s = "dead", 900.0
    async with pool_of(Flaky("one"), two) as pool:
        for version in range(1, 7):
            if version == 4:
                two.failing, two.revival_s = None, 0.0
            if version == 5:
                two.failing, two.revival_s = "dead again", 900.0
            await asyncio.sleep(120.0)
            began_s = asyncio.get_running_loop().time()
            await pool.sleep()
            waits_s.append(asyncio.get_running_loop().time() - began_s)
            await update(pool, FakeWeights(version))
    assert [wait_s > 700.0 for wait_s in waits_s] == [True, False, False, False, True, False]
    assert sum(waits_s[1:4] + waits_s[5:]) == 0.0
    assert caplog.text.count("waits once for the return of two (engine.launch_timeout_s)") == 2


async def test_a_member_under_suspicion_during_an_update_gets_the_weights_too() -> None:
    one, two = Flaky("one"), Flaky("two")
    one.probe_s = two.probe_s = 0.5
    async with pool_of(one, two) as pool:
        call = asyncio.create_task(collect(pool, request("a", max_new_tokens=1000)))
        await asyncio.sleep(0.05)
        suspect = one if one.requests else two
        suspect.fail(EngineError("a passing failure"))
        await asyncio.gather(call, return_exceptions=True)
        await update(pool, FakeWeights(1))
        assert (one.version, two.version) == (1, 1)
        assert [event for event, _ in suspect.events] == ["pause", "load", "resume"]
        assert pool.capabilities.max_running == 64, "it gets no calls before it is probed"
        await asyncio.sleep(1.0)
        assert pool.capabilities.max_running == 128


async def test_weights_refused_by_some_take_them_out_refused_by_all_do_nothing() -> None:
    async with pool_of_two() as (_, two, pool):
        await pool.pause()
        with pytest.raises(EngineError, match=r"no engine took weights version 1: .*do not fit"):
            await pool.load(1, FakeWeights(1, fit=False))
        await pool.resume()
        assert pool.capabilities.max_running == 128 and pool.stats().policy_version == 0
        await pool.pause()
        two.failing = "disk full"
        await pool.load(1, FakeWeights(1))
        two.failing = None
        await pool.resume()
        assert pool.capabilities.max_running == 64 and pool.stats().policy_version == 1
        await asyncio.sleep(5.0)
        assert two.version == 1 and pool.capabilities.max_running == 128


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ConfigError("a node does not see the model")])
async def test_a_failed_start_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of_two() as (_, two, pool):
        real, tried = two.revive, []

        async def revive() -> None:
            tried.append(1)
            if len(tried) == 1:
                raise error
            await real()

        monkeypatch.setattr(two, "revive", revive)
        two.failing = "ill"
        await asyncio.sleep(30.0)
        two.failing = None
        await asyncio.sleep(40.0)
        assert len(tried) > 1 and pool.capabilities.max_running == 128


async def test_when_all_are_down_calls_wait_and_then_fail_naming_each() -> None:
    async with pool_of_two(all_down_timeout_s=20.0) as (one, two, pool):
        one.failing, two.failing = "out of memory", "no route"
        for i in range(4):
            with pytest.raises(EngineError):
                await collect(pool, request(f"w{i}", prompt_ids=(i + 1,)))
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match=r"for 20 s .*: one: one: out of memory; two: two: no route$"):
            await collect(pool, request("late"))
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(20.0)
        with pytest.raises(EngineError, match=r"no engine could be paused; one: .*; two: "):
            await pool.pause()
        waiting = asyncio.create_task(collect(pool, request("saved")))
        await asyncio.sleep(1.0)
        one.failing = None
        assert len(tokens(await waiting)) == 12


async def test_a_server_that_starts_again_is_waited_for_as_at_its_first_start() -> None:
    one = Flaky("one")
    async with pool_of(one, all_down_timeout_s=20.0, launch_timeout_s=300.0) as pool:
        one.failing, one.revival_s = "killed", 250.0
        with pytest.raises(EngineError):
            await collect(pool, request("a"))
        one.failing = None
        assert len(tokens(await collect(pool, request("waits")))) == 12
        one.failing, one.revival_s = "killed", 1000.0
        with pytest.raises(EngineError):
            await collect(pool, request("b"))
        with pytest.raises(EngineError, match=r"for 300 s \(engine\.launch_timeout_s\): one: one: killed"):
            await collect(pool, request("late"))


async def test_a_member_that_stops_each_call_unasked_is_taken_out(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Flaky("one"), Flaky("two")
    two.stopping = True
    async with pool_of(one, two) as pool:

        async def went_to_two(phase: str) -> int:
            before = len(two.requests)
            for i in range(40):
                names = {f"{phase} {i}.{j}.": (len(phase), i + 1, j + 1) for j in range(4)}
                calls = (collect(pool, request(name, prompt_ids=ids)) for name, ids in names.items())
                await asyncio.gather(*calls, return_exceptions=True)
                await asyncio.sleep(1.0)
            return len(two.requests) - before

        assert await went_to_two("stopping") < 40
        assert caplog.records[0].getMessage().startswith("two is taken out: it has ended 5 calls in a row without")
        two.stopping = False
        assert await went_to_two("well") > 60


async def test_a_member_whose_calls_are_aborted_because_somebody_asks_stays() -> None:
    async with pool_of(Flaky("one")) as pool:
        for i in range(20):
            call = asyncio.create_task(collect(pool, request(f"r{i}", max_new_tokens=1000)))
            await asyncio.sleep(0.05)
            await pool.abort([f"r{i}#0"])
            assert (await call)[-1].finish_reason is FinishReason.ABORT
        assert pool.capabilities.max_running == 64


async def test_a_closed_call_leaves_nothing_behind_and_an_abort_waits_for_its_member() -> None:
    one, asked = Flaky("one"), []

    async def abort(request_ids: list[str]) -> None:
        asked.append(request_ids)

    async with pool_of(one) as pool:
        for i in range(3):
            async with aclosing(pool.generate(request(f"r{i}", max_new_tokens=1000))) as chunks:  # type: ignore[type-var]
                await anext(chunks)
        one.abort = abort  # type: ignore[assignment]
        await pool.abort(["r1#0"])
        assert asked == [["r1#0"]]
        assert {name: len(held) for name, held in vars(pool).items() if isinstance(held, dict)} == {"_calls": 0}


async def test_a_call_that_waits_for_a_member_can_be_aborted() -> None:
    one = Flaky("one")
    async with pool_of(one, all_down_timeout_s=50.0) as pool:
        one.failing = "ill"
        with pytest.raises(EngineError):
            await collect(pool, request("a"))
        waiting = asyncio.create_task(collect(pool, request("b")))
        await asyncio.sleep(0.1)
        await pool.abort(["b#0"])
        assert [(c.token_ids, c.finish_reason) for c in await waiting] == [((), FinishReason.ABORT)]


async def test_calls_wait_for_room_in_their_order_and_a_call_that_waits_is_aborted_at_once() -> None:
    one, two = Flaky("one", max_running=1), Flaky("two", max_running=1)
    two.failing = "ill"
    async with pool_of(one, two, health_interval_s=0.01) as pool:
        await asyncio.sleep(0.1)
        calls = [asyncio.create_task(collect(pool, request(name, max_new_tokens=500))) for name in "abcdef"]
        await asyncio.sleep(0.1)
        await pool.abort(["d#0"])
        calls[4].cancel()
        await asyncio.wait(calls[3:5])
        assert calls[3].result()[-1].finish_reason is FinishReason.ABORT
        await update(pool, FakeWeights(1))  # waits for none of them
        assert [each.request_id for each in one.requests] == ["a#0"] and not two.requests
        two.failing = None
        await asyncio.sleep(2.0)
        assert [each.request_id for each in two.requests] == ["b#0"]
        two.failing = "ill"
        await asyncio.wait(calls)
        assert [each.request_id for each in one.requests] == ["a#0", "c#0", "f#0"]
        assert all(calls[i].result()[-1].finish_reason is FinishReason.LENGTH for i in (0, 2, 5))


async def test_calls_that_wait_for_room_wait_no_longer_than_others_once_all_are_out() -> None:
    one = Flaky("one", max_running=1)
    async with pool_of(one, all_down_timeout_s=50.0, launch_timeout_s=50.0) as pool:
        calls = [asyncio.create_task(collect(pool, request(name, max_new_tokens=500))) for name in "abc"]
        await asyncio.sleep(0.1)
        one.failing, began_s = "ill", asyncio.get_running_loop().time()
        await asyncio.wait(calls)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(50.0, abs=1.0)
        assert all("no engine has been up for 50 s" in str(call.exception()) for call in calls[1:])


async def test_an_abort_reaches_all_members_without_waiting_for_a_hung_one() -> None:
    members = [Flaky(f"e{i}") for i in range(3)]
    async with pool_of(*members) as pool:
        calls = [
            asyncio.create_task(collect(pool, request(f"r{i}", max_new_tokens=1000, prompt_ids=(i + 1,))))
            for i in range(6)
        ]
        await asyncio.sleep(0.05)
        members[1].hanging = True
        await pool.abort([f"r{i}#0" for i in range(6)])
        ends = await asyncio.gather(*calls, return_exceptions=True)
        aborted = [e for e in ends if not isinstance(e, BaseException)]
        assert len(aborted) == 4
        assert all(chunks[-1].finish_reason is FinishReason.ABORT for chunks in aborted)
        assert sum(isinstance(e, EngineError) for e in ends) == 2


# -- which members are trusted ------------------------------------------------------------------------------------


class Prover:
    """Finds a mismatch with the members named in ``liars``, each time; ``asked`` holds whom, and for which version, and
    ``new`` who was not known or is to draw."""

    def __init__(self, *liars: str) -> None:
        self.liars = {*liars}
        self.asked: list[tuple[str, int]] = []
        self.new: list[str] = []

    async def __call__(self, engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        self.asked.append((repr(engine), version))
        self.new += [repr(engine)] if draws or not is_known else []
        assert len(await collect(engine, request(f"proof{len(self.asked)}", max_new_tokens=1))) > 0
        if repr(engine) in self.liars:
            raise EngineMismatch(f"{engine!r} is 0.5 nats off")


async def test_each_member_proves_itself_and_those_that_fail_are_taken_out(caplog: pytest.LogCaptureFixture) -> None:
    members = [Flaky(f"e{i}") for i in range(3)]
    async with pool_of(*members) as pool:
        pool.check_logprobs_with(prover := Prover("e2"))
        await update(pool, FakeWeights(1))
        failed = await pool.check_logprobs()
        assert sorted(prover.asked) == [("e0", 1), ("e1", 1), ("e2", 1)]
        assert {name: str(e) for name, e in failed.items()} == {"e2": "e2 is 0.5 nats off"}
        assert pool.capabilities.max_running == 128
        await asyncio.sleep(100.0)
        assert pool.capabilities.max_running == 128 and prover.asked.count(("e2", 1)) > 3, "it is asked again"
        warnings = [r.getMessage() for r in caplog.records if "e2" in r.getMessage()]
        assert warnings == ["e2 is taken out: e2 is 0.5 nats off"], "and once is enough to say so"
        prover.liars.clear()
        await asyncio.sleep(40.0)
        assert pool.capabilities.max_running == 192


async def test_a_strict_proof_takes_nobody_out_and_names_the_first_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(Flaky("one"), Flaky("two")) as pool:
        pool.check_logprobs_with(Prover("two"))
        with pytest.raises(EngineMismatch, match=r"^two is 0\.5 nats off$"):
            await pool.check_logprobs(strict=True)
        assert pool.capabilities.max_running == 128 and not caplog.records


async def test_when_no_member_proves_itself_all_are_named() -> None:
    async with pool_of(Flaky("one"), Flaky("two")) as pool:
        pool.check_logprobs_with(Prover("one", "two"))
        with pytest.raises(EngineMismatch, match=r"weights version 0: one is 0\.5 nats off; two is 0\.5 nats off"):
            await pool.check_logprobs()


async def test_a_member_is_known_once_it_has_passed_until_it_was_away() -> None:
    async with pool_of_two() as (_, two, pool):
        pool.check_logprobs_with(prover := Prover())
        for version in (1, 2):
            await update(pool, FakeWeights(version))
            await pool.check_logprobs()
        assert len(prover.asked) == 4 and sorted(prover.new) == ["one", "two"]
        two.failing = "ill"
        await asyncio.sleep(30.0)
        two.failing = None
        await asyncio.sleep(40.0)
        assert pool.capabilities.max_running == 128 and sorted(prover.new) == ["one", "two", "two"]


async def test_a_hanging_member_does_not_hold_up_the_proof_of_the_others() -> None:
    async with pool_of_two() as (_, two, pool):
        pool.check_logprobs_with(Prover())
        two.hanging = True
        start_s = asyncio.get_running_loop().time()
        failed = await pool.check_logprobs()
        assert failed.keys() == {"two"}
        assert asyncio.get_running_loop().time() - start_s < 9.0


async def test_a_known_member_that_answers_probes_alone_is_left_after_a_deadline() -> None:
    async with pool_of_two(first_token_timeout_s=6.0) as (_, two, pool):

        async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
            if engine is two and is_known:
                await asyncio.get_running_loop().create_future()

        pool.check_logprobs_with(check)  # type: ignore[arg-type]
        assert await pool.check_logprobs() == {}
        failed = await pool.check_logprobs()
        assert str(failed["two"]) == "two did not answer the log-prob check within 6 s"
        assert pool.capabilities.max_running == 64


async def test_a_call_that_is_stopped_for_others_is_no_fault_of_its_member() -> None:
    class Stops(Flaky):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            raise CallDisplaced("one had to stop all its calls")
            yield

    async with pool_of(Stops("one")) as pool:
        for number in range(6):
            with pytest.raises(CallDisplaced):
                await collect(pool, request(f"r{number}"))
            assert pool._members.all[0].is_up


async def test_each_chunk_names_the_member_that_sampled_it() -> None:
    async with pool_of_two() as (one, two, pool):
        calls = await asyncio.gather(*(collect(pool, request(f"r{i}", prompt_ids=(i + 1,))) for i in range(8)))
        for member in (one, two):
            prompts = {r.prompt_ids for r in member.requests}
            assert prompts
            for i, chunks in enumerate(calls):
                if (i + 1,) in prompts:
                    assert {c.engine for c in chunks} == {member.name}


async def test_a_distrusted_member_loses_its_calls_and_never_comes_back() -> None:
    async with pool_of_two() as (_, two, pool):
        calls = [
            asyncio.create_task(collect(pool, request(f"r{i}", max_new_tokens=500, prompt_ids=(i + 1,))))
            for i in range(4)
        ]
        await asyncio.sleep(0.05)
        pool.distrust("two", "it lies")
        pool.distrust("three", "nobody knows it")
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(str(e) for e in ends if isinstance(e, EngineError)) == ["two was taken out: it lies"] * 2
        await update(pool, FakeWeights(1))
        await asyncio.sleep(200.0)
        assert (two.num_revivals, two.version) == (0, 0)
        assert pool.capabilities.max_running == 64
        with pytest.raises(EngineMismatch, match=r"no engine is left .*: one: it lies, too; two: it lies$"):
            pool.distrust("one", "it lies, too")


async def test_a_member_distrusted_while_it_comes_back_stays_out() -> None:
    async with pool_of_two() as (_, two, pool):
        two.failing = "ill"
        await asyncio.sleep(30.0)
        two.failing, two.probe_s = None, 5.0
        before = two.num_revivals
        while two.num_revivals == before:
            await asyncio.sleep(0.5)
        pool.distrust("two", "it lies")
        await asyncio.sleep(100.0)
        assert pool.capabilities.max_running == 64 and two.num_revivals == before + 1
