"""The sampling check finds engines that report true log-probs of tokens drawn otherwise, and names the likely setting."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from rollover.engine.base import Capabilities, Chunk, GenerateRequest
from rollover.engine.logprob_check import Reference, check_logprobs, check_prompts
from rollover.engine.sampling_check import LIMIT, Expected, Sampling, _sigmas, check_sampling
from rollover.errors import EngineMismatch
from rollover.types import FinishReason, SamplingParams

VOCAB = 300
PROMPTS = check_prompts(VOCAB, 512)


def reference(scale: float = 2.0) -> Reference:
    logits_PV = np.random.default_rng(0).normal(0, scale, (len(PROMPTS), VOCAB)).astype(np.float32)
    return Reference(version=3, prompts=PROMPTS, logits_PV=logits_PV)


class Drawing:
    """An engine that draws by ``changes`` to what it is asked for, and reports the log-probs of what it is asked for.

    Its noise is of ``salt`` and the seeds of the calls.
    """

    def __init__(self, of: Reference, *, salt: int = 0, **changes: float) -> None:
        self.of, self.salt, self.changes = of, salt, changes
        self.capabilities = Capabilities(max_running=16, max_context_tokens=512)
        self.requests: list[GenerateRequest] = []
        self._logprobs: dict[float, np.ndarray] = {}

    def __repr__(self) -> str:
        return "http://gpu1:8000"

    def logprobs(self, prompt: int, temperature: float) -> np.ndarray:
        if temperature not in self._logprobs:
            self._logprobs[temperature] = self.of.logprobs(temperature)
        return self._logprobs[temperature][prompt]

    def token(self, prompt: int, params: SamplingParams, uniform: float) -> int:
        if params.temperature == 0:
            return int(np.argmax(self.logprobs(prompt, 1.0)))
        p_V = np.exp(self.logprobs(prompt, params.temperature))
        order_V = np.argsort(-p_V)
        sums_V = np.cumsum(p_V[order_V])
        kept = 1 + int((sums_V < params.top_p).sum())
        kept = min(kept, params.top_k or VOCAB, VOCAB)
        return int(order_V[np.searchsorted(sums_V[:kept], uniform * sums_V[kept - 1], side="right")])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        prompt = PROMPTS.index(request.prompt_ids)
        token = self.token(
            prompt,
            replace(request.params, **self.changes),  # type: ignore[arg-type]
            random.Random(f"{self.salt} {request.seed}").random(),
        )
        logprob = float(self.logprobs(prompt, request.params.temperature)[token])
        yield Chunk(
            token_ids=(token,), logprobs=(logprob,), policy_version=3, kv_version=3, finish_reason=FinishReason.LENGTH
        )


@pytest.mark.parametrize(
    ("changes", "temperature", "likely"),
    [
        ({"temperature": 0.0}, 1.0, "greedy decoding"),
        ({"top_p": 0.9}, 1.0, "a truncated distribution"),
        ({"top_p": 0.95}, 1.0, "a truncated distribution"),
        ({"top_k": 20}, 1.0, "a truncated distribution"),
        ({"temperature": 0.7}, 1.0, r"a temperature of about 0\.(6[5-9]|7[0-5]?)\b"),
        ({"temperature": 1.3}, 1.0, r"a temperature of about 1\.[23]\b"),
        ({"temperature": 1.0}, 0.7, r"a temperature of about (0\.9[5-9]|1)\b"),
    ],
)
def test_who_draws_otherwise_is_told_the_setting(changes: dict[str, float], temperature: float, likely: str) -> None:
    of = reference()
    liar = Drawing(of, **changes)
    asyncio.run(check_logprobs(liar, of, tolerance=1e-6, remedy="", temperatures=(temperature,)))
    with pytest.raises(EngineMismatch, match=rf"^http://gpu1:8000 does not draw.* this looks like {likely}"):
        asyncio.run(check_sampling(liar, of, temperature=temperature))


def test_no_honest_engine_of_two_hundred_is_refused() -> None:
    of = reference()
    expected, uniform = Expected.of(of, 1.0), np.random.default_rng(1).random
    sums_PV = np.cumsum(np.exp(of.logprobs(1.0)), axis=1)
    size = expected.draws_per_prompt()
    starts = [
        expected.judged(np.array([np.searchsorted(sums_V, uniform(size) * sums_V[-1]) for sums_V in sums_PV]))
        for _ in range(200)
    ]
    assert not any(found.complaint() for found in starts)
    for values in ([found.z for found in starts], [found.tail_sigmas for found in starts]):
        assert abs(float(np.mean(values))) < 5 / math.sqrt(200)
        assert float(np.std(values)) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 1e3])
def test_no_policy_is_too_certain_or_too_uncertain_to_be_checked(scale: float) -> None:
    of = reference(scale)
    honest = Drawing(of)
    found = asyncio.run(check_sampling(honest, of, temperature=1.0))
    assert found.num_tokens == len(honest.requests) <= 85 * len(PROMPTS)
    assert len({request.seed for request in honest.requests}) == found.num_tokens


def test_policies_in_doubt_need_few_draws() -> None:
    assert asyncio.run(check_sampling(Drawing(of := reference(4.0)), of, temperature=2.0)).num_tokens < 1000


def test_the_tail_count_is_judged_by_its_exact_distribution() -> None:
    """P(no success in 40 trials of 0.3) = 0.7^40 = 6.4e-7, which is 4.84 standard deviations."""
    assert _sigmas(0, np.full(40, 0.3)) == pytest.approx(-4.8438, abs=1e-3)
    assert _sigmas(40, np.full(40, 0.7)) == pytest.approx(4.8438, abs=1e-3)
    assert abs(_sigmas(12, np.full(40, 0.3))) < 0.6
    assert [_sigmas(0, np.full(40, p)) for p in (0.0, 1e-20, 1e-10, 1e-3)] == [0, 0, 0, 0], (
        "P(none) > 1/2 is no evidence"
    )
    assert _sigmas(1, np.full(40, 1e-10)) == pytest.approx(5.7685, abs=1e-3), "P(one or more) = 4e-9 is"


def test_either_statistic_alone_is_enough() -> None:
    honest = Sampling(
        num_tokens=1500,
        z=4.9,
        likely_temperature=1.1,
        num_tail=20,
        expected_tail=40.0,
        tail_sigmas=-3.7,
        is_greedy=False,
    )
    assert honest.complaint() is None
    assert replace(honest, z=5.1).complaint() == "a temperature of about 1.1"
    assert str(replace(honest, tail_sigmas=-5.1).complaint()).startswith("a truncated distribution")
    assert replace(honest, tail_sigmas=5.1).complaint() == "other rules or weights for rare tokens"


def test_one_rare_token_of_an_almost_certain_policy_is_no_evidence() -> None:
    """Of 2,040 draws, one in seven samples has a token of probability e^-9.5; its surprise alone is 6.9 standard
    deviations."""
    logits_PV = np.zeros((len(PROMPTS), 2), np.float32)
    logits_PV[:, 0] = 9.5
    expected = Expected.of(Reference(version=0, prompts=PROMPTS, logits_PV=logits_PV), 1.0)
    tokens_PR = np.zeros((len(PROMPTS), expected.draws_per_prompt()), np.int64)
    tokens_PR[0, 0] = 1
    assert 1.0 < expected.judged(tokens_PR).z < 2.5
    tokens_PR[:8, 0] = 1
    assert expected.judged(tokens_PR).z > LIMIT
