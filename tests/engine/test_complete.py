"""A response is completed over failures and stops, each token once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.complete import complete
from rollover.errors import CallDisplaced, EngineError, EnginesAway
from rollover.types import FinishReason
from tests.engine.contract import request, tokens
from tests.engine.fake import FakeEngine, token_at
from tests.virtual_time import run


class Failing(FakeEngine):
    """Each call fails after ``after`` tokens, while ``failures`` are left."""

    def __init__(
        self, after: int, failures: int, *, length: int = 10**6, kind: type[EngineError] = EngineError
    ) -> None:
        super().__init__(lambda _: length, auto=True)
        self.after, self.failures, self.kind = after, failures, kind

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        count = 0
        if self.failures and self.after == 0:
            self.failures -= 1
            raise self.kind("dead on arrival")
        async for chunk in super().generate(request):
            yield chunk
            count += 1
            if self.failures and count == self.after:
                self.failures -= 1
                raise EngineError("died")


async def completed(engine: FakeEngine, **params: object) -> list[Chunk]:
    return [chunk async for chunk in complete(engine, request("a", **params))]  # type: ignore[arg-type]


def test_a_response_goes_on_from_its_last_token_after_each_failure() -> None:
    engine = Failing(after=4, failures=5)
    chunks = run(completed(engine, max_new_tokens=30))
    assert tokens(chunks) == tuple(token_at(11, p, 0) for p in range(30))
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert [len(r.response_ids) for r in engine.requests] == [0, 4, 8, 12, 16, 20]
    assert len({r.request_id for r in engine.requests}) == 6


def test_a_response_with_a_decoded_end_is_not_asked_for_again() -> None:
    chunks = run(completed(Failing(after=5, failures=1), max_new_tokens=6))
    assert (len(tokens(chunks)), chunks[-1].finish_reason) == (6, FinishReason.LENGTH)

    class Mute(Failing):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            async for chunk in FakeEngine.generate(self, request):
                yield replace(chunk, finish_reason=None)
            raise EngineError("died before it said why")

    engine = Mute(after=0, failures=0, length=5)
    chunks = run(completed(engine, max_new_tokens=60, stop_token_ids=(2,)))
    assert (tokens(chunks)[-1], chunks[-1].finish_reason, len(engine.requests)) == (2, FinishReason.STOP, 1)


def test_an_engine_that_decodes_nothing_is_given_up() -> None:
    assert len(tokens(run(completed(Failing(after=0, failures=3))))) == 12
    with pytest.raises(EngineError, match="dead on arrival"):
        run(completed(Failing(after=0, failures=4)))


def test_servers_that_stay_away_are_not_waited_for_again() -> None:
    engine = Failing(after=0, failures=2, kind=EnginesAway)
    with pytest.raises(EnginesAway):
        run(completed(engine))
    assert engine.failures == 1


def test_being_displaced_is_no_failure() -> None:
    assert len(tokens(run(completed(Failing(after=0, failures=9, kind=CallDisplaced))))) == 12
