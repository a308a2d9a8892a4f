"""Lengths drawn from a law: the same for the same seed, in whatever order they are asked for.

Draws are made in blocks of prompts by samples, each keyed by (seed, what for, block, ...), and kept a while.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from rollover.workload.law import TAIL_FROM, TAIL_Z, Floats

if TYPE_CHECKING:
    from rollover.workload.law import LengthLaw

_PROMPTS, _SAMPLES = 256, 16
"""Shape of a block."""
_KEPT_BLOCKS = 128
_PROMPT, _SAMPLE, _LOOP = range(3)
"""What a draw is for."""


class Generator:
    """A ``Workload`` drawn from ``law``. Only its law and its seed cross process boundaries."""

    def __init__(self, law: LengthLaw, seed: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.law = law
        self.seed = seed
        self._effects: dict[int, list[Floats]] = {}
        self._lengths = functools.lru_cache(maxsize=_KEPT_BLOCKS)(self._draw_lengths)

    def __reduce__(self) -> tuple[type[Generator], tuple[LengthLaw, int]]:
        return Generator, (self.law, self.seed)

    @property
    def cap(self) -> int:
        return self.law.cap_tokens

    def prompt_id(self, index: int) -> str:
        epoch, row = self._place(index)
        return f"generated/{row}@{epoch}"

    def prompt_tokens(self, index: int) -> int:
        return self.law.prompt_tokens

    def group_lengths(self, index: int, group_size: int, attempt: int = 0) -> tuple[int, ...]:
        block, row = divmod(index, _PROMPTS)
        if group_size <= _SAMPLES:
            return self._lengths(block, 0, attempt)[row][:group_size]
        chunks = range(-(-group_size // _SAMPLES))
        return tuple(n for c in chunks for n in self._lengths(block, c, attempt)[row])[:group_size]

    def _place(self, index: int) -> tuple[int, int]:
        """(epoch, row of the dataset) of the ``index``-th prompt; the rows keep their order."""
        return (0, index) if self.law.num_prompts is None else divmod(index, self.law.num_prompts)

    def _draw_lengths(self, block: int, chunk: int, attempt: int) -> list[tuple[int, ...]]:
        """Lengths of samples ``16 chunk ...`` of prompts ``256 block ...``, by prompt."""
        law, first = self.law, block * _PROMPTS
        effects_P1 = self._effects_of(first)[:, None]
        noise_PS = self._rng(_SAMPLE, block, chunk, attempt).standard_normal((_PROMPTS, _SAMPLES))
        z_PS = math.sqrt(law.icc) * effects_P1 + math.sqrt(1 - law.icc) * noise_PS
        drift_P1 = law.drift_per_1k_prompts / 1000 * np.arange(first, first + _PROMPTS)[:, None]
        log_lengths_PS = law.mu + drift_P1 + law.sigma * z_PS
        if law.tail_exponent is not None:
            log_lengths_PS += _pareto_excess(z_PS, law.sigma, law.tail_exponent)
        lengths_PS = np.exp(np.minimum(log_lengths_PS, math.log(2 * law.cap_tokens))).astype(np.int64)
        lengths_PS = np.clip(lengths_PS, law.min_tokens, law.cap_tokens)
        # Normalised, so that the share of loops over all prompts stays what the law says.
        q_P1 = law.loop_probability * np.exp(law.loop_difficulty * (effects_P1 - law.loop_difficulty / 2))
        loops_PS = self._rng(_LOOP, block, chunk, attempt).random((_PROMPTS, _SAMPLES)) < q_P1
        return list(map(tuple, np.where(loops_PS, law.cap_tokens, lengths_PS).tolist()))

    def _effects_of(self, first: int) -> Floats:
        """z of a block of prompts: standard normal, and over the epochs of a row a stationary AR(1) process."""
        if self.law.num_prompts is None:
            return self._effects_in(0, first // _PROMPTS)
        places = [self._place(index) for index in range(first, first + _PROMPTS)]
        return np.array([self._effects_in(epoch, row // _PROMPTS)[row % _PROMPTS] for epoch, row in places])

    def _effects_in(self, epoch: int, block: int) -> Floats:
        """Of a block of rows."""
        epochs = self._effects.setdefault(block, [])
        while len(epochs) <= epoch:
            fresh = self._rng(_PROMPT, len(epochs), block).standard_normal(_PROMPTS)
            rho = self.law.epoch_correlation
            epochs.append(rho * epochs[-1] + math.sqrt(1 - rho**2) * fresh if epochs else fresh)
        return epochs[epoch]

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])


def _pareto_excess(z: Floats, sigma: float, exponent: float) -> Floats:
    """What to add to log lengths ``sigma z`` so that those beyond the 90th percentile follow a Pareto law: the same
    rank in another distribution, so that siblings stay as alike as they were."""
    excess = np.zeros_like(z)
    beyond = z > TAIL_Z
    tail_z = z[beyond]
    survival = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in tail_z.tolist()])
    excess[beyond] = -np.log(survival / (1 - TAIL_FROM)) / exponent - sigma * (tail_z - TAIL_Z)
    return excess
