"""What Rollover is installed with."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from pathlib import Path

from packaging.requirements import Requirement

from rollover.errors import EXTRAS

ROOT = Path(__file__).parent.parent


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
UNPINNED = ("wandb", "trackio")
"""Extras that the tests do without."""


def extra(name: str) -> dict[str, Requirement]:
    """The requirements of an extra by name, without its references to other extras."""
    listed = [Requirement(line) for line in PROJECT["optional-dependencies"][name]]
    return {r.name: r for r in listed if r.name != PROJECT["name"]}


def requirements(without: Collection[str] = ()) -> dict[str, Requirement]:
    """What ``pyproject.toml`` asks for, by name: the core and the extras, except those named in ``without``."""
    core = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    return core | {
        k: r for name in PROJECT["optional-dependencies"] if name not in without for k, r in extra(name).items()
    }


def pins() -> dict[str, str]:
    """By name: the version that ``constraints.txt`` allows."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w-]+)==([\w.]+)", line) for line in lines if not line.startswith("#")]
    return {m[1]: m[2] for m in found if m is not None}


def test_each_dependency_is_tested_in_one_version_within_its_range() -> None:
    asked, pinned = requirements(without=UNPINNED), pins()
    assert sorted(asked) == sorted([*pinned, "triton"]), "torch pins the Triton of its own builds"
    assert [name for name, version in pinned.items() if not asked[name].specifier.contains(version)] == []


def test_every_dependency_is_bounded_where_a_major_release_may_break() -> None:
    built_with = {r.name: r for r in map(Requirement, PYPROJECT["build-system"]["requires"])}
    asked = requirements() | built_with
    unbounded = [name for name, r in asked.items() if not any(s.operator == "<" for s in r.specifier)]
    assert unbounded == []


def test_the_message_about_a_missing_module_names_the_extra_that_brings_it() -> None:
    named = {module.replace("_", "-"): name for name, modules in EXTRAS.items() for module in modules}
    for name in EXTRAS:
        assert {each for each in named if named[each] == name} <= {*extra(name)} <= {*named}
    assert {*EXTRAS, "all", "test", "docs", "dev"} == {*PROJECT["optional-dependencies"]}


def test_all_holds_what_the_six_parts_need() -> None:
    (everything,) = map(Requirement, PROJECT["optional-dependencies"]["all"])
    assert everything.extras == {"train", "tasks", "report", "plan", "swarm", "lora"}
