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


def back(name: str, seconds: float, outcome: str = "back", *, is_watched: bool = True) -> dict[str, Any]:
    return {"name": name, "is_watched": is_watched, "outcome": outcome, "seconds": seconds}


def row(case: str, rewards: list[float], *returns: dict[str, Any], load: float = 2.0) -> dict[str, Any]:
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
        "returns": list(returns),
        "load_average": load,
    }


def test_limits_are_kept_or_missed_by_watched_processes_alone(chaos_summary: ModuleType) -> None:
    returns = (
        *(back("coordinator", seconds) for seconds in (2.0, 3.0, 5.5)),
        *(back("phone", seconds) for seconds in (1.0, 6.1)),
        back("laptop", 30.0, "late"),
        back("tablet", 1.0, "hit again"),
        back("tablet", 12.0, is_watched=False),
    )
    busy = row("pull-sync", [0.1] * 10, back("coordinator", 9.0), load=12.0)
    found = chaos_summary.whole_of([row("push_pull-april", [0.1] * 10, *returns), busy, {"cold_s": 4.0}])
    assert found["returns"]["on a busy machine"]["coordinator"]["missed"] == 1
    idle = found["returns"]["on an idle machine"]
    coordinator, member = idle["coordinator"], idle["member"]
    assert (coordinator["num"], coordinator["missed"], coordinator["median_s"], coordinator["max_s"]) == (
        3,
        1,
        3.0,
        5.5,
    )
    assert (member["num"], member["missed"], member["num_hit_again"], member["max_s"]) == (3, 2, 1, 30.0)
    assert member["while_others_were_hit"]["seconds_of_those_back"]["median"] == 12.0
    assert found["kills"] == 8 and found["kills_by_role_and_way"] == {"coordinator/event": 2, "member/clock": 6}
    assert found["cold_starts_of_the_coordinator"] == [{"cold_s": 4.0}]


def test_rewards_are_compared_in_pairs_with_students_t(chaos_summary: ModuleType) -> None:
    rows = [row("push_pull-april", [0.1, 0.1, *[0.4 + difference] * 8]) for difference in (-0.01, 0.0, 0.04)]
    found = chaos_summary.whole_of([*rows, row("pull-sync", [0.0] * 10)])["reward_in_push_pull"]
    assert found["pairs"] == 3 and found["difference"] == 0.01
    # Of -.01, 0 and .04 the standard deviation is .02646, and that of their mean .01528; t of two degrees is 4.303.
    assert found["interval"] == pytest.approx([0.01 - 4.303 * 0.015275, 0.01 + 4.303 * 0.015275], abs=1e-4)
    assert found["gain_of_the_undisturbed"] == [0.3, 0.0]
