"""The example trains a model on public names alone, and goes on where it was stopped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.speed import within

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "grpo_in_one_file.py"
STEP = re.compile(r"^step (\d+): reward ([\d.]+), \d+ tokens, (\d+) of them sampled by older weights", re.MULTILINE)
ACCOUNT = re.compile(r"decoded (\d+) = trained (\d+) \+ wasted (\d+) \+ live (\d+)")


def run(model: Path, folder: Path, steps: int) -> str:
    command = [sys.executable, str(EXAMPLE), str(model), str(folder), "--steps", str(steps)]
    options = ["--learning-rate", "3e-3", "--max-new-tokens", "60"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT, timeout=within(300))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_is_short_and_uses_the_public_door_alone() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 200
    modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names
    }
    assert modules - {*sys.stdlib_module_names} == {"rollover", "transformers"}


def test_the_example_learns_rolls_over_and_resumes(tiny_model: Path, tmp_path: Path) -> None:
    before = run(tiny_model, tmp_path, 8)
    first = STEP.findall(before)
    assert [int(step) for step, _, _ in first] == [*range(1, 9)]
    assert sum(int(older) for _, _, older in first) > 0
    after = run(tiny_model, tmp_path, 10)
    second = STEP.findall(after)
    assert [int(step) for step, _, _ in second] == [9, 10]
    assert float(second[-1][1]) > float(first[0][1]) + 0.05
    (account,), (resumed,) = ACCOUNT.findall(before), ACCOUNT.findall(after)
    for decoded, *places in (account, resumed):
        assert int(decoded) == sum(map(int, places))
    assert int(resumed[1]) > int(account[1])  # the second process counts on from the first
