"""The example trains a model on public names alone, and goes on where it was stopped."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.speed import within

EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo_in_one_file.py"
STEP = re.compile(r"^step (\d+): reward ([\d.]+), \d+ tokens, (\d+) of them sampled by older weights", re.MULTILINE)
ACCOUNT = re.compile(r"decoded (\d+) = trained (\d+) \+ wasted (\d+) \+ live (\d+)")


def test_the_example_is_short_and_uses_the_public_door_alone() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 200
    nodes = [*ast.walk(ast.parse(text))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert modules - {*sys.stdlib_module_names} == {"rollover", "transformers"}


def test_the_example_learns_rolls_over_and_resumes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process as a user starts it, and in this one."""
    argv = f"{EXAMPLE} {tiny_model} {tmp_path} --learning-rate 3e-3 --max-new-tokens 60 --steps".split()
    command = [sys.executable, *argv, "8"]
    before = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=within(300)).stdout
    first = STEP.findall(before)
    assert [int(step) for step, _, _ in first] == [*range(1, 9)]
    assert sum(int(older) for _, _, older in first) > 0
    monkeypatch.setattr(sys, "argv", [*argv, "10"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    after = capsys.readouterr().out
    second = STEP.findall(after)
    assert [int(step) for step, _, _ in second] == [9, 10]
    assert float(second[-1][1]) > float(first[0][1]) + 0.05
    (account,), (resumed,) = ACCOUNT.findall(before), ACCOUNT.findall(after)
    for decoded, *places in (account, resumed):
        assert int(decoded) == sum(map(int, places))
    assert int(resumed[1]) > int(account[1])  # the second process counts on from the first
    assert [folder.name for folder in tmp_path.glob("step_*")] == ["step_10"]
