"""A training step's demand, made from the response lengths that a user names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from rollover.devices.lengths import length_buckets
from rollover.devices.records import WorkloadSpec
from rollover.errors import PlanError
from rollover.workload.base import Workload
from rollover.workload.source import read_lengths

SAMPLED_PROMPTS = 2048
"""Groups drawn to cut lengths into buckets."""


def load(
    name: str, *, num_groups: int, group_size: int, cap_tokens: int | None = None, seed: int = 0, **settings: Any
) -> WorkloadSpec:
    """Read the workload ``name``: a preset such as ``math-16k``, a file of lengths or a law, or a run.

    ``settings`` are further fields of ``WorkloadSpec``.

    Raises:
        ConfigError, DataError, RunError: ``name`` stands for nothing, or for something damaged.
        PlanError: a setting out of range.
    """
    lengths = read_lengths(name, cap_tokens=cap_tokens).workload(seed)
    return specify(name, lengths, num_groups=num_groups, group_size=group_size, **settings)


def specify(name: str, lengths: Workload, *, num_groups: int, group_size: int, **settings: Any) -> WorkloadSpec:
    """Draw ``SAMPLED_PROMPTS`` groups of ``lengths`` and cut them into buckets."""
    _check({"num_groups": num_groups, "group_size": group_size, **settings})
    prompts = range(SAMPLED_PROMPTS)
    rows = np.array([lengths.group_lengths(index, group_size) for index in prompts])
    return WorkloadSpec(
        name=name,
        num_groups=num_groups,
        group_size=group_size,
        prompt_tokens=float(np.mean([lengths.prompt_tokens(index) for index in prompts])),
        buckets=length_buckets(rows, group_size=group_size, num_groups=num_groups),
        **settings,
    )


def _check(settings: Mapping[str, Any]) -> None:
    known = {f.name for f in fields(WorkloadSpec)}
    assert settings.keys() <= known, f"no fields: {settings.keys() - known}"
    for key in ("num_groups", "group_size"):
        if settings[key] < 1:
            raise PlanError(f"{key} must be at least 1, got {settings[key]}")
    for key in ("reward_s", "held_s", "pause_s"):
        if settings.get(key, 0.0) < 0:
            raise PlanError(f"{key} must be zero or more seconds, got {settings[key]:g}")
