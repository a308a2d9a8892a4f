"""Mutation testing: how many small faults in the core do the tests find?

    python benchmarks/mutants.py draw --out mutants.json                     # 220 mutants of the tree at hand
    python benchmarks/mutants.py run mutants.json --out results.json         # each before the tests of its room
    python benchmarks/mutants.py run mutants.json --tree ../former --out former.json
    python benchmarks/mutants.py compare former.json results.json

A mutant changes one expression or drops one statement. It is named by room, function, statement and occurrence, so that
the same mutant can be made in another version of the code; a mutant whose statement is gone there is *absent* and not
compared. The tests of the mutant's room that name its module run first, then the rest of its room, then the other tests
that name it; the first failure kills the mutant and is recorded. A test run past the limit of processor time or memory
counts as killed, because the mutant does not end.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEMORY_BYTES = 12 * 2**30
"""Address space of a test run: a mutant may never stop allocating."""
KILLER = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)

ROOMS = {
    "rollout": ["rollout/**/*.py"],
    "algorithms": ["algorithms/**/*.py"],
    "weights": ["weights/**/*.py"],
    "trainer": ["trainer/minibatch.py", "trainer/packing.py", "trainer/balancing.py"],
    "engine/embedded": [f"engine/embedded/{name}.py" for name in ("block_manager", "scheduler", "sampler")],
    "swarm": ["swarm/coordinator/machine/**/*.py"],
    "planner": ["planner/milp.py"],
}
"""The rooms whose mutants are drawn, in equal shares by their number of possible mutants' square roots."""

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.FloorDiv: "*", ast.Div: "*"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: ``statement``, the ``occurrence``-th such text in ``function``, becomes ``mutated``."""

    room: str
    module: str
    function: str
    statement: str
    occurrence: int
    mutated: str
    kind: str


@dataclass(frozen=True, slots=True)
class Place:
    """A simple statement or the head of a compound one in a file."""

    path: Path
    function: str
    occurrence: int
    start: int
    end: int
    text: str
    node: ast.stmt


def places(path: Path) -> Iterator[Place]:
    """Yield the statements inside the functions of a file; offsets count characters."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, ast.stmt, int, int]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None) if isinstance(child, ast.ClassDef | FUNCTIONS) else None
            inner = f"{function}.{name}".lstrip(".") if name else function
            if isinstance(child, ast.stmt) and function and not isinstance(child, ast.ClassDef | FUNCTIONS):
                start, end = (
                    offset(child.lineno, child.col_offset),
                    offset(child.end_lineno or 0, child.end_col_offset or 0),
                )
                body = getattr(child, "body", None)
                if body:  # the head alone
                    end = (
                        offset(body[0].lineno, 0)
                        if body[0].lineno > child.lineno
                        else offset(body[0].lineno, body[0].col_offset)
                    )
                yield function, child, start, end
            yield from visit(child, inner)

    seen: Counter[tuple[str, str]] = Counter()
    for function, node, start, end in visit(ast.parse(source), ""):
        text = source[start:end].rstrip()
        yield Place(path, function, seen[function, text], start, start + len(text), text, node)
        seen[function, text] += 1


def changes(place: Place) -> Iterator[tuple[str, str]]:
    """Yield (kind, text of the mutated statement)."""
    node, text = place.node, place.text
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield "dropped statement", "pass"
    if isinstance(node, ast.AugAssign):
        yield "dropped statement", "pass"
    for found in _own_expressions(node):
        segment = _segment(node, text, found)
        if segment is None:
            continue
        start, end = segment
        before, after = text[:start], text[end:]
        if isinstance(found, ast.Compare) and len(found.ops) == 1:
            left, right = _segment(node, text, found.left), _segment(node, text, found.comparators[0])
            if left and right:
                between = text[left[1] : right[0]]
                operator = between.replace(between.strip(" ()"), COMPARISONS[type(found.ops[0])])
                yield "comparison", text[: left[1]] + operator + text[right[0] :]
        elif isinstance(found, ast.BinOp) and type(found.op) in ARITHMETIC:
            left, right = _segment(node, text, found.left), _segment(node, text, found.right)
            if left and right and text[left[1] : right[0]].strip(" ()") in {"+", "-", "*", "/", "//"}:
                between = text[left[1] : right[0]]
                old = between.strip(" ()")
                yield (
                    "arithmetic",
                    text[: left[1]] + between.replace(old, ARITHMETIC[type(found.op)]) + text[right[0] :],
                )
        elif isinstance(found, ast.Constant) and type(found.value) is int:
            yield "off by one", f"{before}{found.value + 1}{after}"
        elif isinstance(found, ast.UnaryOp) and isinstance(found.op, ast.Not):
            yield "negation", f"{before}({text[start:end].removeprefix('not ')}){after}"
        elif isinstance(found, ast.BoolOp) and len(found.values) == 2:
            left, right = _segment(node, text, found.values[0]), _segment(node, text, found.values[1])
            old, new = ("and", "or") if isinstance(found.op, ast.And) else ("or", "and")
            if left and right:
                yield "connective", text[: left[1]] + text[left[1] : right[0]].replace(old, new) + text[right[0] :]


def _own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    heads = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    for head in heads:
        yield from (found for found in ast.walk(head) if isinstance(found, ast.expr))


def _segment(statement: ast.stmt, text: str, node: ast.expr) -> tuple[int, int] | None:
    """(start, end) of an expression within the text of its statement, or None if it is not within."""
    lines = text.split("\n")

    def offset(line: int, column: int) -> int | None:
        at = line - statement.lineno
        if at >= len(lines):
            return None
        shift = statement.col_offset if at == 0 else 0
        return sum(len(above) + 1 for above in lines[:at]) + column - shift

    start = offset(node.lineno, node.col_offset)
    end = offset(node.end_lineno or 0, node.end_col_offset or 0)
    return (start, end) if start is not None and end is not None and text.isascii() else None


def draw(tree: Path, count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants, shared among the rooms by the square root of their number of possible ones."""
    choices: dict[str, list[Mutant]] = {}
    for room, patterns in ROOMS.items():
        paths = sorted({path for pattern in patterns for path in (tree / "rollover").glob(pattern)})
        choices[room] = [
            Mutant(room, str(p.relative_to(tree)), place.function, place.text, place.occurrence, mutated, kind)
            for p in paths
            for place in places(p)
            for kind, mutated in changes(place)
            if "raise" not in place.text and "log" not in place.text.split("(")[0] and _is_valid(p, place, mutated)
        ]
    weights = {room: len(found) ** 0.5 for room, found in choices.items()}
    total = sum(weights.values())
    return [
        mutant
        for room, found in choices.items()
        for mutant in random.Random(f"{seed}-{room}").sample(
            found, min(len(found), round(count * weights[room] / total))
        )
    ]


def _is_valid(path: Path, place: Place, mutated: str) -> bool:
    source = path.read_text()
    try:
        ast.parse(source[: place.start] + mutated + source[place.end :])
    except SyntaxError:
        return False
    return True


def apply(mutant: Mutant, tree: Path) -> tuple[Path, str] | None:
    """Return the file and its mutated text, or None if the statement is not in this tree."""
    own = tree / mutant.module
    others = sorted((tree / "rollover" / mutant.room).rglob("*.py"))
    for path in [own, *others] if own.exists() else others:
        for place in places(path):
            if (place.function, place.text, place.occurrence) == (mutant.function, mutant.statement, mutant.occurrence):
                source = path.read_text()
                return path, source[: place.start] + mutant.mutated + source[place.end :]
    return None


def tests_of(path: Path, tree: Path, room: str) -> list[list[str]]:
    """Return the room's tests that name the module, the rest of the room's tests, and the other tests that name it."""
    dotted = ".".join(path.relative_to(tree).with_suffix("").parts)
    package, _, name = dotted.rpartition(".")
    home = tree / "tests" / room
    rings: tuple[list[str], list[str], list[str]] = ([], [], [])
    for test in sorted((tree / "tests").rglob("test_*.py")):
        naming = dotted in (text := test.read_text()) or f"from {package} import {name}" in text
        if naming or test.is_relative_to(home):
            ring = 2 if not test.is_relative_to(home) else 0 if naming else 1
            rings[ring].append(str(test.relative_to(tree)))
    return [ring for ring in rings if ring]


def _bounded(limit_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))


def judge(mutant: Mutant, tree: Path, arguments: Sequence[str], limit_s: int) -> tuple[str, str]:
    """Return (``killed``, the test that failed or ``limit``), (``survived``, "") or (``absent``, "")."""
    made = apply(mutant, tree)
    if made is None:
        return "absent", ""
    path, mutated = made
    original = path.read_text()
    path.write_text(mutated)
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for ring in tests_of(path, tree, mutant.room):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments, *ring]
            try:
                done = subprocess.run(
                    command,
                    cwd=tree,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=20 * (limit_s + 4 * len(ring)),
                    preexec_fn=partial(_bounded, limit_s + 4 * len(ring)),
                )
            except subprocess.TimeoutExpired:
                return "killed", "limit"
            if done.returncode not in (0, 5):
                found = KILLER.search(done.stdout)
                return "killed", found.group(1) if found else "limit"
        return "survived", ""
    finally:
        path.write_text(original)


def run(
    mutants: Sequence[Mutant], tree: Path, arguments: Sequence[str], limit_s: int, jobs: int
) -> Iterator[tuple[str, str]]:
    """Yield the verdicts in the order of the mutants; each job works in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for i in range(jobs):
            copy = Path(folder) / str(i)
            shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "build", ".mypy_cache"))
            copies.append(copy)
        with ThreadPoolExecutor(jobs) as pool:
            free = list(copies)

            def work(mutant: Mutant) -> tuple[str, str]:
                copy = free.pop()
                try:
                    return judge(mutant, copy, arguments, limit_s)
                finally:
                    free.append(copy)

            yield from pool.map(work, mutants)


def compare(before: Path, after: Path) -> None:
    """Print both counts over the mutants that exist in both, and the survivors."""
    rows = [json.loads(path.read_text())["mutants"] for path in (before, after)]
    both = [(b, a) for b, a in zip(*rows, strict=True) if "absent" not in (b["verdict"], a["verdict"])]
    killed = [sum(pair[i]["verdict"] == "killed" for pair in both) for i in (0, 1)]
    print(f"{len(both)} mutants in both: killed before {killed[0]}, after {killed[1]}")
    for old, new in both:
        if new["verdict"] == "survived":
            print(f"  survives ({old['verdict']} before): {new['module']} {new['function']}: {new['mutated']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=220)
    drawing.add_argument("--seed", type=int, default=0)
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("--pytest", default="", help="arguments of pytest, separated by spaces")
    running.add_argument(
        "--limit-s", type=int, default=60, help="processor seconds of a test run, beside four for each of its files"
    )
    running.add_argument("--jobs", type=int, default=2)
    for each in (drawing, running):
        each.add_argument("--tree", type=Path, default=ROOT)
        each.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        compare(options.before, options.after)
        return
    if options.command == "draw":
        rows = [asdict(mutant) for mutant in draw(options.tree, options.count, options.seed)]
        print(Counter(row["room"] for row in rows), Counter(row["kind"] for row in rows))
    else:
        rows = json.loads(options.mutants.read_text())["mutants"]
        mutants = [Mutant(**{key: row[key] for key in Mutant.__slots__}) for row in rows]
        verdicts = run(mutants, options.tree.resolve(), options.pytest.split(), options.limit_s, options.jobs)
        for row, (verdict, killer) in zip(rows, verdicts, strict=True):
            row["verdict"], row["killer"] = verdict, killer
            print(verdict, killer, row["module"], row["function"], "|", row["mutated"].split("\n")[0][:80], flush=True)
        print(Counter(row["verdict"] for row in rows))
    options.out.write_text(json.dumps({"mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
