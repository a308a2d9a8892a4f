"""Whether an engine reports the log-probs of the distribution it samples from, found out by comparing with the
trainer's own.

An engine that reports them before temperature, or serves other weights, would make every importance ratio wrong and
nothing else would look amiss; so it is refused before the first batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollover.engine.base import Engine, GenerateRequest
from rollover.engine.complete import complete
from rollover.errors import EngineError
from rollover.types import SamplingParams

Score = Callable[[Sequence[int], Sequence[int], float], Sequence[float]]
"""(prompt ids, response ids, temperature) to the log-prob of each response token, by the trainer."""

TEMPERATURES = (1.0, 0.5)
_NUM_PROMPTS = 4
_PROMPT_TOKENS = 6
_RESPONSE_TOKENS = 12
_RAW_MARGIN = 1e-3
"""A mean difference below this says nothing about where the temperature was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mean absolute differences in nats, of one temperature."""

    temperature: float
    processed: float
    """From log-probs at that temperature."""
    raw: float
    """From log-probs at temperature 1."""


async def prove_logprobs(
    engine: Engine,
    score: Score,
    *,
    vocab_size: int,
    tolerance: float,
    temperatures: Sequence[float] = TEMPERATURES,
) -> tuple[Mismatch, ...]:
    """Sample after a few random prompts at each temperature and compare with ``score``. Returns what was measured.

    Raises: EngineError: the mean difference exceeds ``tolerance`` nats, or fits log-probs without temperature better;
        says which of the two it is.
    """
    drawn = random.Random(0)
    prompts = [tuple(drawn.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)) for _ in range(_NUM_PROMPTS)]
    measured = []
    for temperature in temperatures:
        differences: list[tuple[float, float]] = []
        for number, prompt_ids in enumerate(prompts):
            token_ids, logprobs = await _sample(engine, prompt_ids, temperature, seed=number)
            if token_ids:
                at_temperature = score(prompt_ids, token_ids, temperature)
                at_one = score(prompt_ids, token_ids, 1.0)
                differences += [
                    (abs(p - q), abs(p - r)) for p, q, r in zip(logprobs, at_temperature, at_one, strict=True)
                ]
        count = max(1, len(differences))
        mismatch = Mismatch(
            temperature=temperature,
            processed=sum(d for d, _ in differences) / count,
            raw=sum(d for _, d in differences) / count,
        )
        measured.append(mismatch)
        _judge(engine, mismatch, tolerance)
    return tuple(measured)


async def _sample(
    engine: Engine, prompt_ids: tuple[int, ...], temperature: float, *, seed: int
) -> tuple[list[int], list[float]]:
    name = f"prove-logprobs-{seed}."
    request = GenerateRequest(
        request_id=name,
        sample_key=name,
        prompt_key=name,
        prompt_ids=prompt_ids,
        params=SamplingParams(max_new_tokens=_RESPONSE_TOKENS, temperature=temperature),
        seed=seed,
    )
    token_ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in complete(engine, request):
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    return token_ids, logprobs


def _judge(engine: Engine, found: Mismatch, tolerance: float) -> None:
    if found.raw < found.processed and found.processed > _RAW_MARGIN:
        raise EngineError(
            f"{engine!r} reports log-probs from before the temperature: at temperature {found.temperature} they"
            f" are {found.processed:.3g} nats from those of the sampling distribution, and {found.raw:.3g} from"
            " those without temperature; start vLLM with --logprobs-mode processed_logprobs"
        )
    if found.processed > tolerance:
        raise EngineError(
            f"{engine!r} does not sample from the trainer's policy: its log-probs at temperature"
            f" {found.temperature} are {found.processed:.3g} nats off on average (engine.logprob_tolerance ="
            f" {tolerance:g}); is it another model, a coarser number format or an older version of the weights?"
        )
