"""Rollover can be installed beside each trainer that it runs inside: no range of its own excludes one of theirs.

``make test-resolver`` asks pip the same, with all that these need in turn; it takes an index and some minutes.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PEERS = tomllib.loads((Path(__file__).parent / "pins.toml").read_text())


def ranges(requirements: Iterable[str]) -> Mapping[str, SpecifierSet]:
    parsed = [Requirement(text) for text in requirements]
    return {
        canonicalize_name(r.name): r.specifier for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})
    }


def clashes(ours: Mapping[str, SpecifierSet], theirs: Mapping[str, SpecifierSet]) -> list[str]:
    """What no version can satisfy on both sides. A common range begins at a version that one side names."""
    found = []
    for name in sorted(ours.keys() & theirs.keys()):
        both = ours[name] & theirs[name]
        named = {specifier.version.removesuffix(".*") for specifier in both} | {"0"}
        if both and not any(both.contains(version, prereleases=True) for version in named):
            found.append(f"{name} {both}")
    return found


@pytest.mark.parametrize("peer", PEERS)
def test_the_core_fits_beside_it(peer: str) -> None:
    assert clashes(ranges(PROJECT["dependencies"]), ranges(PEERS[peer]["requirements"])) == []


@pytest.mark.parametrize("extra", ["train", "tasks", "lora"])
def test_trl_fits_beside_what_trains_with_it(extra: str) -> None:
    theirs = ranges(importlib.metadata.requires("trl") or [])
    assert theirs.keys() >= {"transformers", "datasets", "numpy"}
    ours = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    assert clashes(ranges(ours), theirs) == []


def test_an_engine_of_ours_fits_into_slimes_image() -> None:
    theirs = ranges(PEERS["SGLang 0.5.15"]["requirements"])
    assert clashes(ranges(PROJECT["optional-dependencies"]["train"]), theirs) == []


def test_a_clash_is_seen() -> None:
    assert clashes(ranges(["a>=1.26,<3"]), ranges(["a<2", "b"])) == []
    assert clashes(ranges(["a>=1.26,<3"]), ranges(["A>=2.0.0"])) == []
    assert clashes(ranges(["a>=2,<3", "b>=1"]), ranges(["a==1.9", "b"])) == ["a <3,==1.9,>=2"]
    assert clashes(ranges(["a>=2,<3"]), ranges(["a>=3.1"])) == ["a <3,>=2,>=3.1"]
