"""The house rules that a machine can check and ruff does not know: ``python -m tests.house`` gives one verdict.

Findings are printed as ``file:line: what to do`` and end the command with exit code 1. The sizes of modules and
functions and the names of tests are hints, printed with ``--hints``; what counts is the budget of each room in
``budgets.toml``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rollover import PUBLIC_MODULES

ROOT = Path(__file__).parent.parent
BUDGETS = ROOT / "budgets.toml"
LONG_MODULE, LONG_FUNCTION = 400, 60
"""Lines from which a module or a function is asked whether it still holds one thing."""
MAX_TEST_NAME = 70
"""Characters of a test's name."""
FRAGMENTS = {"As", "How", "Of", "That", "Those", "What", "When", "Where", "Whether", "Which", "Whose", "Why"}
"""First words of a docstring that is no sentence."""

Findings = Iterator[str]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed source file."""

    path: Path

    @functools.cached_property
    def source(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(ast.parse(self.source))]

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def sources(folder: str) -> list[Module]:
    return [Module(path) for path in sorted((ROOT / folder).rglob("*.py"))]


# -- docstrings ---------------------------------------------------------------------------------------------------


def docstrings(module: Module) -> Findings:
    """Docstrings begin with a sentence; items under ``Args`` and ``Raises`` continue indented."""
    sections = re.compile(r"^(?:Args|Attributes|Raises):\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
    for node in module.nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text, place = ast.get_docstring(node), module.at(getattr(node, "lineno", 1))
        if not text:
            continue
        if (first := text.split()[0]) in FRAGMENTS - {"Those"}:
            yield f"{place}: the docstring begins with {first!r}: begin with a sentence"
        for section in sections.findall(text):
            for line in re.findall(r"^ {4}\S.*", section, re.MULTILINE):
                if not re.match(r"^    \*{0,2}[A-Za-z]\w*(, \*{0,2}[A-Za-z]\w*)*: ", line):
                    yield f"{place}: {line.strip()[:40]!r} continues an item: indent it below the item"


def descriptions_of_fields(module: Module) -> Findings:
    """The text below a field is a noun or a sentence."""
    for node in module.nodes:
        if not isinstance(body := getattr(node, "body", None), list):
            continue
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.Assign | ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(text := below.value.value, str)
                and text.split()[0] in FRAGMENTS
            ):
                yield f"{module.at(below.lineno)}: describe the field by a noun or a sentence"


def examples(modules: list[Module]) -> Findings:
    """The classes of the public door show an example; other records do if it says more than their fields."""
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef) or node.name not in PUBLIC_MODULES:
                continue
            if not re.search(r"\bExamples?:.*(``|>>>|\d)", ast.get_docstring(node) or "", re.DOTALL):
                yield f"{module.at(node.lineno)}: {node.name} is public: add an `Example:` with values"


# -- names, pages and folders -------------------------------------------------------------------------------------


def names_of_classes(modules: list[Module]) -> Findings:
    """No class name occurs twice."""
    places = [(node.name, module.at(node.lineno)) for module in modules for node in module.nodes if _is_class(node)]
    counts = Counter(name for name, _ in places)
    for name, place in places:
        if counts[name] > 1:
            yield f"{place}: another class is called {name}: name each after what sets it apart"


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def names_of_tests(module: Module) -> Findings:
    """Names of tests fit a line of pytest's report."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.name) > MAX_TEST_NAME:
            yield f"{module.at(node.lineno)}: {len(node.name)} characters name this test: {MAX_TEST_NAME} at most"


def links() -> Findings:
    """Pages point only at files that exist."""
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text()
        targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
        named = re.findall(r"`((?:rollover|docs|tests|benchmarks|experiments)/[\w./-]+\.\w+)`", text)
        missing = [target for target in targets if not (page.parent / target).exists()]
        missing += [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "rollover"))]
        for name in missing:
            yield f"{page.relative_to(ROOT)}: {name} does not exist"


def packages() -> Findings:
    """Two test files of one name in folders that are no packages would be taken for the same module."""
    for folder in sorted({file.parent for file in (ROOT / "tests").rglob("*.py")}):
        if not (folder / "__init__.py").exists():
            yield f"{folder.relative_to(ROOT)}: add an __init__.py"


def deep_tests() -> Findings:
    """Each line of ``tests/deep.txt`` names what exists, so that a test that was renamed is still deep."""
    for number, line in enumerate((ROOT / "tests" / "deep.txt").read_text().splitlines(), start=1):
        file, _, test = line.partition("::")
        name = re.split(r"\[|::", test)[0]
        if not (path := ROOT / file).exists() or (name and not re.search(rf"\b{name}\b", path.read_text())):
            yield f"tests/deep.txt:{number}: {line} does not exist"


# -- sizes --------------------------------------------------------------------------------------------------------


def sizes() -> dict[str, int]:
    """Return the lines of each room: the folders and files of ``rollover/`` and ``tests/``, each file of C included."""
    found: Counter[str] = Counter()
    for top in ("rollover", "tests"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".c") and "__pycache__" not in path.parts:
                room = path.relative_to(ROOT / top).parts
                name = f"{top}/{room[0]}" if len(room) > 1 else f"{top}/*.py"
                found[name] += path.read_text().count("\n")
    for top in ("rollover", "tests"):
        found[top] = sum(lines for name, lines in found.items() if name.startswith(f"{top}/"))
    return dict(found)


def budgets() -> Findings:
    """No room is larger than its budget, and each budget belongs to a room."""
    allowed: dict[str, int] = tomllib.loads(BUDGETS.read_text())["lines"]
    found = sizes()
    for room in sorted({*found, *allowed}):
        if room not in allowed:
            yield f"budgets.toml: {room} has {found[room]:,} lines and no budget: add one, and say what it is worth"
        elif room not in found:
            yield f"budgets.toml: there is no room {room}: remove its line"
        elif found[room] > allowed[room]:
            yield (
                f"budgets.toml: {room} has {found[room]:,} lines of {allowed[room]:,}: make it smaller, or raise its"
                " budget and say beside it what the growth is worth"
            )


def hints(modules: list[Module]) -> Findings:
    """Long modules and functions, the longest first: a place to look, not a verdict."""
    for module in modules:
        if (lines := module.source.count("\n")) > LONG_MODULE:
            yield f"{module.at(1)}: {lines} lines: does it still hold one thing?"
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (lines := (node.end_lineno or 0) - node.lineno) > LONG_FUNCTION:
                yield f"{module.at(node.lineno)}: {node.name}, {lines} lines: what are its parts?"


def main() -> int:
    """Print hints and findings. Returns 1 if there are findings."""
    modules, tests = sources("rollover"), sources("tests")
    if "--hints" in sys.argv:
        print(*hints(modules), *(hint for module in tests for hint in names_of_tests(module)), sep="\n")
    found = [
        *(finding for module in modules for finding in (*docstrings(module), *descriptions_of_fields(module))),
        *examples(modules),
        *names_of_classes(modules),
        *links(),
        *packages(),
        *deep_tests(),
        *budgets(),
    ]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"house: {len(modules)} modules, {sizes()['rollover']:,} lines, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
