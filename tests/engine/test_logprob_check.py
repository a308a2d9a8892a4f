"""The log-prob check accepts the sampling distribution's own log-probs and refuses all others, saying which."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.logprob_check import Reference, check_logprobs, check_prompts, default_tolerance, some_prompts
from rollover.errors import EngineMismatch
from tests.engine.fake import FakeEngine
from tests.virtual_time import run

VOCAB = 64
PROMPTS = check_prompts(VOCAB, 512)
REFERENCE = Reference(
    version=3,
    prompts=PROMPTS,
    logits_PV=np.random.default_rng(0).normal(0, 3, (len(PROMPTS), VOCAB)).astype(np.float32),
)
REMEDY = "serve the right one"


class Reporting(FakeEngine):
    """Reports log-probs of ``REFERENCE``, taken at temperature 1 when ``raw``, and so many nats off at each prompt."""

    def __init__(self, shift: float | Callable[[int], float] = 0.0, *, raw: bool = False) -> None:
        super().__init__(lambda _: 10**6, auto=True)
        self.raw, self.shift = raw, shift if callable(shift) else lambda prompt: shift

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        temperature = 1.0 if self.raw else request.params.temperature
        async for chunk in super().generate(request):
            ids = tuple(t % VOCAB for t in chunk.token_ids)
            prompt = PROMPTS.index(request.prompt_ids)
            logprobs = tuple(REFERENCE.logprob(prompt, t, temperature) + self.shift(prompt) for t in ids)
            yield replace(chunk, token_ids=ids, logprobs=logprobs)


def check(engine: Reporting, tolerance: float) -> tuple[float, ...]:
    measured = run(check_logprobs(engine, REFERENCE, tolerance=tolerance, remedy=REMEDY))
    assert [m.temperature for m in measured] == [1.0, 0.5]
    assert measured[1].raw > 0.5
    return tuple(m.processed for m in measured)


def test_the_reference_holds_log_softmax_of_logits_over_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        total = sum(np.exp(REFERENCE.logprob(0, token, temperature)) for token in range(VOCAB))
        assert total == pytest.approx(1.0)
    difference = REFERENCE.logprob(0, 1, 0.5) - REFERENCE.logprob(0, 2, 0.5)
    assert difference == pytest.approx(2 * (REFERENCE.logits_PV[0, 1] - REFERENCE.logits_PV[0, 2]), rel=1e-5)


def test_log_probs_of_the_sampling_distribution_pass() -> None:
    assert max(check(Reporting(), 1e-6)) < 1e-9


def test_log_probs_from_before_the_temperature_are_refused_with_the_mend() -> None:
    with pytest.raises(EngineMismatch, match=r"from before the temperature.*--logprobs-mode processed_logprobs"):
        check(Reporting(raw=True), 1e9)


def test_log_probs_of_another_policy_are_refused() -> None:
    with pytest.raises(EngineMismatch, match=r"not sample from the trainer's policy.*0\.3 nats off.*serve the right"):
        check(Reporting(-0.3), 0.1)
    assert check(Reporting(-0.05), 0.1) == pytest.approx((0.05, 0.05))


def test_a_server_that_draws_from_fewer_tokens_is_told_apart_from_one_with_other_weights() -> None:
    """Left out of a softmax, tokens make the log-prob of each of the others higher."""
    with pytest.raises(EngineMismatch, match=r"leave out some of its tokens.*0\.3 nats higher.*top_k, top_p or min_p"):
        check(Reporting(0.3), 0.1)
    with pytest.raises(EngineMismatch, match="not sample from the trainer's policy: its"):
        check(Reporting(lambda prompt: 0.3 if prompt else -0.2), 0.1)


@pytest.mark.parametrize("version", range(5))
def test_who_is_known_is_asked_a_quarter_where_that_leaves_no_doubt(version: int) -> None:
    few = some_prompts(version)
    assert {len(PROMPTS[i]) for i in few} <= {4, 8, 16, 32, 64} and len(few) == len(PROMPTS) // 4

    def asked(shift: float) -> tuple[int, float]:
        engine = Reporting(shift)
        (found,) = run(check_logprobs(engine, REFERENCE, tolerance=0.1, remedy=REMEDY, temperatures=(1.0,), first=few))
        return len(engine.requests), found.processed

    assert asked(0.0) == (len(few), pytest.approx(0.0, abs=1e-9))
    assert asked(-0.049) == (len(few), pytest.approx(0.049))
    assert asked(-0.051) == (len(PROMPTS), pytest.approx(0.051))
    with pytest.raises(EngineMismatch, match=r"0\.3 nats off"):
        asked(-0.3)
    with pytest.raises(EngineMismatch, match="nan nats off"):
        asked(float("nan"))


def test_all_prompts_are_asked_in_turn_as_versions_go_on() -> None:
    assert sorted(i for version in range(4) for i in some_prompts(version)) == list(range(len(PROMPTS)))


def test_nobody_fails_by_fewer_prompts_than_all() -> None:
    """An honest engine in half precision may be far off at a few of them."""
    few = some_prompts(0)
    uneven = Reporting(lambda prompt: -0.2 * (prompt in few))
    (found,) = run(check_logprobs(uneven, REFERENCE, tolerance=0.1, remedy=REMEDY, temperatures=(1.0,), first=few))
    assert found.processed == pytest.approx(0.05)


def test_prompts_leave_room_for_a_token_in_the_smallest_context() -> None:
    assert {len(p) for p in check_prompts(VOCAB, 512)} == {4, 8, 16, 32, 64}
    assert {len(p) for p in check_prompts(VOCAB, 2)} == {1}
    assert check_prompts(VOCAB, 512) == PROMPTS


def test_in_float32_the_tolerance_is_below_half_precisions_rounding() -> None:
    assert default_tolerance("float32", "float32") == 0.002
    assert default_tolerance("bfloat16", "float32") == default_tolerance("float32", "bfloat16") == 0.1
    assert default_tolerance("unknown", "float32") == 0.1


def test_no_two_checks_send_the_same_request_id() -> None:
    engines = [Reporting() for _ in range(3)]
    for engine in engines:
        check(engine, 1e-6)
    sent = [name for e in engines for req in e.requests for name in (req.request_id, req.sample_key)]
    assert len(sent) == len({*sent}) == 3 * 2 * len(PROMPTS) * 2
