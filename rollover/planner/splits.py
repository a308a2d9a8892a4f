"""Splits of a fleet into trainers and rollout devices by rules of thumb, for a plan to be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollover.planner.records import Fleet, Problem

ROLLOUT_PART = 0.75
"""Part of the devices that roll out in the split by number."""


def by_number(problem: Problem, fleet: Fleet) -> Problem:
    """Let three quarters of the devices roll out, as in AReaL (arXiv 2505.24298): those with most FLOP/s train."""
    total = sum(supply.count for supply in problem.supplies)
    left = total - int(ROLLOUT_PART * total)
    training = {}
    for supply in sorted(problem.supplies, key=lambda s: -fleet.by_name[s.device].flops):
        training[supply.device] = min(supply.count, left)
        left -= training[supply.device]
    return _split(problem, training)


def by_type(problem: Problem, fleet: Fleet) -> Problem:
    """Let the type with most FLOP/s per memory bandwidth train and the others roll out; of one type alone a half
    each."""
    first = max(problem.supplies, key=lambda s: fleet.by_name[s.device].flops / fleet.by_name[s.device].hbm_bytes_per_s)
    training = {s.device: s.count if s is first else 0 for s in problem.supplies}
    if len(problem.supplies) == 1:
        training[first.device] = max(1, first.count // 2)
    return _split(problem, training)


def _split(problem: Problem, training: Mapping[str, int]) -> Problem:
    """Let at most so many devices of each type train, and only the others roll out."""
    supplies = tuple(
        replace(s, max_training=training[s.device], max_rollout=s.count - training[s.device]) for s in problem.supplies
    )
    return replace(problem, supplies=supplies, target_steps_per_s=None)
