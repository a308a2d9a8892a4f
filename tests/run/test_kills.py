"""A short form of the kill campaign; ``benchmarks/kills.py`` is the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import Case, kill_and_resume


@pytest.mark.parametrize(
    "case",
    [
        Case(strategy="rollover", unit="sample", overlap=True, steps=4),
        Case(strategy="april", deterministic=True, adapters=True, steps=4),
        Case(strategy="bounded_async", episodes="tree", steps=4),
    ],
    ids=lambda case: case.name,
)
def test_a_run_killed_at_random_moments_ends_as_the_laws_say(case: Case, tiny_model: Path, tmp_path: Path) -> None:
    found = kill_and_resume(case, tiny_model, tmp_path / "case", num_kills=2, seed=1)
    assert found.num_kills == 2
