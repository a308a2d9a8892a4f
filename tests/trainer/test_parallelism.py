"""Planners are told of the trainer's own ways to train."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rollover.trainer.config import TrainerConfig
from rollover.trainer.parallelism import unsupported


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 1, 1, True), None),
        ((1, 1, 1, False), None),
        ((2, 2, 4, True), "only data parallelism, not tensor parallel 2 and pipeline parallel 4"),
        ((2, 1, 1, False), "instead of keeping it whole on each of 2 devices"),
    ],
)
def test_ways_to_divide_a_step_that_are_not_supported(shape: tuple[int, int, int, bool], reason: str | None) -> None:
    dp, tp, pp, sharded = shape
    found = unsupported(dp=dp, tp=tp, pp=pp, sharded=sharded)
    assert found is None if reason is None else found is not None and found.endswith(reason)


def test_the_trainers_settings_offer_no_other_parallelism() -> None:
    """A new way to divide a step must be added to ``unsupported`` too."""
    assert {f.name for f in fields(TrainerConfig) if "parallel" in f.name or "devices" in f.name} == {
        "context_parallel",
        "num_devices",
    }
