"""What the chaos campaign reports of its runs, worked out by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def chaos_summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("chaos_summary")


def row(case: str, rewards: list[float]) -> dict[str, Any]:
    return {
        "case": case,
        "kills": {"phone/clock": 2, "laptop/clock": 1, "coordinator/event": 1},
        "others": {"phone/cut": 1},
        "faults": {"dropped": 5},
        "ended_by_a_full_disk": 1,
        "decoded_tokens": 100,
        "acknowledged_tokens": 90,
        "mean_lag": 1.0,
        "undisturbed_mean_lag": 0.5,
        "rewards": rewards,
        "undisturbed_rewards": [0.1, 0.1, *[0.4] * 8],
    }


def test_kills_are_counted_by_role_and_way(chaos_summary: ModuleType) -> None:
    found = chaos_summary.summary([row("push_pull-april", [0.1] * 10), row("pull-sync", [0.1] * 10)])
    assert found["kills"] == 8 and found["kills_by_role_and_way"] == {"coordinator/event": 2, "member/clock": 6}
    assert found["reward_in_push_pull"] == {"pairs": 1}


def test_rewards_are_compared_in_pairs_with_students_t(chaos_summary: ModuleType) -> None:
    rows = [row("push_pull-april", [0.1, 0.1, *[0.4 + difference] * 8]) for difference in (-0.01, 0.0, 0.04)]
    found = chaos_summary.summary([*rows, row("pull-sync", [0.0] * 10)])["reward_in_push_pull"]
    assert found["pairs"] == 3 and found["difference"] == 0.01
    # Of -.01, 0 and .04 the standard deviation is .02646, and that of their mean .01528; t of two degrees is 4.303.
    assert found["interval"] == pytest.approx([0.01 - 4.303 * 0.015275, 0.01 + 4.303 * 0.015275], abs=1e-4)
    assert found["gain_of_the_undisturbed"] == [0.3, 0.0]
