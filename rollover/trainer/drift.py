"""Measures how far the log-probs that engines recorded are from the trainer's own.

It compares tokens that were sampled with the weights at the start of the step and a cache of the same weights: for
these both sides computed the same number, and differ only by rounding. This costs no forward pass, since the step needs
the trainer's log-probs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollover.types import Drift, Trajectory


def measured_drift(
    trajectories: Sequence[Trajectory], distance_T: NDArray[np.float64], *, step: int
) -> dict[str, Drift]:
    """Return the drift of each engine that has such tokens.

    Args:
        distance_T: of each token, in the order of ``trajectories``; NaN where the trainer has not computed it under the
            weights at the start of the step.
    """
    by_engine: dict[str, list[NDArray[np.float64]]] = {}
    start = 0
    for segment in (s for t in trajectories for s in t.segments):
        end = start + len(segment.token_ids)
        if segment.policy_version == segment.kv_version == step:
            by_engine.setdefault(segment.engine, []).append(distance_T[start:end])
        start = end
    drift = {}
    for engine, parts in sorted(by_engine.items()):
        distances = np.concatenate(parts)
        if num_tokens := np.count_nonzero(~np.isnan(distances)):
            drift[engine] = Drift(int(num_tokens), float(np.nanmean(distances)))
    return drift
