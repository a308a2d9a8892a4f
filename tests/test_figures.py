"""Every measured figure of the documentation has a record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_docs import generator

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "reference" and p.stem != "configuration"),
]
FIGURE = re.compile(r"\d ?(?:×|%|percent\b|times\b|points\b|(?:tokens|tok|trajectories|GB|MB)/s|ms\b)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
UNITS = (1, 100, 1e3, 1e-3, 1e-6, 1e-9)
"""Factors between a number in a record and on a page: 0.14 is 14 %, and 0.007 s are 7 ms."""
STATED = {"planner": {"25%", "0.43 times"}, "simulator": {"95 %"}}
"""Figures beside others with a record that are settings, or follow from catalogue entries."""
RECORD = re.compile(r"(?:benchmarks|tests|docs/generate_\w+\.py)(?:/[\w./*-]+)?")
ARITHMETIC = {"Failed responses", "Assumptions and limits", "How to read the table"}
"""Sections whose figures are settings or follow from the formula beside them."""


def sections(page: Path) -> list[tuple[str, str]]:
    """Return (title, text without code blocks) of the sections of a page."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_section_with_measured_figures_names_their_record(page: Path) -> None:
    without = [
        title
        for title, text in sections(page)
        if FIGURE.search(text) and not RECORD.search(text) and title not in ARITHMETIC
    ]
    assert without == []


def recorded(text: str) -> list[float]:
    """Return all numbers of the records that a text names."""
    named = [path.rstrip(".") for path in RECORD.findall(text) if path.startswith("benchmarks/results/")]
    files = {file for path in named for file in ROOT.glob(path) if file.is_file()}
    return [float(found.replace(",", "")) for file in files for found in NUMBER.findall(file.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_beside_the_name_of_a_record_are_in_it(page: Path) -> None:
    wrong = []
    for _, text in sections(page):
        values = [value * unit for value in recorded(text) for unit in UNITS]
        text = re.sub(r"<!-- figures.*?<!-- end -->", "", text, flags=re.DOTALL)
        for figure in re.findall(rf"(?<![\w.,])\d[\d,.]*{FIGURE.pattern[2:]}", text):
            number = NUMBER.match(figure)[0].replace(",", "")  # type: ignore[index]
            margin = 0.501 * 10.0 ** -len(number.partition(".")[2])
            is_there = any(abs(value - float(number)) <= margin for value in values)
            if values and not is_there and figure not in STATED.get(page.stem, ()):
                wrong.append(figure)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_records_that_a_page_names_exist(page: Path) -> None:
    named = {path.rstrip(".") for _, text in sections(page) for path in RECORD.findall(text) if "/" in path}
    assert sorted(path for path in named if not list(ROOT.glob(path.rstrip("/")))) == []


def test_generated_figures_are_what_their_records_say() -> None:
    module = generator("generate_figures")
    assert [page for page in module.PAGES if module.render(page) != (ROOT / page).read_text()] == [], "run: make docs"
