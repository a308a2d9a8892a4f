"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from rollover.run.config import RunConfig

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "rollover").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def python(code: str) -> str:
    """Output of ``code`` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    return done.stdout.strip()


def name_of(module: Path) -> str:
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_help_answers_within_half_a_second_and_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "rollover", "train", "--help"]
    times_s = []
    for _ in range(5):
        start_s = cpu_s_of_children()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
        times_s.append(cpu_s_of_children() - start_s)
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "click" in imported
    assert not {"torch", "transformers", "numpy", "pydantic", "datasets", "plotly"} & imported
    # CPU time, the least of five: what the program needs, not what else the machine was doing.
    assert min(times_s) < 0.5


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_scheduling_reporting_tasks_and_configs_import_without_torch() -> None:
    light = [name_of(module) for module in MODULES if needs_no_torch(module)]
    assert {"rollover.cli", "rollover.rollout.driver", "rollover.report", "rollover.trainer.config"} <= {*light}
    guilty = python(
        "import sys, importlib\n"
        f"for name in {light}:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'transformers'} & {*sys.modules}:\n"
        "        print(name); break"
    )
    assert not guilty, f"{guilty} imports torch"


def needs_no_torch(module: Path) -> bool:
    place = module.relative_to(ROOT / "rollover").parts
    if place == ("__main__.py",):
        return False  # a program, not a library
    return (
        len(place) == 1
        or place[0] in ("cli", "rollout", "report", "tasks", "workload", "frontier", "planner")
        or module.name == "config.py"
    )


def test_a_config_loads_without_torch() -> None:
    code = (
        "import sys; from rollover.run.loading import restore;"
        "restore({'model': {'scratch': {'max_position': 2048}}}, 'x'); print('torch' in sys.modules)"
    )
    assert python(code) == "False"


FRAGMENTS = {"As", "How", "Of", "That", "What", "When", "Where", "Whether", "Which", "Whose", "Why"}


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_docstrings_begin_with_a_sentence(module: Path) -> None:
    nodes = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    first_words = [text.split()[0] for node in nodes if (text := ast.get_docstring(node))]
    assert not FRAGMENTS & {*first_words}


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_each_line_under_args_and_raises_names_one_or_continues_the_one_above(module: Path) -> None:
    """A line that continues an item is indented below it: otherwise readers of docstrings take it for the next item."""
    sections = re.compile(r"^(?:Args|Attributes|Raises):\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
    found = [
        line
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for section in sections.findall(ast.get_docstring(node) or "")
        for line in re.findall(r"^ {4}\S.*", section, re.MULTILINE)
        if not re.match(r"^    \*{0,2}[A-Za-z]\w*(, \*{0,2}[A-Za-z]\w*)*: ", line)
    ]
    assert not found


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_fields_are_described_by_a_noun_or_a_sentence(module: Path) -> None:
    found = [
        f"line {described.lineno}: {' '.join(text.split()[:6])}"
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(body := getattr(node, "body", None), list)
        for field, described in pairwise(body)
        if isinstance(field, ast.Assign | ast.AnnAssign)
        and isinstance(described, ast.Expr)
        and isinstance(described.value, ast.Constant)
        and isinstance(text := described.value.value, str)
        and text.split()[0] in FRAGMENTS | {"Those"}
    ]
    assert not found


VERBS = frozenset(
    re.findall(
        r"\S+",
        """
        Abort Accept Account Accumulate Acknowledge Add Admit Allocate Allow Announce Answer Append Apply
        Arrange Ask Assign Attend Average Begin Borrow Bring Build Call Carry Change Check Choose Clip Close
        Collect Combine Compare Compile Compress Compute Connect Continue Convert Copy Count Create Cut Deal
        Decide Decode Delete Derive Describe Determine Discard Divide Do Download Draw Drop Empty Encode End
        Enter Escape Estimate Evaluate Exchange Exclude Expand Expect Explain Extrapolate Fetch Fill Find
        Fine-tune Fit Fix Follow Force Forget Format Free Gather Generate Give Group Grow Hand Handle Hash Have
        Hide Hold Identify Implement Import Index Invert Join Keep Kill Lay Leave Let List Load Locate Lock Look
        Make Map Match Measure Merge Move Name Normalise Note Notice Open Overwrite Pack Park Parse Perform Plan
        Prefer Prepare Print Probe Process Promise Propose Prove Publish Put Queue Raise Read Reap Reassign
        Rebuild Record Redact Redirect Refuse Register Reject Release Remember Remove Rename Renew Renumber
        Reorder Repair Replace Report Restart Resume Retrieve Return Run Save Say Scale Score See Send Serve Set
        Shard Share Show Sign Simulate Solve Sort Split Spread Start Stop Store Stream Sum Summarise Suppress
        Swap Switch Tabulate Take Tell Thaw Tokenise Train Treat Try Turn Unwrap Use Wait Wake Whiten Work Write
        Yield
        """,
    )
)
"""The verbs that docstrings of functions begin with. Many are nouns too: none of these takes "of" as its next word."""


def is_imperative(text: str) -> bool:
    first, *rest = text.split()
    return first.rstrip(",.:") in VERBS and rest[:1] not in (["of"], ["is"], ["are"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the next batch, consumed and journaled.", True),
        ("Stop.", True),
        ("The next batch, consumed and journaled.", False),
        ("Waiting and parked samples in order.", False),
        ("Returns the next batch.", False),
        ("Score of each response.", False),
        ("``None`` where there is no batch.", False),
    ],
)
def test_an_imperative_is_told_from_a_noun_phrase(text: str, expected: bool) -> None:
    assert is_imperative(text) == expected


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_docstrings_of_functions_begin_with_an_imperative(module: Path) -> None:
    found = [
        f"line {node.lineno}: {' '.join(text.split()[:6])}"
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and not is_imperative(text)
    ]
    assert not found, "begin with a verb in the imperative; if there is one already, add it to VERBS"


CLASSES = {
    node.name: node
    for module in MODULES
    for node in ast.walk(ast.parse(module.read_text()))
    if isinstance(node, ast.ClassDef)
}
RECORD_BASES = frozenset({"Struct", "NamedTuple", "Enum", "StrEnum", "IntEnum", "BaseModel", "TypedDict"})


def names(expressions: list[ast.expr]) -> set[str]:
    """The last part of each name: ``Struct`` for ``msgspec.Struct``, ``dataclass`` for ``dataclass(frozen=True)``."""
    return {re.split(r"[(\[]", ast.unparse(expression))[0].rpartition(".")[2] for expression in expressions}


def is_record(node: ast.ClassDef) -> bool:
    parents = names(node.bases)
    return bool(RECORD_BASES & parents) or any(is_record(CLASSES[name]) for name in parents & {*CLASSES} - {node.name})


def needs_example(node: ast.ClassDef) -> bool:
    is_told = "dataclass" in names(node.decorator_list) or "Protocol" in names(node.bases) or is_record(node)
    return is_told and not node.name.startswith("_") and node.name not in sections_of_the_config()


@functools.cache
def sections_of_the_config() -> frozenset[str]:
    """The classes that docs/configuration.md describes setting by setting, and their base classes."""
    found: set[str] = set()

    def enter(hint: object) -> None:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__name__ not in found:
            found.update(base.__name__ for base in hint.__mro__ if dataclasses.is_dataclass(base))
            hints = get_type_hints(hint)
            inner = [hints[field.name] for field in dataclasses.fields(hint)]
        else:
            inner = [*get_args(hint)]
        for part in inner:
            enter(part)

    enter(RunConfig)
    return frozenset(found)


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_records_and_protocols_have_an_example(module: Path) -> None:
    bare = [
        node.name
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef)
        and needs_example(node)
        and not re.search(r"\bExamples?:.*(``|>>>|\d)", ast.get_docstring(node) or "", re.DOTALL)
    ]
    assert not bare, "add an `Example:` with values to the docstring of each"


def test_imports_go_down_only() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    if not os.path.exists(command[0]):
        pytest.skip("import-linter is not installed; make check runs it")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout


def test_every_module_says_what_it_is() -> None:
    silent = [name_of(m) for m in MODULES if not ast.get_docstring(ast.parse(m.read_text()))]
    assert not silent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_point_only_at_files_that_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
    named = re.findall(r"`((?:rollover|docs|tests|benchmarks|experiments)/[\w./-]+\.\w+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "rollover"))]
    assert not missing


def test_test_folders_are_packages() -> None:
    """Two test files of one name in folders that are no packages would be taken for the same module."""
    folders = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_class_name_occurs_twice() -> None:
    classes = Counter(
        node.name
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    repeated = {name for name, count in classes.items() if count > 1}
    assert not repeated, "name each class after what sets it apart"


MAX_MODULE_LINES, MAX_FUNCTION_LINES = 500, 75


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_rooms_stay_small(module: Path) -> None:
    source = module.read_text()
    assert len(source.splitlines()) <= MAX_MODULE_LINES, "does this module still hold one thing?"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, (
                f"{node.name} is long: what are its parts?"
            )
