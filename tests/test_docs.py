"""The documentation is whole, and what is generated of it is what the source says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

from rollover.algorithms.registry import ALGORITHMS, Algorithm
from rollover.rollout.strategies import SIMULATED_ONLY, STRATEGIES
from rollover.run.config import RunConfig
from rollover.settings.shape import types_at
from tests.environments.test_answers import pairs
from tests.speed import within
from tests.tasks.shapes import SHAPES
from tests.tasks.test_templates import TEMPLATES
from tests.trainer import test_experts, test_families

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "render"),
    [
        ("configuration", "configuration.render"),
        ("reference/cli", "reference.render_cli"),
        ("reference/api", "reference.render_api"),
        ("reference/what-works", "reference.render_works"),
    ],
)
def test_a_generated_page_is_what_the_source_says(page: str, render: str) -> None:
    name, _, function = render.partition(".")
    assert (DOCS / f"{page}.md").read_text() == getattr(generator(f"generate_{name}"), function)(), "run: make docs"


def test_what_works_was_recorded_with_all_that_the_tests_try() -> None:
    found = generator("generate_reference").record()
    families = {*test_families.FAMILIES, *test_families.PADDED, *test_families.REFUSED, *test_experts.FAMILIES}
    assert {one["model"] for one in found["models"]} == families and len(families) >= 20
    assert [one["template"] for one in found["templates"]] == [*TEMPLATES] and len(TEMPLATES) >= 30
    assert [one["row"] for one in found["rows"]] == [shape.name for shape in SHAPES] and len(SHAPES) >= 40
    assert [one["is right"] for one in found["answers"]] == [pair.is_right for pair in pairs()] and len(pairs()) >= 120
    assert all(one["judged right"] == one["is right"] for one in found["answers"])
    refused = {one["model"] for one in found["models"] if one["result"].startswith("refused")}
    assert refused == {*test_families.REFUSED}


def test_every_public_name_is_in_the_reference() -> None:
    import rollover

    page = (DOCS / "reference" / "api.md").read_text()
    assert [name for name in rollover.__all__ if name != "__version__" and f".{name}\n" not in page] == []


def tables(page: str, head: str) -> list[list[list[str]]]:
    """Return the rows of those tables of a page whose first column is called ``head``, cell by cell."""
    found: list[list[list[str]]] = []
    is_inside = False
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == head:
            found.append([])
            is_inside = True
        elif not cells:
            is_inside = False
        elif is_inside and not cells[0].startswith("---"):
            found[-1].append(cells)
    return found


def named(rows: list[list[str]]) -> list[str]:
    return [cells[0].partition(",")[0].strip("`") for cells in rows]


def test_the_page_of_strategies_has_each_of_them() -> None:
    training, simulated = map(named, tables("strategies.md", "`kind`"))
    assert sorted(training) == sorted(STRATEGIES)
    assert sorted(simulated) == sorted(SIMULATED_ONLY)


def test_the_page_of_algorithms_has_each_of_them_with_its_clip_and_paper() -> None:
    (rows,) = tables("algorithms.md", "`name`")
    assert sorted(named(rows)) == sorted(ALGORITHMS)
    for name, cells in zip(named(rows), rows, strict=True):
        row = ALGORITHMS[name]
        clip = [] if row.objective == "reinforce" else [row.clip_low, row.clip_high]
        assert [float(number) for number in cells[3].split(",") if number] == clip, name
        assert row.paper.removeprefix("arXiv ").partition(",")[0] in cells[-1], name


def test_the_page_of_algorithms_has_each_correction() -> None:
    (rows,) = tables("algorithms.md", "`correction`")
    assert sorted(named(rows)) == sorted(get_args(get_type_hints(Algorithm)["correction"]))


SETTING = re.compile(r"`(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:[ =][^`]*)?`")
SECTIONS = {f.name for f in fields(RunConfig)} | {"reward"}
OF_OTHERS = {
    "how-to/trl.md": {"model.generate"},
    "how-to/verl.md": {
        "algorithm.filter_groups",
        "algorithm.rollout_correction",
        "rollout.n",
        "rollout.response_length",
        "trainer.default_local_dir",
        "trainer.rollout_data_dir",
        "trainer.v1.sampler.sampler_kwargs.rollover",
    },
}
"""Settings and functions of the trainers that a page is about, by page."""


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    named = {name for name in SETTING.findall(page.read_text()) if name.split(".")[0] in SECTIONS}
    others = OF_OTHERS.get(page.relative_to(ROOT).as_posix().removeprefix("docs/"), set())
    assert others <= named, "the page no longer names these"
    assert sorted(name for name in named - others if not is_setting(name)) == []


def is_setting(name: str) -> bool:
    """Whether ``name`` leads to a key of a run's config, of whichever kind; ``reward`` is the key of a task source."""
    path = (["tasks", "train", "0"] if name.startswith("reward.") else []) + name.split(".")
    return bool(types_at(RunConfig, path))


def test_a_setting_of_another_place_is_told_from_one_that_exists() -> None:
    assert is_setting("rollout.strategy.prefill_tokens_per_iteration") and is_setting("reward.workers")
    assert not is_setting("rollout.prefill_tokens_per_iteration") and not is_setting("reward.worker")


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [str(page) for page in sorted(DOCS.rglob("*.md")) if str(page.relative_to(DOCS)) not in navigation] == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make check and make docs install it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=within(240))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "api" / "index.html").exists()
