"""What Rollover is installed with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def requirements() -> dict[str, Requirement]:
    """By name: what ``pyproject.toml`` asks for itself, for its tests and for development."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [Requirement(line) for line in [*project["dependencies"], *extras["test"], *extras["dev"]]]
    return {r.name: r for r in listed if r.name != project["name"]}


def pins() -> dict[str, str]:
    """By name: the version that ``constraints.txt`` allows."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w-]+)==([\w.]+)", line) for line in lines if not line.startswith("#")]
    return {m[1]: m[2] for m in found if m is not None}


def test_the_tests_run_with_one_version_of_each_dependency_and_each_lies_within_its_range() -> None:
    asked, pinned = requirements(), pins()
    assert sorted(asked) == sorted(pinned)
    assert [name for name, version in pinned.items() if not asked[name].specifier.contains(version)] == []
