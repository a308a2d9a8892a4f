"""Recorded lengths, and their replay as a workload.

A sample that was cut off before its end is kept as what it is, a lower bound: leaving it out would make responses look
shorter than they are (Kaplan and Meier, 1958).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollover.errors import ConfigError, DataError
from rollover.workload.law import Floats

_DRAWS = 16
_ORDER, _COMPLETE, _AGAIN = range(3)
"""Purposes of a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePrompt:
    """One prompt and the recorded lengths of its samples.

    Example: ``TracePrompt(prompt_id="trace/7@0", prompt_tokens=64, lengths=(210, 512), unfinished=frozenset({1}))``:
    the second sample was cut off after 512 tokens.
    """

    prompt_id: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Response lengths in the order of sampling, in tokens."""
    unfinished: frozenset[int] = frozenset()
    """Indices in ``lengths`` of samples that were cut off: they would have become longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Prompts in the order in which they were drawn. Raises ``DataError`` if there is no sample, or a length is not
    between 1 and the cap.
    """

    name: str
    cap_tokens: int
    """Length of the longest possible response."""
    prompts: tuple[TracePrompt, ...]
    held_s: float = 0.0
    """Mean seconds for which environments act on a response, all its turns together."""

    def __post_init__(self) -> None:
        if not self.num_samples:
            raise DataError(f"{self.name}: the trace is empty; it must contain at least one response length")
        for prompt in self.prompts:
            for length in prompt.lengths:
                if not 1 <= length <= self.cap_tokens:
                    raise DataError(
                        f"{self.name}: prompt {prompt.prompt_id!r} has a response of {length} tokens, which is not"
                        f" between 1 and the cap of {self.cap_tokens}"
                    )

    @property
    def num_samples(self) -> int:
        return sum(len(p.lengths) for p in self.prompts)

    @property
    def group_size(self) -> int:
        """Return the largest number of samples that a prompt has."""
        return max(len(p.lengths) for p in self.prompts)

    def missing_siblings(self, group_size: int) -> str:
        """Return a sentence on siblings that were not recorded; empty if most prompts have ``group_size`` samples."""
        few = sum(len(p.lengths) < group_size for p in self.prompts)
        if few * 2 <= len(self.prompts):
            return ""
        return (
            f"{few:,} of {len(self.prompts):,} prompts in {self.name} have fewer lengths than a group of {group_size}"
            " and repeat them, so siblings are more alike, and their longest is shorter, than in a real group: record"
            f" {group_size} per prompt, or give a law (rollover workload fit)."
        )

    def columns(self) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int64]]:
        """Return for each sample its length, whether it finished, and the place of its prompt."""
        lengths = [n for p in self.prompts for n in p.lengths]
        finished = [i not in p.unfinished for p in self.prompts for i in range(len(p.lengths))]
        places = [i for i, p in enumerate(self.prompts) for _ in p.lengths]
        return np.array(lengths, float), np.array(finished, bool), np.array(places, np.int64)

    def empirical_law(self) -> EmpiricalLaw:
        lengths, finished, _ = self.columns()
        return EmpiricalLaw.of(lengths, finished)

    def workload(self, seed: int = 0) -> Replay:
        return Replay(self, seed)

    def capped(self, cap_tokens: int) -> Trace:
        """Return the same responses, cut at ``cap_tokens``. Raises ``ConfigError`` if the cap is above the recorded
        one; how long the responses would have become is unknown."""
        if cap_tokens > self.cap_tokens:
            raise ConfigError(
                f"the cap of {cap_tokens} tokens is above {self.cap_tokens}, under which {self.name} was recorded;"
                " fit a law to it and raise the law's cap_tokens"
            )
        return replace(self, cap_tokens=cap_tokens, prompts=tuple(_cut(p, cap_tokens) for p in self.prompts))


def _cut(prompt: TracePrompt, cap_tokens: int) -> TracePrompt:
    at_cap = {i for i in prompt.unfinished if prompt.lengths[i] >= cap_tokens}
    lengths = tuple(min(n, cap_tokens) for n in prompt.lengths)
    return replace(prompt, lengths=lengths, unfinished=prompt.unfinished - at_cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalLaw:
    """Kaplan-Meier estimate of P(L <= x): a step function. It ends below 1 if the longest sample is unfinished.

    Example: of samples of 2, 4, 4 and 5 tokens, the last one cut off, ``values`` are (2, 4) and ``cdf`` is (0.25,
    0.75).
    """

    values: Floats
    """Finished lengths, ascending, without repetition."""
    cdf: Floats
    """P(L <= value)."""

    @classmethod
    def of(cls, lengths: Floats, finished: NDArray[np.bool_]) -> EmpiricalLaw:
        """Estimate the law. ``finished`` marks the samples that ended by themselves or at the cap; the others are lower
        bounds."""
        values, ended = np.unique(lengths[finished], return_counts=True)
        at_risk = len(lengths) - np.searchsorted(np.sort(lengths), values, side="left")
        return cls(values=values, cdf=np.asarray(1 - np.cumprod(1 - ended / at_risk), np.float64))

    def at(self, lengths: Floats) -> Floats:
        """Return P(L <= x)."""
        return np.concatenate([[0.0], self.cdf])[np.searchsorted(self.values, lengths, side="right")]

    def quantile(self, p: float, cap_tokens: int) -> int:
        """Return the smallest length with at least the share ``p`` at or below it; the cap if the record ends before
        that."""
        place = int(np.searchsorted(self.cdf, p - math.ulp(1.0)))
        return int(self.values[place]) if place < len(self.values) else cap_tokens

    def mean(self, cap_tokens: int) -> float:
        """Return the mean of the estimate, with what it leaves open counted at the cap."""
        shares = np.diff(self.cdf, prepend=0.0)
        return float(shares @ self.values + (1 - shares.sum()) * cap_tokens)

    def longer_than(self, length: int, u: float) -> int | None:
        """Return the quantile ``u`` of lengths above ``length``; ``None`` beyond everything that finished."""
        start = float(self.at(np.array([length]))[0])
        place = int(np.searchsorted(self.cdf, start + u * (1 - start), side="right"))
        return int(self.values[place]) if place < len(self.values) else None


class Replay:
    """A ``Workload`` of recorded lengths. Seed 0 keeps the recorded order of prompts, others shuffle it; after the last
    prompt another epoch begins, shuffled. The samples of a prompt are used in the order recorded, with later attempts
    continuing where earlier ones stopped, and then drawn from them again. A sample that was cut off is completed once
    and for all, with a draw from the recorded lengths above its own.
    """

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.trace = trace
        self.seed = seed
        self._lengths = _completed(trace)
        self._order = functools.lru_cache(maxsize=4)(self._draw_order)

    def __reduce__(self) -> tuple[type[Replay], tuple[Trace, int]]:
        return Replay, (self.trace, self.seed)

    @property
    def cap(self) -> int:
        return self.trace.cap_tokens

    def prompt_id(self, index: int) -> str:
        epoch, row = self._place(index)
        return f"trace/{row}@{epoch}"

    def prompt_tokens(self, index: int) -> int:
        return self.trace.prompts[self._place(index)[1]].prompt_tokens

    def group_lengths(self, index: int, group_size: int, attempt: int = 0) -> tuple[int, ...]:
        row = self._place(index)[1]
        recorded, first = self._lengths[row], attempt * group_size
        lengths = recorded[first : first + group_size]
        missing = range(first + len(lengths), first + group_size)
        return lengths + tuple(recorded[self._pick(row, place)] for place in missing)

    def _pick(self, row: int, place: int) -> int:
        """Return which recorded sample of the row stands in for a sample that was not recorded."""
        rng = np.random.default_rng([self.seed, _AGAIN, row, place // _DRAWS])
        return int(rng.random(_DRAWS)[place % _DRAWS] * len(self._lengths[row]))

    def _place(self, index: int) -> tuple[int, int]:
        """Return (epoch, row) of the ``index``-th prompt."""
        epoch, place = divmod(index, len(self._lengths))
        return epoch, self._order(epoch)[place]

    def _draw_order(self, epoch: int) -> Sequence[int]:
        if self.seed == 0 and epoch == 0:
            return range(len(self._lengths))
        rng = np.random.default_rng([self.seed, _ORDER, epoch])
        return [int(row) for row in rng.permutation(len(self._lengths))]


def _completed(trace: Trace) -> list[tuple[int, ...]]:
    """Return the lengths by prompt, with lengths that were cut off completed."""
    law = trace.empirical_law()
    rng = np.random.default_rng([_COMPLETE])
    completed = []
    for prompt in trace.prompts:
        found = list(prompt.lengths)
        for place in sorted(prompt.unfinished):
            found[place] = law.longer_than(found[place], rng.random()) or trace.cap_tokens
        completed.append(tuple(found))
    return completed
