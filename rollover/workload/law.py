"""The distribution of response lengths: a lognormal with an effect of the prompt, loops, a cap.

    m_p   = log median + drift + tau z_p                          of prompt p, z_p ~ N(0, 1)
    log L = m_p + s e                                             of a sample, e ~ N(0, 1)
    tau^2 = icc sigma^2,   s^2 = (1 - icc) sigma^2
    L     = cap with probability q (the model loops), else int(exp(log L)) between floor and cap

A ``Generator`` draws from a law: the same lengths for the same seed, in whatever order they are asked for. It draws
blocks of prompts by samples, each keyed by (seed, purpose, block, ...), and keeps them a while.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NORMAL = NormalDist()
Floats = NDArray[np.float64]
MAX_TOKENS = 2**24
"""Maximum length of a prompt or response; a larger one is taken for a typing error, and would never finish."""
_RANGES = {"icc": (0, 1), "loop_probability": (0, 1), "drift_per_1k_prompts": (-1, 1)}
_PROMPTS, _SAMPLES = 256, 16
"""Shape of a block."""
_KEPT_BLOCKS = 128
_PROMPT, _SAMPLE, _LOOP = range(3)
"""Purposes of a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """A workload file: the parameters of the length law. Lengths are in tokens.

    Example: ``LengthLaw(median_tokens=4500, sigma=0.85, icc=0.5, loop_probability=0.03, cap_tokens=16384)`` is the
    preset ``r1-16k``, whose mean is 6,202 tokens.
    """

    median_tokens: float
    """Median of the responses that do not loop, before cap and floor, of the first prompt."""
    sigma: float
    """Standard deviation of the log length; 0.99 makes the 99th percentile ten times the median."""
    icc: float
    """Fraction of ``sigma`` squared that siblings have in common (intraclass correlation)."""
    loop_probability: float
    """Fraction of responses that never end by themselves."""
    cap_tokens: int
    """Longest response: ``max_new_tokens`` of the run."""
    min_tokens: int = 1
    """Shortest response."""
    drift_per_1k_prompts: float = 0.0
    """Change of the log median over 1,000 prompts drawn: 0.01 lengthens responses by one percent."""
    prompt_tokens: int = 150
    """Length of every prompt."""

    def __post_init__(self) -> None:
        if not (self.median_tokens >= 1 and math.isfinite(self.median_tokens)):
            raise ValueError(f"median_tokens must be at least 1, got {self.median_tokens}")
        if not 0 <= self.sigma <= 5:
            raise ValueError(f"sigma must be in [0, 5] (it is the spread of log lengths), got {self.sigma}")
        for key, (low, high) in _RANGES.items():
            if not low <= (value := getattr(self, key)) <= high:
                raise ValueError(f"{key} must be in [{low}, {high}], got {value}")
        for key in ("cap_tokens", "min_tokens", "prompt_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("cap_tokens", "prompt_tokens"):
            if getattr(self, key) > MAX_TOKENS:
                raise ValueError(f"{key} must be at most {MAX_TOKENS}, got {getattr(self, key)}")
        if self.min_tokens > self.cap_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be above cap_tokens ({self.cap_tokens})")

    @property
    def mu(self) -> float:
        return math.log(self.median_tokens) + 1e-11  # a constant length is the median, and not one less by rounding

    def workload(self, seed: int = 0) -> Generator:
        return Generator(self, seed)

    def capped(self, cap_tokens: int) -> LengthLaw:
        """Return the law of the same responses under another cap."""
        return replace(self, cap_tokens=cap_tokens, min_tokens=min(self.min_tokens, cap_tokens))

    # -- the marginal law of one sample of the first prompts, in closed form ------------------------------------

    def quantile(self, p: float) -> int:
        """Return the smallest length with at least the share ``p`` of samples at or below it."""
        p_ended = p / (1 - self.loop_probability) if self.loop_probability < 1 else math.inf
        if p_ended >= 1:
            return self.cap_tokens
        log_length = self.mu + self.sigma * NORMAL.inv_cdf(p_ended) if p_ended > 0 else -math.inf
        if log_length >= math.log(self.cap_tokens):
            return self.cap_tokens
        return max(self.min_tokens, int(math.exp(log_length)))

    def cdf(self, lengths: Floats) -> Floats:
        """Return P(L <= x) for whole-numbered lengths x."""
        from scipy.special import ndtr

        # int() puts [x, x + 1) on x.
        ended = ndtr((np.log1p(lengths) - self.mu) / max(self.sigma, 1e-12))
        below_cap = np.where(lengths < self.min_tokens, 0.0, (1 - self.loop_probability) * ended)
        return np.where(lengths >= self.cap_tokens, 1.0, below_cap)

    @property
    def truncated(self) -> float:
        """Return the share of responses at the cap."""
        return float(1 - self.cdf(np.array([self.cap_tokens - 1.0]))[0])

    @property
    def mean_tokens(self) -> float:
        """Return E[L], the sum of P(L > x) over x."""
        return float(np.sum(1 - self.cdf(np.arange(self.cap_tokens, dtype=np.float64))))


class Generator:
    """A ``Workload`` drawn from ``law``. Only its law and its seed cross process boundaries."""

    def __init__(self, law: LengthLaw, seed: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.law = law
        self.seed = seed
        self._lengths = functools.lru_cache(maxsize=_KEPT_BLOCKS)(self._draw_lengths)

    def __reduce__(self) -> tuple[type[Generator], tuple[LengthLaw, int]]:
        return Generator, (self.law, self.seed)

    @property
    def cap(self) -> int:
        return self.law.cap_tokens

    def prompt_id(self, index: int) -> str:
        return f"generated/{index}@0"

    def prompt_tokens(self, index: int) -> int:
        return self.law.prompt_tokens

    def group_lengths(self, index: int, group_size: int, attempt: int = 0) -> tuple[int, ...]:
        block, row = divmod(index, _PROMPTS)
        if group_size <= _SAMPLES:
            return self._lengths(block, 0, attempt)[row][:group_size]
        chunks = range(-(-group_size // _SAMPLES))
        return tuple(n for c in chunks for n in self._lengths(block, c, attempt)[row])[:group_size]

    def _draw_lengths(self, block: int, chunk: int, attempt: int) -> list[tuple[int, ...]]:
        """Draw the lengths of samples ``16 chunk ...`` of prompts ``256 block ...``, by prompt."""
        law, first = self.law, block * _PROMPTS
        effects_P1 = self._rng(_PROMPT, 0, block).standard_normal(_PROMPTS)[:, None]
        noise_PS = self._rng(_SAMPLE, block, chunk, attempt).standard_normal((_PROMPTS, _SAMPLES))
        z_PS = math.sqrt(law.icc) * effects_P1 + math.sqrt(1 - law.icc) * noise_PS
        drift_P1 = law.drift_per_1k_prompts / 1000 * np.arange(first, first + _PROMPTS)[:, None]
        log_lengths_PS = law.mu + drift_P1 + law.sigma * z_PS
        lengths_PS = np.exp(np.minimum(log_lengths_PS, math.log(2 * law.cap_tokens))).astype(np.int64)
        lengths_PS = np.clip(lengths_PS, law.min_tokens, law.cap_tokens)
        loops_PS = self._rng(_LOOP, block, chunk, attempt).random((_PROMPTS, _SAMPLES)) < law.loop_probability
        return list(map(tuple, np.where(loops_PS, law.cap_tokens, lengths_PS).tolist()))

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])
