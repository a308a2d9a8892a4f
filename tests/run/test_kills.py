"""A short form of the kill campaign; ``benchmarks/kills.py`` is the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import Case, cases, kill_and_resume


def test_the_campaign_has_every_strategy_in_both_units_and_both_ways() -> None:
    assert len(cases()) == 8 * 2 + 6 * 2 + 6


@pytest.mark.parametrize(
    "case",
    [
        Case(strategy="inflight", unit="sample"),
        Case(strategy="april", deterministic=True, adapters=True),
        Case(strategy="bounded_async", episodes="agent"),
    ],
    ids=lambda case: case.name,
)
def test_a_run_that_is_killed_at_random_moments_ends_as_the_laws_say(
    case: Case, tiny_model: Path, tmp_path: Path
) -> None:
    assert kill_and_resume(case, tiny_model, tmp_path / "case", num_kills=3, seed=1).num_kills == 3
