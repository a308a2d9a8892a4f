"""The driver among failures and races, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import WasteCause
from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import CallDisplaced, DataError, EngineError, EngineTimeout, NoReward, ResourceError, RewardError
from rollover.rollout.config import Limits
from rollover.rollout.events import (
    BatchConsumed,
    Event,
    GroupDropped,
    SampleFailed,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.journal import Journal
from rollover.rollout.ledger import Ledger
from rollover.types import FinishReason, Prompt, SampleId, Trajectory
from tests.engine.fake import FakeEngine
from tests.rollout.kit import (
    NAMES,
    ON_FULL,
    ParityScorer,
    Prompts,
    assert_exact,
    assert_trainable,
    lognormal,
    make_rig,
    play,
    with_stop,
)
from tests.virtual_time import VirtualClock, run

FIRST = SampleId(0, 0)


def of(sample: str, special: int, others: int = 4) -> Callable[[GenerateRequest], int]:
    """Response lengths: ``special`` for samples whose key starts with ``sample``."""
    return lambda request: special if request.sample_key.startswith(sample) else others


def make_engine(cls: type[FakeEngine] = FakeEngine, **kwargs: Any) -> Any:
    defaults: dict[str, Any] = {"length": lognormal(6, 1.0), "auto": True, "clock": VirtualClock()}
    return cls(**(defaults | kwargs))


@pytest.mark.parametrize("name", ["sync", "rollover"])
async def test_no_more_calls_are_open_than_the_engine_has_room_for_at_present(name: str) -> None:
    """It has less while one of its servers is out."""
    started: list[tuple[int, int]] = []

    def watch(event: Event) -> None:
        if isinstance(event, SampleStarted):
            started.append((rig.engine.capabilities.max_running, len(rig.ledger.running)))

    rig = make_rig(name, max_running=6, rollout_batch_size=8, observer=watch, watched=False)
    training = asyncio.create_task(with_stop(rig, rig.train(2)))
    for room in (6, 2, 6):
        rig.engine.capabilities = replace(rig.engine.capabilities, max_running=room)
        if room == 2:
            rig.engine.fail(EngineError("a server died"))
        await asyncio.sleep(9.0)
    await training
    for room in (2, 6):
        assert max(running for at_present, running in started if at_present == room) == room


# -- rewards ------------------------------------------------------------------------------------------------


class SelectiveScorer(ParityScorer):
    """For some samples there is another outcome: an error, a reward, or what an async function does."""

    def __init__(self, special: Callable[[SampleId], bool], outcome: Any) -> None:
        super().__init__()
        self.special, self.outcome = special, outcome

    async def score(self, trajectory: Trajectory) -> float:
        if not self.special(trajectory.sample_id):
            return await super().score(trajectory)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return await self.outcome() if callable(self.outcome) else self.outcome  # type: ignore[no-any-return]


def first_is(outcome: Any) -> SelectiveScorer:
    return SelectiveScorer(lambda sample_id: sample_id == FIRST, outcome)


BREAKS, DOES_NOT_APPLY = ZeroDivisionError("no steps to divide by"), NoReward("f returned None")


async def never() -> float:
    return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (BREAKS, WasteCause.FAILED, "ZeroDivisionError: no steps to divide by"),
        (RewardError(""), WasteCause.FAILED, ""),
        (asyncio.CancelledError(), WasteCause.FAILED, "the scorer cancelled it"),
        (DOES_NOT_APPLY, WasteCause.NO_REWARD, "f returned None"),
    ],
)
def test_a_failing_reward_fails_its_sample_alone(error: BaseException, cause: WasteCause, reason: str) -> None:
    rig, batches = play(2, "sync", scorer=first_is(error), group_size=3)
    [failure] = [e for e in rig.events if isinstance(e, SampleFailed)]
    assert (failure.sample_id, failure.cause, failure.reason) == (FIRST, cause, reason)
    group = next(g for b in batches.values() for g in b.groups if g.group_id == 0)
    assert [t.sample_id.index for t in group.trajectories] == [1, 2]
    assert rig.ledger.tokens.wasted[cause] > 0 and rig.ledger.num_failed == (cause is WasteCause.FAILED)
    rig, batches = play(1, "sync", scorer=first_is(error))
    assert [g.group_id for g in batches[0].groups] == [1, 2], "a lone sibling has nothing to be compared with"
    (drop,) = (e for e in rig.events if isinstance(e, GroupDropped))
    assert (drop.group_id, drop.cause, drop.prompt_returned) == (0, cause, False)


async def test_a_mistake_of_every_sample_ends_the_run_and_can_be_rescored() -> None:
    rig = make_rig("sync", scorer=first_is(DataError("the function returns text")))
    with pytest.raises(DataError, match="the function returns text"):
        await with_stop(rig, rig.train(1))
    assert rig.ledger.num_failed == 0
    assert FIRST in rig.ledger.unscored


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1.1e15, -1e15])
def test_a_reward_that_cannot_be_trained_on_fails_its_sample(reward: float) -> None:
    rig, batches = play(2, "sync", scorer=first_is(reward), group_size=3)
    failures = [(e.sample_id, e.reason) for e in rig.events if isinstance(e, SampleFailed)]
    assert [i for i, _ in failures] == ([] if reward == -1e15 else [FIRST]), "the largest reward is a reward"
    assert all(f"its reward is {reward}: not a finite number" in reason for _, reason in failures)
    assert len(batches) == 2


@pytest.mark.parametrize(
    ("error", "since", "message"),
    [
        (BREAKS, 0, "all failed.*no steps to divide by"),
        (BREAKS, 9, "all failed.*no steps to divide by"),
        (DOES_NOT_APPLY, 0, "have no reward, the last one with: f returned None"),
    ],
)
async def test_the_run_stops_when_every_reward_fails(error: Exception, since: int, message: str) -> None:
    """From the start or from some moment on: two batches' worth of failures in a row, never for ever."""
    rig = make_rig("april", scorer=SelectiveScorer(lambda i: i.group >= since, error))
    with pytest.raises(DataError, match=f"the last 8 samples {message}"):
        await with_stop(rig, rig.train(20))
    assert rig.ledger.num_failed in (range(8, 13) if error is BREAKS else (0,))


def test_a_hung_reward_delays_neither_abort_nor_the_next_steps() -> None:
    rig, batches = play(4, "april", scorer=first_is(never), max_staleness=8)
    free, _ = play(4, "april", max_staleness=8)
    assert set(batches) == {0, 1, 2, 3}
    assert FIRST in rig.ledger.unscored
    ends = [[e.time_s for e in r.events if isinstance(e, BatchConsumed)] for r in (rig, free)]
    assert all(hung <= free + 15 for hung, free in zip(*ends, strict=True)), "as long as its group is missing"


def test_scoring_goes_on_while_the_engine_decodes() -> None:
    """A reward that takes long costs the round its own latency once, not once per sample."""
    slow, _ = play(1, "sync", length=of("g0.0", 30, 3), scorer=ParityScorer(20.0))
    assert [e.time_s for e in slow.events if isinstance(e, BatchConsumed)] == [30 + 20]


async def test_stop_cancels_a_hung_reward_and_a_restart_scores_the_sample() -> None:
    rig = make_rig("sync", scorer=first_is(never))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await rig.driver.next_batch()
    await rig.driver.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert set(rig.ledger.unscored) == {FIRST}
    again = make_rig("sync", state=rig.state)
    batch = await with_stop(again, again.driver.next_batch())
    assert [g.group_id for g in batch.groups] == [0, 1]
    assert not [e for e in again.events if isinstance(e, SampleStarted)]


@pytest.mark.parametrize("where", ["filter", "source", "source in a later turn"])
async def test_a_bug_in_a_background_task_reaches_the_caller(where: str) -> None:
    class Broken(Prompts):
        def prompt(self, index: int) -> Prompt:
            if index >= {"source": 1, "source in a later turn": 5}.get(where, 99):
                raise DataError(f"row {index} cannot be read")
            return super().prompt(index)

    def keep_group(rewards: Any) -> bool:
        if where == "filter":
            raise DataError("row of the filter cannot be read")
        return True

    rig = make_rig("concurrency", num_running=4, source=Broken(), keep_group=keep_group)
    with pytest.raises(DataError, match="cannot be read"):
        await with_stop(rig, rig.train(9))


# -- engine errors ------------------------------------------------------------------------------------------


class FlakyEngine(FakeEngine):
    """Fails calls after some of their tokens. ``faults``: (sample_key, tokens in this call) -> error, once each."""

    def __init__(self, *args: Any, faults: dict[tuple[str, int], EngineError], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults = faults

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        num_tokens = 0
        async for chunk in super().generate(request):
            fault = self.faults.pop((request.sample_key, num_tokens), None)
            if fault is not None:
                raise fault
            num_tokens += len(chunk.token_ids)
            yield chunk


async def test_an_engine_error_keeps_the_prefix_and_the_remaining_budget() -> None:
    faults = {("g0.0.", 7): EngineError("connection lost")}
    engine = make_engine(FlakyEngine, length=of("g0.0", 99, 5), faults=faults)
    rig = make_rig("sync", engine=engine, max_new_tokens=20)
    batches = await with_stop(rig, rig.train(1))
    assert_trainable(batches, rig)
    first, again = [r for r in engine.requests if r.sample_key == "g0.0."]
    sample = batches[0].trajectories[0]
    assert (first.response_ids, again.response_ids) == ((), sample.token_ids[:7])
    assert first.seed == again.seed and first.request_id != again.request_id
    assert sample.num_tokens == 20 and sample.num_resumes == 1


@pytest.mark.parametrize(
    ("error", "max_retries"),
    [
        pytest.param(EngineError("a hiccup"), 1, id="errors with a token in between"),
        pytest.param(CallDisplaced("others do better"), 0, id="others go first"),
    ],
)
async def test_neither_errors_far_apart_nor_displacement_give_up_a_sample(error: EngineError, max_retries: int) -> None:
    faults = {("g0.0.", n): error for n in (1, 2, 3)}
    engine = make_engine(FlakyEngine, length=of("g", 12), faults=faults)
    rig = make_rig("sync", engine=engine, limits=Limits(max_retries=max_retries))
    batches = await with_stop(rig, rig.train(1))
    assert not faults and not rig.ledger.num_failed
    assert batches[0].trajectories[0].num_resumes == 3


class DeadFor(FakeEngine):
    """Refuses every call whose sample key matches."""

    dead: Callable[[str], bool] = staticmethod(lambda key: True)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.dead(request.sample_key):
            raise EngineError(f"no answer for {request.sample_key}")
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize("name", ON_FULL)
@pytest.mark.parametrize("poisoned", [(1,), (0, 1, 2)], ids=["one sample", "its whole group"])
async def test_poisoned_samples_fail_alone(name: str, poisoned: tuple[int, ...]) -> None:
    """Alone in two senses: others go on, and it fails even when nobody else runs."""
    engine = make_engine(DeadFor)
    engine.dead = lambda key: key in {f"g0.{i}." for i in poisoned}
    rig = make_rig(name, engine=engine, group_size=3)
    await with_stop(rig, rig.train(3))
    failures = sorted((e.sample_id, e.reason) for e in rig.events if isinstance(e, SampleFailed))
    assert failures == [(SampleId(0, i), f"no answer for g0.{i}.") for i in poisoned]


@pytest.mark.parametrize("name", ON_FULL)
async def test_a_dead_engine_stops_the_run_and_loses_nothing(name: str) -> None:
    rig = make_rig(name, engine=make_engine(DeadFor))
    with pytest.raises(EngineError, match="no answer for g"):
        await with_stop(rig, rig.driver.next_batch())
    assert not rig.ledger.num_failed and rig.ledger.num_active > 0 and not rig.ledger.running


async def test_an_engine_that_fails_everybody_once_costs_nothing() -> None:
    """Also while it is being stopped, when fewer and fewer calls are open."""
    engine = make_engine(length=of("g0", 9, 30))
    rig = make_rig("april", engine=engine, rollout_batch_size=1, over_sampling_batch_size=12)

    async def blip(after_s: float) -> None:
        await asyncio.sleep(after_s)
        engine.fail(EngineError("restarted"))

    blips = [asyncio.create_task(blip(t)) for t in (4.5, 9.0)]
    batches = await with_stop(rig, rig.train(6))
    await asyncio.gather(*blips)
    assert not rig.ledger.num_failed
    assert_trainable(batches, rig)


class WithoutReasons(FakeEngine):
    """The reason of an end comes in a chunk of its own and is lost."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            yield replace(chunk, finish_reason=None)


@pytest.mark.parametrize(("length", "stop"), [(60, ()), (9, (7,))])
async def test_a_last_token_without_its_reason_is_still_the_last(length: int, stop: tuple[int, ...]) -> None:
    """Nothing is decoded behind the end."""
    engine = make_engine(WithoutReasons, length=of("g", length))
    rig = make_rig("sync", engine=engine, stop_token_ids=stop)
    batches = await with_stop(rig, rig.train(1))
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    for trajectory in batches[0].trajectories:
        assert trajectory.finish_reason is reason
        assert_exact(trajectory, rig.sampling)
    assert len(engine.requests) == 4


# -- aborts -------------------------------------------------------------------------------------------------


class DeafEngine(FakeEngine):
    """Never acknowledges an abort of some calls."""

    deaf_to = ("g2.", "g3.")

    async def abort(self, request_ids: Collection[str]) -> None:
        heard = [
            r.request_id
            for r in self.requests
            if r.request_id in request_ids and not r.sample_key.startswith(self.deaf_to)
        ]
        await super().abort(heard)


async def test_an_abort_without_an_answer_names_whom_it_waits_for() -> None:
    engine = make_engine(DeafEngine, length=of("g2", 9999, 3), tick_s=0.5)
    rig = make_rig(
        "april",
        engine=engine,
        over_sampling_batch_size=3,
        max_new_tokens=4000,
        limits=Limits(abort_timeout_s=30, save_every_tokens=10**6),
    )
    with pytest.raises(EngineTimeout, match=r"the abort of g2\.0, g2\.1 within 30 s"):
        await rig.driver.next_batch()
    await rig.driver.stop()
    rig.ledger.check()
    # what it had streamed until then is kept
    assert not rig.ledger.running and set(rig.ledger.parked) == {SampleId(2, 0), SampleId(2, 1)}
    assert rig.ledger.sample(SampleId(2, 0)).num_tokens >= 60


@pytest.mark.parametrize("then", ["stop", "new weights"])
async def test_calls_started_in_the_same_turn_are_aborted_too(then: str) -> None:
    """New weights let samples start; they are stopped before the loop has turned once."""
    rig = make_rig("bounded_async", max_staleness=0, length=of("g", 50), in_flight_update=False)
    engine = rig.engine
    await rig.driver.next_batch()
    assert not rig.ledger.running
    await rig.publish(1)
    assert len(rig.ledger.running) == 4
    before = asyncio.get_running_loop().time(), engine.decoded_tokens
    if then == "stop":
        await rig.driver.stop()
        assert not rig.ledger.running
    else:
        await rig.publish(1)
        await rig.driver.stop()
    assert (asyncio.get_running_loop().time(), engine.decoded_tokens) == before


@settings(max_examples=25, deadline=None, derandomize=True)
@given(name=st.sampled_from(NAMES), cancel_s=st.floats(0.0, 40.0), stop=st.booleans())
def test_a_cancelled_next_batch_can_be_stopped_and_gone_on_with(name: str, cancel_s: float, stop: bool) -> None:
    async def work() -> None:
        rig = make_rig(name)
        batches = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(cancel_s):
                while True:
                    batch = await rig.driver.next_batch()
                    batches[batch.step] = batch
                    await rig.publish(batch.step + 1)
        if stop:
            await rig.driver.stop()
            rig = make_rig(name, state=rig.state)
        # a step whose weights were never published goes on with the old ones
        goal = rig.ledger.next_step + 3
        if rig.ledger.policy_version < rig.ledger.next_step:
            rig.engine.version = rig.ledger.policy_version
            await rig.publish(rig.ledger.next_step)
        batches |= await with_stop(rig, rig.train(goal))
        assert list(batches) == list(range(goal))
        assert_trainable(batches, rig)

    run(work())


@pytest.mark.parametrize("name", ON_FULL)
async def test_stop_leaves_no_task_behind(name: str) -> None:
    rig = make_rig(name, scorer=ParityScorer(5.0))
    await rig.train(2)
    await rig.driver.stop()
    rig.engine.auto = False
    await asyncio.sleep(0)  # the engine's own task ends
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await rig.driver.stop()  # a second time changes nothing
    assert not rig.ledger.running


# -- weights ------------------------------------------------------------------------------------------------


async def test_new_weights_in_flight_split_segments_and_abort_nothing() -> None:
    rig = make_rig("bounded_async", length=of("g0", 20, 5), max_running=8)
    batches = await with_stop(rig, rig.train(12, train_s=2.0))
    long = next(t for b in batches.values() for t in b.trajectories if t.sample_id == FIRST)
    assert [s.finish_reason for s in long.segments] == [None] * (len(long.segments) - 1) + [FinishReason.STOP]
    assert len(long.segments) > 2 and long.num_resumes == 0
    assert [s.policy_version for s in long.segments] == sorted({s.policy_version for s in long.segments})
    assert {s.kv_version for s in long.segments} == {0}
    assert_trainable(batches, rig)
    published = [e.time_s for e in rig.events if isinstance(e, VersionPublished)]
    aborts = [
        e
        for e in rig.events
        if isinstance(e, SegmentEnded) and e.segment.finish_reason is FinishReason.ABORT and e.time_s < published[-1]
    ]
    assert not aborts


async def test_a_failed_load_leaves_the_driver_as_it_was() -> None:
    rig = make_rig("bounded_async", in_flight_update=False)
    await rig.driver.next_batch()
    with pytest.raises(EngineError):
        await rig.driver.update_weights(1, AsyncMock(side_effect=EngineError("weights do not fit")))
    assert rig.ledger.policy_version == 0
    await rig.publish(1)
    assert rig.ledger.running  # generation goes on beside the trainer, as before
    assert_trainable(await with_stop(rig, rig.train(3)), rig)


async def test_an_engine_that_is_down_costs_one_sample_when_they_run_one_by_one() -> None:
    rig = make_rig("sync", engine=make_engine(DeadFor, max_running=1))
    with pytest.raises(EngineError, match=r"no answer for g0\.1\."):
        await rig.driver.next_batch()
    assert [e.sample_id for e in rig.events if isinstance(e, SampleFailed)] == [SampleId(0, 0)]
    await rig.driver.stop()


# -- deadlines ----------------------------------------------------------------------------------------------


class SilentEngine(FakeEngine):
    """Accepts calls and decodes nothing; an abort works."""

    async def _run(self) -> None:
        return


@pytest.mark.parametrize("name", ON_FULL)
async def test_a_stall_names_the_samples_it_waits_for(name: str) -> None:
    rig = make_rig(name, engine=make_engine(SilentEngine, max_running=3), limits=Limits(stall_timeout_s=7))
    with pytest.raises(EngineTimeout, match=r"for 7 s .*3 samples decoding: g0\.0, g0\.1, g1\.0;"):
        await rig.driver.next_batch()
    assert asyncio.get_running_loop().time() == 7.0
    await rig.driver.stop()
    assert len(rig.ledger.waiting) == rig.ledger.num_active and not rig.ledger.running


def test_slow_is_not_stalled() -> None:
    """The limit is on silence, not on the length of a round."""
    rig, _ = play(1, "sync", length=of("g", 50), limits=Limits(stall_timeout_s=2))
    assert rig.events[-1].time_s == 50


async def test_a_scorer_deaf_to_cancellation_does_not_hold_up_stop() -> None:
    async def deaf() -> float:
        while True:
            try:
                await asyncio.sleep(10**6)
                return 0.0
            except asyncio.CancelledError:
                continue

    rig = make_rig("april", scorer=first_is(deaf), max_staleness=9, limits=Limits(abort_timeout_s=5))
    await rig.train(2)
    before = asyncio.get_running_loop().time()
    await rig.driver.stop()
    assert asyncio.get_running_loop().time() - before <= 10
    await asyncio.sleep(10**6)


# -- around it ----------------------------------------------------------------------------------------------


async def test_two_drivers_in_one_process_share_nothing_but_the_engine() -> None:
    alone = make_rig("april")
    expected = await with_stop(alone, alone.train(3))
    engine = make_engine(max_running=64)
    rigs = [make_rig("april", engine=engine, watched=False) for _ in range(2)]
    both = await asyncio.gather(*(with_stop(rig, rig.driver.next_batch()) for rig in rigs))
    ids = [r.request_id for r in engine.requests]
    assert len(set(ids)) == len(ids)
    for rig, batch in zip(rigs, both, strict=True):
        assert [t.token_ids for t in batch.trajectories] == [t.token_ids for t in expected[0].trajectories]
        assert rig.ledger.tokens.decoded < engine.decoded_tokens


class FullDisk(Journal):
    full = False

    def append(self, events: Any) -> None:
        if self.full:
            raise ResourceError("cannot write: disk is full")
        super().append(events)


async def test_a_full_disk_stops_the_run_and_leaves_no_hole(tmp_path: Any) -> None:
    journal = FullDisk(tmp_path / "journal.sqlite")
    rig = make_rig("april", journal=journal)
    await rig.train(1)
    journal.full = True
    with pytest.raises(ResourceError):
        await rig.train(2)
    assert rig.ledger.next_step == 1, "the run stops at the first event that is lost, not at the next batch"
    with pytest.raises(ResourceError):
        await rig.driver.stop()
    assert [event for _, event in journal.read()] == rig.events[: journal.last_seq]
    journal.full = False
    await rig.driver.stop()  # somebody made room
    assert [event for _, event in journal.read()] == rig.events
    Ledger(rig.events).check()
    journal.close()


def test_lockstep_acts_on_each_finish_before_the_next_token() -> None:
    """With a slow scorer the engine stands still; two finishes in one tick are scored one after the other."""
    length = of("g0", 4, 9)
    rig, _ = play(1, "april", length=length, scorer=ParityScorer(100.0), rollout_batch_size=1, lockstep=True)
    times = [e.time_s for e in rig.events if isinstance(e, SampleScored)]
    assert times == [101.0, 201.0]  # this engine needs a second to start and none to decode
    assert rig.engine.decoded_tokens == 4 * 4  # nobody got a fifth


@pytest.mark.parametrize("name", ["bounded_async", "inflight"])
@pytest.mark.parametrize("delay_s", [0.0, 2.5])
def test_in_lockstep_a_sample_that_ends_during_a_step_is_scored_once(name: str, delay_s: float) -> None:
    scorer = ParityScorer(delay_s)
    rig, batches = play(6, name, scorer=scorer, lockstep=True, max_running=7)
    assert_trainable(batches, rig)
    assert set(scorer.scored.values()) == {1}
