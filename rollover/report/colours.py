"""Colours of the timeline and of a report's figures: of policy versions, of phases, of causes of waste.

All but the colours of policy versions are names of the page's CSS variables (``--blue``), which ``assets/page.css``
defines for the light and the dark theme and ``assets/page.js`` fills in.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollover.batch import WasteCause

PHASE_COLOURS = {
    "rollout": "--blue",
    "reward": "--green",
    "train": "--orange",
    "publish": "--violet",
    "other": "--soft",
}
"""Colours of the phases of a training step."""
WASTE_COLOURS = {
    WasteCause.SURPLUS_GROUP: "--orange",
    WasteCause.DISCARDED_ON_ABORT: "--red",
    WasteCause.FILTER_ZERO_SIGNAL: "--cyan",
    WasteCause.UNTRUSTED_ENGINE: "--teal",
    WasteCause.FAILED: "--brown",
    WasteCause.NO_REWARD: "--teal",  # as untrusted_engine, which is rare
    WasteCause.SKIPPED: "--soft",
    WasteCause.MASKED_TRUNCATED: "--pink",
    WasteCause.MASKED_STALE: "--yellow",
    WasteCause.REJECTED_WEIGHT: "--yellow",  # a run has one correction: this or the one before
    WasteCause.REJECTED_SAMPLE: "--red",
    WasteCause.ONLY_CHOICE: "--brown",
    WasteCause.ZERO_ADVANTAGE: "--violet",
}
"""Colours of the causes of waste."""
CURVE_COLOURS = ("--blue", "--orange", "--green", "--violet", "--cyan", "--pink", "--brown")
"""Colours of the curves of a figure that have no meaning of their own."""
VERSION_RAMP = ("#4453b8", "#2c86cc", "#1fa79b", "#6cb64e", "#dcb03a", "#e8853b", "#d2504f")
"""Colours of policy versions, from the oldest in sight to the newest: cold to warm, readable on light and on dark."""


def version_colours(versions: Iterable[int]) -> dict[int, str]:
    """Spread the versions in sight over the ramp, the oldest coldest."""
    ordered = sorted(set(versions))
    last = len(VERSION_RAMP) - 1
    steps = max(1, len(ordered) - 1)
    return {v: _mixed(i / steps * last) for i, v in enumerate(ordered)}


def _mixed(place: float) -> str:
    low = min(int(place), len(VERSION_RAMP) - 2)
    part = place - low
    a, b = (tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in VERSION_RAMP[low : low + 2])
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(a, b, strict=True))
