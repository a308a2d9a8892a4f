"""The laws of ``rollover.engine.base``, for any engine that implements both protocols.

A test module subclasses ``EngineContract`` under a name that pytest collects and says how its engine is
made. Every wait has a deadline, nothing sleeps; the engine decodes on its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pytest

from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.errors import EngineError
from rollover.kept_codec import check_kept, decode_kept
from rollover.types import FinishReason, SamplingParams
from rollover.weights.base import WeightSource, WeightTarget
from tests import virtual_time
from tests.speed import within

LONG = 120
"""Tokens of a call that takes a while and is run to its end."""
DEADLINE_S = within(60.0)


class FullEngine(Engine, WeightTarget, Protocol):
    """Both protocols in one object."""


def request(
    name: str,
    *,
    max_new_tokens: int = 12,
    response_ids: tuple[int, ...] = (),
    prompt_ids: tuple[int, ...] = (5, 6, 7),
    seed: int = 11,
    call: int = 0,
    **params: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{name}#{call}",
        sample_key=name,
        prompt_key="prompt" + "-".join(map(str, prompt_ids)),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        params=SamplingParams(max_new_tokens=max_new_tokens, **params),
        seed=seed,
    )


async def collect(engine: Engine, req: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(req)]


def tokens(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(t for c in chunks for t in c.token_ids)


async def update(engine: WeightTarget, source: WeightSource) -> None:
    """Give an engine new weights; whatever becomes of them, it goes on."""
    await engine.pause()
    try:
        await engine.load(source.manifest.version, source)
    finally:
        await engine.resume()


def assert_wellformed(chunks: list[Chunk]) -> None:
    """What holds for every finished stream."""
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(c.token_ids) == len(c.logprobs) for c in chunks)
    assert all(p <= 1e-6 for c in chunks for p in c.logprobs)
    assert all(c.kv_version <= c.policy_version for c in chunks)
    versions = [c.policy_version for c in chunks]
    assert versions == sorted(versions)
    assert all(c.num_prefilled_tokens == 0 for c in chunks[1:])


def law(body: Callable[[Any, FullEngine], Awaitable[None]]) -> Callable[[EngineContract], None]:
    """Make a test of a coroutine that takes the engine."""

    def test(self: EngineContract) -> None:
        self.run(partial(body, self))

    test.__name__ = body.__name__  # type: ignore[attr-defined]
    return test


class EngineContract:
    """Subclass and implement ``make_engine``, ``new_weights`` and ``bad_weights``."""

    in_virtual_time = False
    deadline_s = DEADLINE_S
    num_at_once = 100
    """Calls that are all open at the same time: many more for one engine of each kind that other machines serve."""
    endless = LONG
    """Tokens of a call that is aborted in the end, and must not be over before: an engine that decodes while others
    are held up wants many."""

    decodes_through_updates = False
    """Its members decode through ``pause``, and change weights each in its own time after ``load``: a call says from which
    version on it may be decoded. That is the swarm's push-pull mode."""

    gives_kept = False
    """Tokens come with the kept sets that a call wants."""

    def make_engine(self) -> FullEngine:
        """A fresh engine at version 0 that runs at least 4 calls and never stops a call before its limit
        unless told to by stop tokens."""
        raise NotImplementedError

    def new_weights(self, version: int) -> WeightSource:
        """Weights of ``version`` that fit, different from those it started with."""
        raise NotImplementedError

    def bad_weights(self) -> WeightSource:
        """Weights of version 1 that do not fit."""
        raise NotImplementedError

    def text(self, ids: tuple[int, ...]) -> str | None:
        """What tokens spell; ``None`` where they have no text."""
        return None

    def spells(self, ids: tuple[int, ...]) -> str:
        text = self.text(ids)
        assert text is not None
        return text

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        engine = self.make_engine()
        try:
            yield engine
        finally:
            await engine.close()

    def run(self, law: Callable[[FullEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(self.deadline_s), self.engine() as engine:
                await law(engine)

        (virtual_time.run if self.in_virtual_time else asyncio.run)(main())

    @law
    async def test_a_call_ends_with_one_finished_chunk_at_its_limit(self, engine: FullEngine) -> None:
        chunks = await collect(engine, request("a"))
        assert_wellformed(chunks)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert len(tokens(chunks)) == 12
        assert engine.stats().decoded_tokens == 12
        assert engine.stats().num_running == engine.stats().num_waiting == 0

    @law
    async def test_tokens_come_with_the_kept_sets_that_a_call_wants_and_no_others(self, engine: FullEngine) -> None:
        assert all(not c.kept for c in await collect(engine, request("a", top_k=3)))
        if not self.gives_kept:
            return
        whole = await collect(engine, request("b", top_k=3, top_p=0.9, returns_kept=True))
        rest = await collect(engine, request("c", response_ids=tokens(whole)[:5], top_k=2, returns_kept=True))
        for chunks, most in ((whole, 3), (rest, 2)):
            kept = tuple(k for c in chunks for k in c.kept)
            check_kept(kept, tokens(chunks))
            counts, _ = decode_kept(kept)
            assert 1 <= counts.min() <= counts.max() <= most
            logprobs = [p for c in chunks for p in c.logprobs]
            assert all(p == 0 for p, count in zip(logprobs, counts, strict=True) if count == 1)

    @law
    async def test_the_limit_counts_the_whole_response(self, engine: FullEngine) -> None:
        chunks = await collect(engine, request("a", response_ids=(8, 9, 8, 9, 8)))
        assert len(tokens(chunks)) == 7
        assert chunks[0].num_prefilled_tokens in (4, 5)  # the last one need not be in the cache
        with pytest.raises(EngineError):
            await collect(engine, request("b", max_new_tokens=2, response_ids=(8, 9)))

    @law
    async def test_the_stop_token_is_the_last_token(self, engine: FullEngine) -> None:
        """Greedy: with another draw the second call might never meet it."""
        free = tokens(await collect(engine, request("a", max_new_tokens=40, temperature=0.0)))
        stop = next(t for i, t in enumerate(free) if t not in free[:i] and i >= 3)
        chunks = await collect(engine, request("b", max_new_tokens=40, temperature=0.0, stop_token_ids=(stop,)))
        assert_wellformed(chunks)
        assert chunks[-1].finish_reason is FinishReason.STOP
        assert tokens(chunks) == free[: free.index(stop) + 1]

    @law
    async def test_a_stop_string_ends_the_response_at_its_token_also_over_a_cut(self, engine: FullEngine) -> None:
        if self.text(()) is None:
            pytest.skip("the engine's tokens spell nothing")
        greedy = {"max_new_tokens": 60, "temperature": 0.0}
        free = tokens(await collect(engine, request("free", **greedy)))
        pairs = {e: self.spells(free[e - 2 : e]) for e in range(6, 60)}
        whole = {e: pair for e, pair in pairs.items() if "\N{REPLACEMENT CHARACTER}" not in pair}
        end, stop = next((e, pair) for e, pair in whole.items() if pair not in self.spells(free[: e - 1]))
        stopping = {**greedy, "stop_strings": (stop,)}
        for cut in (0, end - 1):
            chunks = await collect(engine, request("stopped", call=cut, response_ids=free[:cut], **stopping))
            assert_wellformed(chunks)
            assert chunks[-1].finish_reason is FinishReason.STOP
            assert free[:cut] + tokens(chunks) == free[:end]

    @law
    async def test_abort_returns_once_the_final_chunks_are_on_the_streams(self, engine: FullEngine) -> None:
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        chunks = [await anext(stream)]
        await engine.abort(["a#0"])
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        chunks += [c async for c in stream]
        assert_wellformed(chunks)
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert 1 <= len(tokens(chunks)) < self.endless
        assert engine.stats().decoded_tokens == len(tokens(chunks))

    @law
    async def test_abort_leaves_the_others_alone(self, engine: FullEngine) -> None:
        other = asyncio.create_task(collect(engine, request("b", max_new_tokens=LONG, seed=2)))
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        await anext(stream)
        await engine.abort(["a#0"])
        assert [c.finish_reason async for c in stream][-1] is FinishReason.ABORT
        chunks = await other
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert len(tokens(chunks)) == LONG

    @law
    async def test_aborting_nothing_unknown_twice_or_the_finished_is_no_error(self, engine: FullEngine) -> None:
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        await anext(stream)
        await engine.abort([])
        await engine.abort(["nobody", "a"])
        assert engine.stats().num_running == 1
        await engine.abort(["a#0", "a#0"])
        await engine.abort(["a#0"])
        assert [c.finish_reason async for c in stream][-1] is FinishReason.ABORT
        await collect(engine, request("b"))
        await engine.abort(["b#0"])

    @law
    async def test_abort_before_the_first_token_gives_an_empty_final_chunk(self, engine: FullEngine) -> None:
        await engine.pause()
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=self.endless)))
        await asyncio.sleep(0)
        await engine.abort(["a#0"])
        chunks = await call
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert self.decodes_through_updates or [c.token_ids for c in chunks] == [()]
        await engine.resume()
        assert len(tokens(await collect(engine, request("a", call=1)))) == 12

    @law
    async def test_closing_the_iterator_aborts_the_call(self, engine: FullEngine) -> None:
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await engine.abort(["a#0"])
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        assert engine.stats().decoded_tokens < self.endless

    @law
    async def test_cancelling_the_caller_aborts_the_call(self, engine: FullEngine) -> None:
        caller = asyncio.create_task(collect(engine, request("a", max_new_tokens=self.endless)))
        while engine.stats().decoded_tokens == 0:
            await asyncio.sleep(0.001)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await engine.abort(["a#0"])
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        assert engine.stats().decoded_tokens < self.endless
        assert len(tokens(await collect(engine, request("b")))) == 12

    @law
    async def test_many_calls_at_once_are_all_answered(self, engine: FullEngine) -> None:
        calls = [
            request(f"r{i}", prompt_ids=(i % 50 + 2, 5), seed=i, max_new_tokens=2) for i in range(self.num_at_once)
        ]
        answers = await asyncio.gather(*(collect(engine, call) for call in calls))
        assert all(chunks[-1].finish_reason is FinishReason.LENGTH for chunks in answers)
        assert [len(tokens(chunks)) for chunks in answers] == [2] * self.num_at_once

    @law
    async def test_a_request_id_is_used_once(self, engine: FullEngine) -> None:
        await collect(engine, request("a"))
        with pytest.raises(EngineError, match="a#0"):
            await collect(engine, request("a"))

    @law
    async def test_a_context_that_is_too_long_names_the_sizes(self, engine: FullEngine) -> None:
        limit = engine.capabilities.max_context_tokens
        with pytest.raises(EngineError, match=str(limit + 1)):
            await collect(engine, request("a", max_new_tokens=limit - 2))

    @law
    async def test_a_stopped_and_resumed_rollout_is_the_uninterrupted_one(self, engine: FullEngine) -> None:
        if not engine.capabilities.seeded:
            pytest.skip("the engine's sampling noise depends on batching")
        whole = tokens(await collect(engine, request("whole", max_new_tokens=LONG)))
        stream = engine.generate(request("cut", max_new_tokens=LONG))
        head = [await anext(stream)]
        await engine.abort(["cut#0"])
        head += [c async for c in stream]
        rest = await collect(engine, request("cut", max_new_tokens=LONG, response_ids=tokens(head), call=1))
        assert tokens(head) + tokens(rest) == whole
        if engine.capabilities.keeps_kv_on_abort:
            assert rest[0].num_prefilled_tokens == 0

    @law
    async def test_nothing_is_sampled_between_pause_and_resume(self, engine: FullEngine) -> None:
        if self.decodes_through_updates:
            pytest.skip("its members decode through a pause")
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=self.endless)))
        other = asyncio.create_task(collect(engine, request("b", max_new_tokens=LONG // 2, seed=2)))
        await asyncio.sleep(0)
        await engine.pause()
        before = engine.stats().decoded_tokens
        late = asyncio.create_task(collect(engine, request("c")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().decoded_tokens == before
        assert not call.done() and not late.done()
        await engine.resume()
        await engine.abort(["a#0"])
        assert len(tokens(await other)) == LONG // 2
        assert len(tokens(await late)) == 12
        assert (await call)[-1].finish_reason is FinishReason.ABORT

    @law
    async def test_a_load_labels_every_later_token(self, engine: FullEngine) -> None:
        assert {c.policy_version for c in await collect(engine, request("a"))} == {0}
        await update(engine, self.new_weights(3))
        assert engine.stats().policy_version == 3
        later = replace(request("b"), least_version=3 if self.decodes_through_updates else 0)
        chunks = await collect(engine, later)
        assert {(c.policy_version, c.kv_version) for c in chunks} == {(3, 3)}

    @law
    async def test_a_running_call_goes_on_under_the_new_version(self, engine: FullEngine) -> None:
        if not engine.capabilities.in_flight_update:
            pytest.skip("the engine's calls end before a weight load")
        other = asyncio.create_task(collect(engine, request("b", max_new_tokens=LONG, seed=2)))
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        chunks = [await anext(stream)]
        while not chunks[-1].token_ids:
            chunks.append(await anext(stream))
        await update(engine, self.new_weights(1))
        while not (chunks[-1].token_ids and chunks[-1].policy_version == 1):
            chunks.append(await anext(stream))
        await engine.abort(["a#0"])
        chunks += [c async for c in stream]
        assert_wellformed(chunks)
        assert {c.policy_version for c in chunks if c.token_ids} == {0, 1}
        assert len(tokens(await other)) == LONG

    @law
    async def test_a_refused_load_leaves_the_old_weights_in_force(self, engine: FullEngine) -> None:
        before = await collect(engine, request("a"))
        await engine.pause()
        with pytest.raises(EngineError):
            await engine.load(1, self.bad_weights())
        await engine.resume()
        after = await collect(engine, request("b"))
        assert {c.policy_version for c in after} == {0}
        if engine.capabilities.seeded:
            assert tokens(after) == tokens(before)
        await engine.pause()
        await engine.load(2, self.new_weights(2))
        with pytest.raises(EngineError, match="2"):
            await engine.load(1, self.new_weights(1))
        await engine.resume()
        assert engine.stats().policy_version == 2

    @law
    async def test_adapters_beside_weights_that_are_not_there_are_refused(self, engine: FullEngine) -> None:
        adapters: Any = self.new_weights(1)
        adapters.manifest = replace(adapters.manifest, base_version=5)
        await engine.pause()
        with pytest.raises(EngineError, match="version 1 is given as adapters for version 5; publish the full"):
            await engine.load(1, adapters)
        await engine.resume()
        assert {c.policy_version for c in await collect(engine, request("a"))} == {0}

    @law
    async def test_close_ends_open_calls_with_abort(self, engine: FullEngine) -> None:
        stream = engine.generate(request("a", max_new_tokens=self.endless))
        chunks = [await anext(stream)]
        await engine.close()
        chunks += [c async for c in stream]
        assert_wellformed(chunks)
        assert chunks[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(EngineError):
            await collect(engine, request("b"))
