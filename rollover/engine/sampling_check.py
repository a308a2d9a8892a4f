"""The sampling check: an engine must draw its tokens from the distribution whose log-probs it reports.

Log-probs cannot show this. An engine that decodes greedily, cuts off the tail or uses another temperature may still
report the log-probs of the full distribution, and then every importance ratio is wrong by what it left out. So each
engine draws many single tokens after the prompts of a ``Reference``, whose distributions are known, before it gets its
first call. The draws of an honest engine are independent, and two statistics are judged, each once and at ``LIMIT``:

* z compares the surprise s = -log p of the draws with the entropy. Its size is sqrt(2 (log L(T) - log L(1))), where L
  is the likelihood of the draws at a multiple of the temperature and T the most likely one; its sign says whether T is
  above 1. For many draws it is sum(s - H) / sqrt(sum V), with H the mean of s and V its variance; for few and for
  policies that are almost certain too, an honest engine exceeds z with a probability of at most exp(-z^2 / 2)
  (Chernoff's bound), about exp(-z^2 / 2) / 12 in practice.
* The tail is the rarest tokens that together have at most ``TAIL_MASS``. The number of draws from it has the exact
  distribution of independent trials. A truncated distribution has none.

An honest engine fails about one check in a million. The check cannot see what an engine does only from the second token
of a call on or only after the check, a choice among whole responses, or a truncation that hardly changes the
distributions (``top_k`` of 20 over a vocabulary of 313).
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rollover.engine.base import Engine
from rollover.engine.logprob_check import Reference, draw
from rollover.errors import EngineMismatch

LIMIT = 5.0
TAIL_MASS = 0.05
MAX_DRAWS = 85
"""Draws per prompt, for policies that are so certain that no number of draws shows a temperature."""
_WANTED_VARIANCE = 2000.0
"""Sum of V at which a temperature that is 10 % too high gives z = 5 on average."""
_WANTED_TAIL = 20.0
"""Expected draws from the tail of which none comes with probability 2e-9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The statistics of some draws."""

    num_tokens: int
    z: float
    likely_temperature: float
    num_tail: int
    expected_tail: float
    tail_sigmas: float
    """Distance of ``num_tail`` from what is expected, in standard deviations of a normal distribution that are as
    improbable."""
    is_greedy: bool
    """True if every draw is the most probable token."""

    def complaint(self) -> str | None:
        """Return the likely setting of the engine; ``None`` if it passes."""
        if abs(self.z) <= LIMIT and abs(self.tail_sigmas) <= LIMIT:
            return None
        if self.is_greedy:
            return "greedy decoding"
        if self.tail_sigmas < -LIMIT and (self.num_tail == 0 or abs(self.z) <= LIMIT):
            return "a truncated distribution (top_p, top_k or min_p), or a far lower temperature"
        if abs(self.z) <= LIMIT:
            return "other rules or weights for rare tokens"
        return f"a temperature of about {self.likely_temperature:.2g}"


@dataclass(frozen=True, slots=True)
class Expected:
    """The distributions of the trainer's policy after ``P`` prompts at ``temperature``, and their tails."""

    reference: Reference
    temperature: float
    logprobs_PV: NDArray[np.float64]
    is_tail_PV: NDArray[np.bool_]
    tail_P: NDArray[np.float64]
    """Probability of the tail."""

    @classmethod
    def of(cls, reference: Reference, temperature: float) -> Expected:
        logprobs_PV = reference.logprobs(temperature)
        p_PV = np.exp(logprobs_PV)
        order_PV = np.argsort(p_PV, axis=1)
        is_rare_PV = np.cumsum(np.take_along_axis(p_PV, order_PV, 1), axis=1) <= TAIL_MASS
        is_tail_PV = np.zeros_like(is_rare_PV)
        np.put_along_axis(is_tail_PV, order_PV, is_rare_PV, 1)
        return cls(reference, temperature, logprobs_PV, is_tail_PV, (p_PV * is_tail_PV).sum(1))

    def draws_per_prompt(self) -> int:
        p_PV = np.exp(self.logprobs_PV)
        variance = (p_PV * self.logprobs_PV**2).sum() - ((p_PV * self.logprobs_PV).sum(1) ** 2).sum()
        wanted = (_WANTED_VARIANCE, variance), (_WANTED_TAIL, self.tail_P.sum())
        return math.ceil(min(MAX_DRAWS, max(enough / max(each, 1e-9) for enough, each in wanted)))

    def judged(self, tokens_PR: NDArray[np.int64]) -> Sampling:
        """Compute the statistics of ``R`` tokens drawn after each prompt."""
        num_draws = tokens_PR.shape[1]
        drawn_PR = np.take_along_axis(self.logprobs_PV, tokens_PR, 1)
        num_tail = int(np.take_along_axis(self.is_tail_PV, tokens_PR, 1).sum())
        likely = self._likely_temperature(float(drawn_PR.sum()) / num_draws)
        gain = (np.take_along_axis(self.reference.logprobs(likely), tokens_PR, 1) - drawn_PR).sum()
        return Sampling(
            num_tokens=tokens_PR.size,
            z=math.copysign(math.sqrt(2 * max(0.0, float(gain))), likely - self.temperature),
            likely_temperature=likely,
            num_tail=num_tail,
            expected_tail=num_draws * float(self.tail_P.sum()),
            tail_sigmas=_sigmas(num_tail, np.repeat(self.tail_P, num_draws)),
            is_greedy=bool((drawn_PR == self.logprobs_PV.max(1, keepdims=True)).all()),
        )

    def _likely_temperature(self, logprobs: float) -> float:
        """Return the temperature at which a draw after each prompt has these log-probs in all on average: the most
        likely one, within a factor of 16."""
        low, high = -4.0, 4.0
        for _ in range(14):
            middle = (low + high) / 2
            p_PV = np.exp(self.reference.logprobs(self.temperature * 2**middle))
            low, high = (middle, high) if (p_PV * self.logprobs_PV).sum() > logprobs else (low, middle)
        return float(self.temperature * 2 ** ((low + high) / 2))


async def check_sampling(engine: Engine, reference: Reference, *, temperature: float) -> Sampling:
    """Draw tokens after the prompts of ``reference`` and judge them. Returns what was measured.

    Raises ``EngineMismatch`` naming the engine, the statistics and the likely setting.
    """
    expected = Expected.of(reference, temperature)
    room = asyncio.Semaphore(engine.capabilities.max_running)

    async def drawn(prompt_ids: tuple[int, ...]) -> int:
        seed = seeds.getrandbits(31)
        async with room:
            return (await draw(engine, prompt_ids, temperature, seed=seed))[0]

    seeds = random.Random(0)
    prompts = reference.prompts * expected.draws_per_prompt()
    tokens_PR = np.array(await asyncio.gather(*map(drawn, prompts))).reshape(-1, len(reference.prompts)).T
    found = await asyncio.to_thread(expected.judged, tokens_PR)
    if (likely := found.complaint()) is not None:
        raise EngineMismatch(
            f"{engine!r} does not draw its tokens from the distribution whose log-probs it reports: at temperature"
            f" {temperature:g} the surprise of {found.num_tokens:,} tokens is {found.z:+.1f} standard deviations from"
            f" the entropy, and {found.num_tail} are from the tail where {found.expected_tail:.0f} are expected"
            f" ({found.tail_sigmas:+.1f}); the limit is {LIMIT:g}; this looks like {likely}: check the sampling"
            " settings of the engine and of anything that changes requests on the way to it"
        )
    return found


def _sigmas(count: int, p_N: NDArray[np.float64]) -> float:
    """Return how far ``count`` successes of independent trials are from the expected number, in standard deviations of
    a normal distribution that are as improbable.
    """
    mass = np.zeros(len(p_N) + 1)
    mass[0] = 1.0
    for p in p_N:
        mass[1:] += p * (mass[:-1] - mass[1:])
        mass[0] *= 1 - p
    low, high = float(mass[: count + 1].sum()), float(mass[count:].sum())
    size = -NormalDist().inv_cdf(min(max(1e-300, min(low, high)), 0.5))
    return -size if low < high else size
