"""A response is completed over failures and stops, each token once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.complete import STALL_S, complete
from rollover.errors import CallDisplaced, EngineError, EnginesAway, EngineTimeout
from rollover.types import FinishReason
from tests.engine.contract import request, tokens
from tests.engine.fake import FakeEngine, token_at

DIED = EngineError("dead on arrival")


class Failing(FakeEngine):
    """Each call fails with ``error`` after ``after`` tokens, or is stopped unasked without one, while ``failures`` are
    left."""

    def __init__(self, after: int, failures: int, *, error: EngineError | None = DIED) -> None:
        super().__init__(lambda _: 10**6, auto=True)
        self.after, self.failures, self.error = after, failures, error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            for number in itertools.count():
                if self.failures and number == self.after:
                    self.failures -= 1
                    if self.error is not None:
                        raise self.error
                    yield ended(FinishReason.ABORT)
                    return
                yield (chunk := await anext(chunks))
                if chunk.finish_reason is not None:
                    return


class Lying(FakeEngine):
    """Ends each call with ``reason`` after ``count`` tokens."""

    def __init__(self, reason: FinishReason, count: int) -> None:
        super().__init__(lambda _: 10**6)
        self.reason, self.count = reason, count

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        yield ended(self.reason, self.count)


class Empty(FakeEngine):
    """Sends chunks without tokens for ever."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        while True:
            await asyncio.sleep(1.0)
            yield ended(None)


def ended(reason: FinishReason | None, count: int = 0) -> Chunk:
    ids, logprobs = (1,) * count, (-1.0,) * count
    return Chunk(token_ids=ids, logprobs=logprobs, policy_version=0, kv_version=0, finish_reason=reason)


async def completed(engine: FakeEngine, stall_s: float = STALL_S, **params: Any) -> list[Chunk]:
    return [chunk async for chunk in complete(engine, request("a", **params), stall_s=stall_s)]


async def test_a_response_goes_on_from_its_last_token_after_each_failure() -> None:
    engine = Failing(after=4, failures=5)
    chunks = await completed(engine, max_new_tokens=30)
    assert tokens(chunks) == tuple(token_at(11, p, 0) for p in range(30))
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert [len(r.response_ids) for r in engine.requests] == [0, 4, 8, 12, 16, 20]
    assert len({r.request_id for r in engine.requests}) == 6


async def test_a_response_with_a_decoded_end_is_not_asked_for_again() -> None:
    class Mute(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            async for chunk in super().generate(request):
                yield replace(chunk, finish_reason=None)
            raise EngineError("died before it said why")

    engine = Mute(lambda _: 5, auto=True)
    chunks = await completed(engine, max_new_tokens=60, stop_token_ids=(2,))
    assert (tokens(chunks)[-1], chunks[-1].finish_reason, len(engine.requests)) == (2, FinishReason.STOP, 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(EngineError("dead on arrival"), "dead on arrival", id="failing"),
        pytest.param(None, r"the engine stopped a#0.* after 0 tokens without being asked to", id="stopping"),
    ],
)
async def test_an_engine_that_decodes_nothing_is_given_up(error: EngineError | None, said: str) -> None:
    assert len(tokens(await completed(Failing(0, 3, error=error)))) == 12
    assert len(tokens(await completed(Failing(2, 9, error=error)))) == 12
    began_s = asyncio.get_running_loop().time()
    engine = Failing(0, 9, error=error)
    with pytest.raises(EngineError, match=said):
        await completed(engine)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.1 + 0.2 + 0.4)
    assert engine.failures == 9 - 4


async def test_servers_that_stay_away_are_not_waited_for_again() -> None:
    engine = Failing(0, 2, error=EnginesAway("all are out"))
    with pytest.raises(EnginesAway):
        await completed(engine)
    assert engine.failures == 1


async def test_being_displaced_is_no_failure() -> None:
    assert len(tokens(await completed(Failing(0, 9, error=CallDisplaced("for others"))))) == 12


async def test_a_response_of_chunks_without_tokens_is_given_up() -> None:
    with pytest.raises(EngineTimeout, match=r"the engine sent no token of a#0.* for 40 s"):
        await completed(Empty(lambda _: 5), stall_s=40.0)
    assert asyncio.get_running_loop().time() < 4 * 40.0 + 1.0


@pytest.mark.parametrize(
    ("reason", "count", "complaint"),
    [
        (FinishReason.STOP, 0, "reached a stop token, but sent no token"),
        (FinishReason.LENGTH, 3, "for its length after 3 tokens"),
        (FinishReason.LENGTH, 0, "for its length after 0 tokens"),
    ],
)
async def test_an_end_that_cannot_be_true_is_a_failure(reason: FinishReason, count: int, complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        await completed(Lying(reason, count))
