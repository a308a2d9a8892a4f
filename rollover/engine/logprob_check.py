"""The log-prob check: an engine must sample from the trainer's policy.

An engine that reports them before temperature, computes in another number format or serves other weights makes
every importance ratio wrong, and nothing else looks amiss. So each engine draws one token after each of some prompts,
and the log-prob it reports is looked up in what the trainer's weights say of that token. The trainer is asked once for
a version of the weights, while it rests: an engine can be compared at any later time, even while a step changes the
weights.

Tolerances are means in nats. Rounding makes less than 1e-5 in float32 and some .001 in TF32; computing in bfloat16
makes .004 to .05, weights of 8 bits make .01 to .1, weights of 4 bits .25 and more (measured on models of 2 to 12
layers).
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollover.engine.base import Engine, GenerateRequest
from rollover.engine.complete import complete
from rollover.errors import EngineError, EngineMismatch
from rollover.types import SamplingParams

TEMPERATURES = (1.0, 0.5)
"""Two, so that one of them is not the temperature at which nothing is divided."""
FLOAT32_TOLERANCE = 0.002
"""Tolerance where both sides compute in float32: above its rounding, including TF32's, and below all coarser
formats."""
HALF_TOLERANCE = 0.1
"""Tolerance where one side computes in half precision: above its rounding, which hides finer errors."""


class LogprobCheck(Protocol):
    """Returns when the log-probs of a member belong to the weights that it serves, else raises ``EngineError``.

    Needs no more of the member than ``generate``. ``is_known``: the same engine has passed under earlier weights. It is
    asked less if its answers leave no doubt. ``draws``: its sampling is checked as well."""

    async def __call__(self, engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None: ...


class CheckedMembers(Protocol):
    """An engine of several members, each of which can be found to sample from something else than it says."""

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """Give members calls only once they have passed ``check``."""
        ...

    async def check_logprobs(self, *, strict: bool = False) -> Mapping[str, EngineError]:
        """Check members under the weights that they were given last; return the members that failed, which get no call.

        Raises ``EngineMismatch`` when all are found to sample from something else; when one is, if ``strict``.
        """
        ...

    def distrust(self, name: str, reason: str) -> None:
        """Give a member no further calls. Raises ``EngineMismatch`` when none is left."""
        ...


_PROMPT_LENGTHS = (4, 8, 16, 32, 64, 4, 8, 16) * 3
_QUARTER = 4
_RAW_MARGIN = 1e-3
"""A mean difference below this says nothing about where the temperature was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Logits of the trainer's policy for the token after each of some prompts.

    Example: with logits (0, ln 3) after prompt 0, ``logprob(0, 1, 1.0)`` is ln 0.75 = -0.288.
    """

    version: int
    prompts: tuple[tuple[int, ...], ...]
    logits_PV: NDArray[np.float32]

    def logprob(self, prompt: int, token: int, temperature: float) -> float:
        return float(_log_softmax(self.logits_PV[prompt], temperature)[token])

    def logprobs(self, temperature: float) -> NDArray[np.float64]:
        return _log_softmax(self.logits_PV, temperature)

    def differences(self, drawn: Mapping[int, tuple[int, float]], temperature: float) -> NDArray[np.float64]:
        """Return, for some prompts given by number, the reported log-prob of the token after each, less ours."""
        return np.array([p - self.logprob(i, token, temperature) for i, (token, p) in drawn.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mean absolute differences in nats, at one temperature.

    Example: ``Mismatch(temperature=0.5, processed=0.4, raw=2e-6, lowest=-0.7)`` means log-probs from before the
    temperature.
    """

    temperature: float
    processed: float
    """Difference from log-probs at that temperature."""
    raw: float
    """Difference from log-probs at temperature 1."""
    lowest: float
    """Lowest reported log-prob less ours, at that temperature: not below 0 if tokens are drawn from fewer than all."""


def _log_softmax(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(-1, keepdims=True)
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    return scaled


def check_prompts(vocab_size: int, max_context_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Draw random prompts of several lengths that leave room for a token."""
    drawn = random.Random(0)
    return tuple(
        tuple(drawn.randrange(vocab_size) for _ in range(min(length, max_context_tokens - 1)))
        for length in _PROMPT_LENGTHS
    )


def some_prompts(version: int) -> tuple[int, ...]:
    """Return the numbers of the prompts that an engine which has passed before is asked first: a quarter of them, and
    another quarter for the next version.

    Example: ``some_prompts(6)`` is ``(2, 6, 10, 14, 18, 22)``.
    """
    return tuple(range(version % _QUARTER, len(_PROMPT_LENGTHS), _QUARTER))


def default_tolerance(*number_formats: str) -> float:
    """Choose the tolerance for the number formats of engine and trainer."""
    return FLOAT32_TOLERANCE if set(number_formats) == {"float32"} else HALF_TOLERANCE


async def check_logprobs(
    engine: Engine,
    reference: Reference,
    *,
    tolerance: float,
    remedy: str,
    temperatures: Sequence[float] = TEMPERATURES,
    first: Collection[int] = (),
) -> tuple[Mismatch, ...]:
    """Draw a token after each prompt of ``reference`` at each temperature. Returns what was measured.

    Args:
        first: numbers of prompts that are asked before the others, which are left out where these leave no doubt: with
            a mean difference of half the tolerance at most. So no engine fails on fewer prompts than all.

    Raises:
        EngineMismatch: the mean difference exceeds ``tolerance`` nats, or fits log-probs without temperature better;
            says which of the two it is, or that tokens seem to be left out, and ``remedy``.
    """
    measured = []
    rest = [i for i in range(len(reference.prompts)) if i not in first]
    for temperature in temperatures:
        drawn: dict[int, tuple[int, float]] = {}
        for numbers in (first, rest):
            if not numbers:
                continue
            tokens = (draw(engine, reference.prompts[i], temperature, seed=i) for i in numbers)
            drawn |= zip(numbers, await asyncio.gather(*tokens), strict=True)
            processed, raw = (reference.differences(drawn, at) for at in (temperature, 1.0))
            mismatch = Mismatch(
                temperature=temperature,
                processed=float(abs(processed).mean()),
                raw=float(abs(raw).mean()),
                lowest=float(processed.min()),
            )
            if mismatch.processed <= tolerance / 2 and not _seems_raw(mismatch):
                break
        measured.append(mismatch)
        _judge(engine, mismatch, tolerance, remedy)
    return tuple(measured)


async def draw(engine: Engine, prompt_ids: tuple[int, ...], temperature: float, *, seed: int) -> tuple[int, float]:
    """Return a token drawn after a prompt and the log-prob that the engine reports."""
    name = f"logprob-check-{secrets.token_hex(8)}-{seed}."  # no other check, of whatever version, may have this id
    request = GenerateRequest(
        request_id=name,
        sample_key=name,
        prompt_key=name,
        prompt_ids=prompt_ids,
        params=SamplingParams(max_new_tokens=1, temperature=temperature),
        seed=seed,
    )
    (drawn,) = [
        pair async for chunk in complete(engine, request) for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    return drawn


def _seems_raw(found: Mismatch) -> bool:
    return found.raw < found.processed and found.processed > _RAW_MARGIN


def _judge(engine: Engine, found: Mismatch, tolerance: float, remedy: str) -> None:
    if _seems_raw(found):
        raise EngineMismatch(
            f"{engine!r} reports log-probs from before the temperature: at temperature {found.temperature} they"
            f" are {found.processed:.3g} nats from those of the sampling distribution, and {found.raw:.3g} from"
            " those without temperature; start vLLM with --logprobs-mode processed_logprobs"
        )
    if found.processed > tolerance and found.lowest >= -tolerance / 2:
        raise EngineMismatch(
            f"{engine!r} does not sample from the trainer's policy, and seems to leave out some of its tokens: asked at"
            f" temperature {found.temperature}, none of its log-probs is lower than the trainer's, and they are"
            f" {found.processed:.3g} nats higher on average; remove what sets top_k, top_p or min_p, an option of the"
            f" server or a proxy in front of it; if nothing does, {remedy}"
        )
    if not found.processed <= tolerance:
        raise EngineMismatch(
            f"{engine!r} does not sample from the trainer's policy: its log-probs at temperature"
            f" {found.temperature} are {found.processed:.3g} nats off on average (engine.logprob_tolerance is"
            f" {tolerance:g}); {remedy}"
        )
