"""The phases of a training step. They do not overlap and add up to the step.

Rewards are computed while other samples still decode, so the work on them is no phase. The phase ``reward`` is the part
of a rollout in which nothing decodes any longer and a reward is waited for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from rollover.report.metrics import MetricRow
from rollover.report.timeline import Timeline

PHASES = ("rollout", "reward", "train", "publish", "other")


def by_step(rows: Sequence[MetricRow], timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return the seconds by phase of every step whose time was measured; ``other`` is what no phase accounts for."""
    waits = reward_waits_s(timeline)
    return {
        row.step: _phases(row.values, waits.get(row.step, 0.0))
        for row in rows
        if row.kind == "step" and math.isfinite(row.values.get("time/step_s", math.nan))
    }


def _phases(values: Mapping[str, float], wait_s: float) -> dict[str, float]:
    rollout_s, train_s, publish_s = (
        seconds if math.isfinite(seconds := values.get(f"time/{phase}_s", 0.0)) else 0.0
        for phase in ("rollout", "train", "publish")
    )
    wait_s = min(wait_s, rollout_s)
    other_s = max(0.0, values["time/step_s"] - rollout_s - train_s - publish_s)
    return dict(zip(PHASES, (rollout_s - wait_s, wait_s, train_s, publish_s, other_s), strict=True))


def reward_waits_s(timeline: Timeline) -> dict[int, float]:
    """Return for each step the seconds between the weights before it and its batch in which only rewards were waited
    for."""
    published = sorted(p.time_s for p in timeline.publishes)
    found = {}
    for step in timeline.steps:
        place = bisect_right(published, step.consumed_s)
        began_s = published[place - 1] if place else timeline.start_s
        first = bisect_right(timeline.reward_waits, began_s, key=lambda wait: wait[1])
        last = bisect_right(timeline.reward_waits, step.consumed_s, key=lambda wait: wait[0])
        inside = timeline.reward_waits[first:last]
        found[step.step] = sum(min(b, step.consumed_s) - max(a, began_s) for a, b in inside)
    return found


def percentages(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return whole percentages that add up to 100: the phases that lose most to rounding down share the rest. All are 0
    for no time."""
    total = sum(seconds.values())
    if total <= 0:
        return dict.fromkeys(seconds, 0)
    exact = {name: 100 * value / total for name, value in seconds.items()}
    found = {name: math.floor(value) for name, value in exact.items()}
    missing = 100 - sum(found.values())
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[:missing]:
        found[name] += 1
    return found
