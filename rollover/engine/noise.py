"""The noise of seeded engines: one uniform number for each (seed, response position), by a counter-based hash.

A seeded engine draws the first token, in the order of ids, at which the cumulative probability exceeds that number. So
another engine of the same weights draws the same token, unless the number lies within rounding of the border of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the splitmix64 finaliser (Steele, Lea & Flood, OOPSLA 2014): every input bit flips half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return one number in ``(0, 1)`` for each (seed, position); seeds are taken modulo 2**64."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
