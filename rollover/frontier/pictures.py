"""A few steps of some settings, for timelines: whole rounds, the same steps of each.

A strategy that trains several batches from one round decodes nothing between them. A stretch that is cut anywhere
may hold nothing but trained batches, so it begins with a round and ends before the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollover.frontier.setup import Setup
from rollover.report.measures import StepWindow, window_of
from rollover.report.timeline import Timeline
from rollover.rollout.config import RolloutConfig
from rollover.rollout.events import Event
from rollover.sim.run import simulate

WARMUP_STEPS, LEAST_STEPS = 8, 3
_MOST_STEPS = 300
"""Number of steps after which settings whose rounds never begin together are shown as in the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A few steps of one setting.

    Example: ``window.first_step == 8`` and ``window.last_step == 11`` show the four steps that follow a warm-up of 8.
    """

    config: RolloutConfig
    timeline: Timeline
    window: StepWindow


def pictures(setup: Setup, configs: Sequence[RolloutConfig]) -> tuple[Picture, ...]:
    """Return the same steps of each setting, whole rounds of all; where there are no such steps, whole rounds of the
    last setting."""
    num_steps = WARMUP_STEPS + LEAST_STEPS + 1
    while True:
        timelines, starts = zip(*(_simulated(setup, config, num_steps) for config in configs), strict=True)
        shown = whole_rounds(set.intersection(*starts))
        if shown is None and num_steps >= _MOST_STEPS:
            shown = whole_rounds(starts[-1]) or (WARMUP_STEPS, WARMUP_STEPS + LEAST_STEPS - 1)
        if shown is not None:
            first, last = shown
            return tuple(
                Picture(config=config, timeline=timeline, window=window_of(timeline, first, last))
                for config, timeline in zip(configs, timelines, strict=True)
            )
        num_steps *= 2


def whole_rounds(starts: set[int]) -> tuple[int, int] | None:
    """Return the first and the last step of the first rounds after the warm-up that hold at least ``LEAST_STEPS``
    batches."""
    first = min((s for s in starts if s >= WARMUP_STEPS), default=None)
    after = None if first is None else min((s for s in starts if s >= first + LEAST_STEPS), default=None)
    return None if first is None or after is None else (first, after - 1)


def _simulated(setup: Setup, config: RolloutConfig, num_steps: int) -> tuple[Timeline, set[int]]:
    """Simulate a setting; return its timeline and the steps for whose batch something was decoded."""
    events: list[Event] = []
    run = simulate(
        config.build_strategy(setup.scenario.capabilities),
        setup.lengths.workload(0),
        setup.scenario,
        steps=num_steps,
        observer=events.append,
    )
    return Timeline.of(events), {step.step for step in run.steps if step.iterations > 0}
