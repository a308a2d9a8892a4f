"""The start-up proof of log-probs accepts the sampling distribution's own and refuses all others, saying which."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.proof import prove_logprobs
from rollover.errors import EngineError
from tests.engine.fake import FakeEngine
from tests.virtual_time import run


def truth(prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float) -> list[float]:
    return [-(1 + token % 7) / temperature for token in response_ids]


class Reporting(FakeEngine):
    """Reports log-probs taken at temperature 1 when ``raw``, and ``shift`` nats off."""

    def __init__(self, *, raw: bool = False, shift: float = 0.0) -> None:
        super().__init__(lambda _: 10**6, auto=True)
        self.raw, self.shift = raw, shift

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        temperature = 1.0 if self.raw else request.params.temperature
        async for chunk in super().generate(request):
            reported = tuple(p + self.shift for p in truth((), chunk.token_ids, temperature))
            yield replace(chunk, logprobs=reported)


def test_log_probs_of_the_sampling_distribution_pass() -> None:
    measured = run(prove_logprobs(Reporting(), truth, vocab_size=64, tolerance=0.01))
    assert [m.temperature for m in measured] == [1.0, 0.5]
    assert all(m.processed < 1e-9 for m in measured)
    assert measured[1].raw > 0.5


def test_log_probs_from_before_the_temperature_are_refused_with_the_mend() -> None:
    with pytest.raises(EngineError, match=r"from before the temperature.*--logprobs-mode processed_logprobs"):
        run(prove_logprobs(Reporting(raw=True), truth, vocab_size=64, tolerance=1e9))


def test_log_probs_of_another_policy_are_refused() -> None:
    with pytest.raises(EngineError, match=r"does not sample from the trainer's policy.*0\.3 nats off"):
        run(prove_logprobs(Reporting(shift=-0.3), truth, vocab_size=64, tolerance=0.1))
    assert run(prove_logprobs(Reporting(shift=-0.05), truth, vocab_size=64, tolerance=0.1))
