"""Mixes several prompt sources into one, in exact proportion to their weights; it remains a pure function of the
index."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

from rollover.environments.rewards.base import RewardSpec
from rollover.tasks.prompt_source import PromptSource
from rollover.types import Prompt

_MAX_CYCLE = 10_000


class MixtureSource:
    """Interleaves several sources: over every ``cycle`` draws each source has exactly its share.

    With shares p_k = n_k / L in lowest terms the cycle has L draws. Draws are spread evenly (the j-th of
    source k stands at (j + 1/2) / n_k), so that every batch has these shares too. Shares that would need a cycle above
    10,000 are rounded to that, and each source keeps at least one draw.
    """

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]) -> None:
        self._sources = tuple(sources)
        self._by_name = {spec.source: source for source in sources for spec in source.reward_specs}
        self._counts = _shares(weights)
        places = [(Fraction(2 * j + 1, 2 * count), k, j) for k, count in enumerate(self._counts) for j in range(count)]
        self._cycle = tuple((k, j) for _, k, j in sorted(places))

    @property
    def cycle(self) -> int:
        return len(self._cycle)

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return tuple(spec for source in self._sources for spec in source.reward_specs)

    def prompt(self, index: int) -> Prompt:
        cycle, place = divmod(index, len(self._cycle))
        source, nth = self._cycle[place]
        return self._sources[source].prompt(cycle * self._counts[source] + nth)

    def solution(self, prompt: Prompt) -> str:
        return self._by_name[prompt.source].solution(prompt)


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Count the draws of each source in one cycle."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    divisor = reduce(gcd, counts)
    if sum(counts) // divisor <= _MAX_CYCLE:
        return tuple(count // divisor for count in counts)
    total = sum(exact)
    return tuple(max(1, round(weight / total * _MAX_CYCLE)) for weight in exact)
