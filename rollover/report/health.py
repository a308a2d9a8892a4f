"""The curves of a report's section on health: what to look at when learning stalls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

Values = Mapping[str, float]


class Curve(NamedTuple):
    """One curve of a figure."""

    name: str
    value: Callable[[Values], float]
    """Computes the curve's value from the metrics of a step; NaN if they lack it."""


def _of(metric: str, name: str = "") -> Curve:
    return Curve(name or metric, lambda step: step.get(metric, math.nan))


FIGURES: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    ("Entropy and surprise, nats", (_of("entropy"), _of("surprise"))),
    (
        "Entropy by tokens before the end, nats",
        (
            _of("entropy/end_0", "0–15"),
            _of("entropy/end_16", "16–63"),
            _of("entropy/end_64", "64–255"),
            _of("entropy/end_256", "256 and more"),
        ),
    ),
    (
        "KL divergences, nats per token",
        (
            _of("kl/rollout_proximal_k3", "sampling to start of step"),
            _of("kl/proximal", "start of step to now"),
            _of("kl/ref", "to the reference"),
        ),
    ),
    (
        "Share of tokens clipped or weighted down",
        (
            _of("clip/low", "below"),
            _of("clip/high", "above"),
            _of("clip/dual", "dual"),
            _of("cap/low", "capped below"),
            _of("cap/high", "capped above"),
            _of("is_weight/truncated", "weight truncated"),
            _of("is_weight/rejected", "rejected"),
        ),
    ),
    ("Effective sample size", (_of("ess/token", "of tokens"), _of("ess/sample", "of samples"))),
    (
        "Share without signal, share cut at the limit",
        (
            Curve("groups of equal rewards", lambda step: 1 - step.get("reward/groups_with_signal", math.nan)),
            _of("response/truncated", "responses cut"),
        ),
    ),
    ("Probability of the sets that tokens were drawn from", (_of("kept/mass"),)),
    ("Reward spread", (_of("reward/std"),)),
    ("Loss", (_of("loss"),)),
    ("Gradient norm", (_of("grad_norm"),)),
    ("Resumes per sample", (_of("rollout/resumes_per_sample"),)),
)
"""(title, curves) of each figure, in reading order."""
