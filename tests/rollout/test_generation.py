"""One generation call: chunks in, segments out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import EngineError
from rollover.rollout.actions import StartSample
from rollover.rollout.events import GroupOpened, SampleStarted
from rollover.rollout.generation import SampleCall
from rollover.rollout.ledger import Ledger
from rollover.types import FinishReason, Prompt, SampleId, SamplingParams, Segment
from tests.virtual_time import VirtualClock, run

FIRST = SampleId(0, 0)
SAMPLING = SamplingParams(max_new_tokens=400)
PROMPT = Prompt(prompt_id="toy/0@0", token_ids=(5, 6), text="", source="toy", columns={})


def chunk(num_tokens: int, version: int = 3, reason: FinishReason | None = None, engine: str = "") -> Chunk:
    return Chunk(
        token_ids=(9,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        policy_version=version,
        kv_version=3,
        finish_reason=reason,
        engine=engine,
    )


class Scripted:
    """Sends these chunks, and then the error if there is one."""

    def __init__(self, *chunks: Chunk, error: EngineError | None = None) -> None:
        self.chunks, self.error = chunks, error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        for each in self.chunks:
            yield each
        if self.error is not None:
            raise self.error


def call_to(
    engine: Any, *, token_budget: int | None = None, save_every_tokens: int = 1000, sampling: SamplingParams = SAMPLING
) -> SampleCall:
    ledger = Ledger([GroupOpened(0.0, 0, PROMPT, 1, 1), SampleStarted(0.0, FIRST, 3)])
    return SampleCall(
        request_id="a.g0.0#1.",
        start=StartSample(FIRST, token_budget),
        back_off_s=0.0,
        engine=engine,
        ledger=ledger,
        sampling=sampling,
        seed=1,
        clock=VirtualClock(),
        max_staleness=4,
        save_every_tokens=save_every_tokens,
        on_tokens=lambda sample_id: None,
    )


def segments_of(call: SampleCall, message: str = "") -> list[Segment]:
    """The segments of a call; with a ``message`` it fails, and the last of them is what was cut off."""

    async def work() -> list[Segment]:
        found = []
        try:
            async for segment in call.segments():
                found.append(segment)
        except EngineError as e:
            assert message and message in str(e)
            return [*found, call.cut_off()]
        assert not message, "it did not fail"
        return found

    return run(work())


def shape(segments: list[Segment]) -> list[tuple[int, int, str, FinishReason | None]]:
    return [(s.policy_version, len(s.token_ids), s.engine, s.finish_reason) for s in segments]


def test_a_segment_ends_at_a_new_version_engine_or_save() -> None:
    stop = FinishReason.STOP
    engine = Scripted(chunk(200), chunk(56), chunk(40, 4), chunk(4, 4, stop))
    assert shape(segments_of(call_to(engine))) == [(3, 256, "", None), (4, 44, "", stop)]
    engine = Scripted(chunk(5, engine="a"), chunk(2, engine="b", reason=stop))
    assert shape(segments_of(call_to(engine))) == [(3, 5, "a", None), (3, 2, "b", stop)]
    engine = Scripted(chunk(6), chunk(6), chunk(6), chunk(1, reason=stop))
    assert shape(segments_of(call_to(engine, save_every_tokens=10))) == [(3, 12, "", None), (3, 7, "", stop)]


def test_a_sample_at_its_token_budget_is_parked_and_at_its_limit_finished() -> None:
    length = FinishReason.LENGTH
    engine = Scripted(chunk(50, reason=length))
    assert shape(segments_of(call_to(engine, token_budget=50))) == [(3, 50, "", FinishReason.ABORT)]
    engine = Scripted(chunk(400, reason=length))
    assert shape(segments_of(call_to(engine, token_budget=900))) == [(3, 400, "", length)]


@pytest.mark.parametrize(
    ("engine", "num_tokens", "message"),
    [
        (Scripted(chunk(7), error=EngineError("connection lost")), 7, "connection lost"),
        (Scripted(chunk(7)), 7, "ended the stream of g0.0 without a finish reason"),
        (Scripted(chunk(7), chunk(1, reason=FinishReason.ABORT)), 8, "after 8 tokens without being asked to"),
        (Scripted(chunk(7), chunk(394)), 7, "decoded 401 tokens for g0.0, but at most 400 were requested"),
        (Scripted(chunk(7), chunk(1, version=2)), 7, "labels tokens of g0.0 with version 2, though 3 was published"),
        (Scripted(chunk(7), chunk(1, reason=FinishReason.LENGTH)), 7, "ended g0.0 for its length after 8 tokens"),
    ],
)
def test_a_call_that_fails_keeps_every_token_that_was_true(engine: Scripted, num_tokens: int, message: str) -> None:
    assert shape(segments_of(call_to(engine), message)) == [(3, num_tokens, "", FinishReason.ABORT)]


@pytest.mark.parametrize(
    ("stops", "strings", "chunks", "is_refused"),
    [
        ((2,), (), [chunk(7, reason=FinishReason.STOP)], True),
        ((2, 8), (), [chunk(7), chunk(0, reason=FinishReason.STOP)], True),
        ((2, 9), (), [chunk(7, reason=FinishReason.STOP)], False),
        ((2, 9), (), [chunk(7), chunk(0, reason=FinishReason.STOP)], False),
        ((2,), ("end",), [chunk(7, reason=FinishReason.STOP)], False),  # the ids alone do not tell
    ],
)
def test_without_stop_strings_only_a_stop_token_is_a_stop(
    stops: tuple[int, ...], strings: tuple[str, ...], chunks: list[Chunk], is_refused: bool
) -> None:
    sampling = SamplingParams(max_new_tokens=400, stop_token_ids=stops, stop_strings=strings)
    call = call_to(Scripted(*chunks), sampling=sampling)
    found = segments_of(call, "stopped at token 9, but its stop tokens are [2" if is_refused else "")
    assert [s.finish_reason for s in found][-1] is (FinishReason.ABORT if is_refused else FinishReason.STOP)
    assert sum(len(s.token_ids) for s in found) == 7 or is_refused


def test_a_failure_behind_the_end_of_the_response_is_none() -> None:
    engine = Scripted(chunk(7, reason=FinishReason.STOP), error=EngineError("connection lost"))
    call = call_to(engine)
    assert shape(segments_of(call)) == [(3, 7, "", FinishReason.STOP)]
    assert call.is_over
