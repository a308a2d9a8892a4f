"""Re-execution: tokens that one engine sampled are decoded again by another of the same weights, and compared.

Seeded engines draw by noise that depends on (seed, position) alone (``rollover.engine.noise``), so the second draws the
same tokens. Two things may differ for honest engines, both by rounding: the log-probs a little, and rarely a token,
where the noise lies on the border between two tokens. The rule:

* **Log-probs** of the same tokens differ by the tolerance of the log-prob check at most, in nats, on average.
* **A token that differs** is asked for twice more, with noise that is moved a little to either side (``Slack``). These
  two tokens are the bounds of what rounding can explain: the first engine's must lie between them, in the order of ids.
  The comparison then continues after it. In float32 the two engines disagree at the first token outside of its bounds;
  in half precision, where one token in some thousands is, at the fourth of the first eight that differ.

So tokens that were drawn by other noise are found whatever log-probs are claimed for them: in float32 a single one,
unless it lies within the bounds by luck. A third opinion, of another engine or of the trainer, decides which of them is
right. The one whose tokens are outside of the bounds of that opinion, where the other's are not, has lied.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rollover.engine.base import GenerateRequest
from rollover.engine.logprob_check import HALF_TOLERANCE
from rollover.engine.noise import uniforms

MIN_TOKENS = 64
"""The fewest tokens whose log-probs say anything in half precision, where single ones are far off."""
MAX_DIFFERENT = 8
"""Tokens of a stretch that differ and are looked into. Where float32 and bfloat16 were compared, of 4,638 tokens 77
differed, one of them outside of its bounds. Four of eight are so with a probability of 2e-6, and with 0.99 where they
were drawn by other noise, of which four in five are outside."""
_FAR = HALF_TOLERANCE
"""Distance that the trainer's weights of a later step do not explain, where they are near to the other side."""
_NUM_ASKED = 16
"""Positions at which the trainer is asked for log-probs."""


class Lot:
    """Draws the samples that are decoded again. It cannot be foreseen: the draw is a hash under a key of its own.

    Example: ``Lot(0.02).draws("g7.3.")`` is true for one sample key of fifty, and always the same for one.
    """

    def __init__(self, share: float, key: bytes | None = None) -> None:
        self._limit = int(share * 2**64)
        self._key = key or secrets.token_bytes(32)

    def draws(self, sample_key: str) -> bool:
        digest = hashlib.blake2b(sample_key.encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive tokens of a call that one engine sampled under one version of the weights.

    Example: of a call that began at 300 and changed weights at 340, one stretch begins at 300 and one at 340.
    """

    request: GenerateRequest
    """The call. Its ``response_ids`` end where the stretch begins."""
    engine: str
    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def start(self) -> int:
        """Return the position of its first token in the response."""
        return len(self.request.response_ids)

    @property
    def end(self) -> int:
        """Return the position after its last token."""
        return self.start + len(self.token_ids)

    def token(self, position: int) -> int:
        return self.token_ids[position - self.start]

    def logprob(self, position: int) -> float:
        return self.logprobs[position - self.start]

    def context(self, position: int) -> tuple[int, ...]:
        """Return all tokens before a position, prompt included."""
        before = self.token_ids[: position - self.start]
        return (*self.request.prompt_ids, *self.request.response_ids, *before)

    def call(self, name: str, position: int, limit: int, *, seed: int | None = None) -> GenerateRequest:
        """Return a request to decode again from a position up to ``limit``."""
        request = self.request
        return GenerateRequest(
            request_id=f"{name}#{position}.",
            sample_key=f"{name}.",
            prompt_key=request.prompt_key,
            prompt_ids=request.prompt_ids,
            response_ids=(*request.response_ids, *self.token_ids[: position - self.start]),
            params=replace(request.params, max_new_tokens=limit),
            seed=request.seed if seed is None else seed,
            least_version=self.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """The differences that rounding explains, between two engines of these number formats.

    Example: ``Slack(logprobs=0.002)`` moves the noise by 0.008 and allows no token outside of its bounds.
    """

    logprobs: float
    """Largest mean difference of log-probs, in nats."""

    @property
    def is_half(self) -> bool:
        """Return True if one side computes in half precision."""
        return self.logprobs >= HALF_TOLERANCE

    @property
    def noise(self) -> float:
        """Return the distance by which the noise is moved. A border between two tokens moves by half the mean
        difference of log-probs on average; the rest is for the worst of some thousand tokens."""
        return min(4 * self.logprobs, HALF_TOLERANCE)

    @property
    def max_outside(self) -> int:
        """Return the number of tokens of a stretch that may lie outside of their bounds."""
        return 3 if self.is_half else 0


def can_be_compared(request: GenerateRequest) -> bool:
    """Return whether rounding can be told from lies for tokens of a call: only where noise draws from all of the
    vocabulary. The edge of ``top_p`` and ``top_k`` moves with rounding, and so do all probabilities after it."""
    return request.params.temperature > 0 and request.params.top_p == 1 and request.params.top_k == 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The tokens that noise may draw at one position, up to rounding: those from ``low`` to ``high``, by id.

    Example: ``Bounds(812, 815)`` holds 813; most often the two are one token.
    """

    low: int
    high: int

    def holds(self, token: int) -> bool:
        return self.low <= token <= self.high


@dataclass(frozen=True, slots=True)
class SecondAnswer:
    """The token that an engine has drawn at a position, when it decoded a stretch again.

    Example: ``SecondAnswer(300, 17, -0.25)``
    """

    position: int
    token: int
    logprob: float


class Doubt(Enum):
    """The point on which two engines disagree.

    Example: ``Doubt.TOKEN`` where the second draws another token, farther off than rounding explains.
    """

    TOKEN = "token"
    LOGPROBS = "log-probs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of decoding a stretch again.

    Example: ``Comparison(answers=answers)`` of 200 answers: the second engine draws the same tokens, up to rounding.
    """

    answers: tuple[SecondAnswer, ...]
    """Answers at the positions that were compared, in order."""
    outside: tuple[SecondAnswer, ...] = ()
    """Answers where the first engine's token lies outside of the bounds."""
    doubt: Doubt | None = None


def mean_difference(stretch: Stretch, answers: Sequence[SecondAnswer]) -> float:
    """Return how far the log-probs of the same tokens are apart on average, in nats."""
    same = [a for a in answers if a.token == stretch.token(a.position)]
    return sum(abs(a.logprob - stretch.logprob(a.position)) for a in same) / len(same) if same else 0.0


def logprobs_differ(stretch: Stretch, answers: Sequence[SecondAnswer], slack: Slack) -> bool:
    """Return whether log-probs are farther apart than rounding explains."""
    num_same = sum(a.token == stretch.token(a.position) for a in answers)
    if slack.is_half and num_same < MIN_TOKENS:
        return False
    return not mean_difference(stretch, answers) <= slack.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """A stretch that a second engine does not confirm.

    Example: ``Dispute(stretch=stretch, second="attic", comparison=comparison, slack=Slack(logprobs=0.002))``
    """

    stretch: Stretch
    second: str
    """The engine that decoded it again."""
    comparison: Comparison
    slack: Slack

    @property
    def answers(self) -> tuple[SecondAnswer, ...]:
        """Return the disputed answers: the tokens outside of their bounds, or the log-probs that are farthest apart."""
        if self.comparison.doubt is Doubt.TOKEN:
            return self.comparison.outside
        same = [a for a in self.comparison.answers if a.token == self.stretch.token(a.position)]
        return tuple(sorted(same, key=self._distance, reverse=True)[:_NUM_ASKED])

    @property
    def contexts(self) -> tuple[tuple[int, ...], ...]:
        """Return all tokens before each answer."""
        return tuple(self.stretch.context(answer.position) for answer in self.answers)

    @property
    def about(self) -> str:
        """Put the two claims into words."""
        engine, answer = self.stretch.engine, self.answers[0]
        where = f"token {answer.position} of {self.stretch.request.sample_key}"
        if self.comparison.doubt is Doubt.TOKEN:
            token = self.stretch.token(answer.position)
            return f"{engine} says that it has drawn {token} as {where}, {self.second} draws {answer.token}"
        logprob = self.stretch.logprob(answer.position)
        return f"{engine} reports the log-prob {logprob:.4g} of {where}, {self.second} {answer.logprob:.4g}"

    def _distance(self, answer: SecondAnswer) -> float:
        return abs(answer.logprob - self.stretch.logprob(answer.position))


class Verdict(Enum):
    """The engine that has lied, as far as a third opinion can tell.

    Example: ``Verdict.FIRST`` is the engine that sampled the stretch.
    """

    FIRST = "first"
    SECOND = "second"
    BOTH = "both"
    NEITHER = "neither"


def verdict(*, first_is_wrong: bool, second_is_wrong: bool) -> Verdict:
    return {
        (True, False): Verdict.FIRST,
        (False, True): Verdict.SECOND,
        (True, True): Verdict.BOTH,
        (False, False): Verdict.NEITHER,
    }[first_is_wrong, second_is_wrong]


def tokens_verdict(dispute: Dispute, bounds: Sequence[Bounds]) -> Verdict:
    """Return who has lied about tokens, by the bounds of a third opinion at each of ``dispute.answers``."""
    pairs = list(zip(dispute.answers, bounds, strict=True))
    first = sum(not each.holds(dispute.stretch.token(answer.position)) for answer, each in pairs)
    second = sum(not each.holds(answer.token) for answer, each in pairs)
    return verdict(first_is_wrong=2 * first > len(pairs), second_is_wrong=2 * second > len(pairs))


def trainers_verdict(dispute: Dispute, logits_PV: NDArray[np.float32], version: int) -> Verdict | None:
    """Return who has lied by the trainer's logits after each of ``dispute.contexts``; ``None`` where they do not tell.

    ``version``: of the trainer's weights. Where they are newer than the stretch's, neither side is right to the digit;
    but as they are near to them, so is the side that is honest.
    """
    stretch, answers = dispute.stretch, dispute.answers
    logprobs_PV = _logprobs(logits_PV, stretch.request.params.temperature)
    if version != stretch.version:
        return _nearer(*_distances(dispute, logprobs_PV))
    if dispute.comparison.doubt is Doubt.TOKEN:
        seed, noise = stretch.request.seed, dispute.slack.noise
        return tokens_verdict(
            dispute,
            [
                drawn_between(logprobs_V, seed, answer.position, noise)
                for answer, logprobs_V in zip(answers, logprobs_PV, strict=True)
            ],
        )
    ours = [float(logprobs_V[a.token]) for a, logprobs_V in zip(answers, logprobs_PV, strict=True)]
    first = sum(abs(stretch.logprob(a.position) - p) for a, p in zip(answers, ours, strict=True)) / len(answers)
    second = sum(abs(a.logprob - p) for a, p in zip(answers, ours, strict=True)) / len(answers)
    # Of the farthest apart some are beyond the tolerance, which is for means; of two one is farther off.
    farther, nearer = max(first, second), min(first, second)
    if farther <= dispute.slack.logprobs or farther < 2 * nearer:
        return verdict(first_is_wrong=False, second_is_wrong=False)
    return verdict(first_is_wrong=first > second, second_is_wrong=second > first)


def _distances(dispute: Dispute, logprobs_PV: NDArray[np.float64]) -> tuple[float, float]:
    """Return how far both sides are from what a distribution would make, on average: of a token, how far the noise
    would have to be moved to draw it; of a log-prob, in nats."""
    stretch, pairs = dispute.stretch, list(zip(dispute.answers, logprobs_PV, strict=True))
    if dispute.comparison.doubt is Doubt.LOGPROBS:
        first = [abs(stretch.logprob(a.position) - logprobs_V[a.token]) for a, logprobs_V in pairs]
        second = [abs(a.logprob - logprobs_V[a.token]) for a, logprobs_V in pairs]
    else:
        seed = stretch.request.seed
        first = [_moved(logprobs_V, seed, a.position, stretch.token(a.position)) for a, logprobs_V in pairs]
        second = [_moved(logprobs_V, seed, a.position, a.token) for a, logprobs_V in pairs]
    return float(np.mean(first)), float(np.mean(second))


def _moved(logprobs_V: NDArray[np.float64], seed: int, position: int, token: int) -> float:
    number = float(uniforms([seed], [position])[0])
    above = float(np.exp(logprobs_V[: token + 1]).sum())
    return max(0.0, above - float(np.exp(logprobs_V[token])) - number, number - above)


def _nearer(first: float, second: float) -> Verdict | None:
    """Return who is far off, where the other is near."""
    if max(first, second) < _FAR or max(first, second) < 4 * min(first, second):
        return None
    return Verdict.FIRST if first > second else Verdict.SECOND


def drawn_between(logprobs_V: NDArray[np.float64], seed: int, position: int, distance: float) -> Bounds:
    """Return what noise draws from a distribution when it is moved by ``distance`` to either side.

    Example: of probabilities (.5, .3, .2) noise .499 that is moved by .002 draws 0 and 1.
    """
    cdf_V = np.exp(logprobs_V).cumsum()
    number = float(uniforms([seed], [position])[0])
    low, high = (
        np.searchsorted(cdf_V, np.clip(number + moved, 0.0, 1.0) * cdf_V[-1], side="right")
        for moved in (-distance, distance)
    )
    return Bounds(int(low), min(int(high), len(cdf_V) - 1))


def _logprobs(logits_PV: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    scaled_PV = logits_PV.astype(np.float64) / temperature
    scaled_PV -= scaled_PV.max(-1, keepdims=True)
    result: NDArray[np.float64] = scaled_PV - np.log(np.exp(scaled_PV).sum(-1, keepdims=True))
    return result


@runtime_checkable
class DisputedMembers(Protocol):
    """An engine whose members may disagree about what weights sample.

    Example: ``SwarmEngine``, which has a few per cent of all responses decoded again.
    """

    def allow_rounding(self, tolerance: float) -> None:
        """Explain mean differences of log-probs up to ``tolerance``, in nats, by rounding from now on."""
        ...

    def disputes(self, version: int) -> Sequence[Dispute]:
        """Return what is undecided and was not returned before, about weights up to ``version``, which the trainer
        has."""
        ...

    def decide(self, dispute: Dispute, verdict: Verdict) -> None:
        """Send away who has lied."""
        ...
