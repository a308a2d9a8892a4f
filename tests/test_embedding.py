"""The page on embedding shows two whole programs and what they print: all of it is true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollover.errors import EXTRAS
from rollover.rollout.events import SegmentEnded
from rollover.rollout.journal import read_events
from rollover.rollout.ledger import Ledger
from rollover.rollout.strategies import STRATEGIES
from tests.speed import within

ROOT = Path(__file__).parent.parent
MAX_LINES = 75


def blocks(language: str) -> list[str]:
    """The blocks of ``language`` on the page."""
    page = (ROOT / "docs" / "embedding.md").read_text()
    return [str(found) for found in re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]


PROGRAMS = [*zip(blocks("python"), blocks("text"), strict=True)]


@pytest.mark.parametrize("program", [program for program, _ in PROGRAMS], ids=["scheduler", "driver"])
def test_the_programs_use_the_public_door_alone(program: str) -> None:
    assert len(program.splitlines()) <= MAX_LINES
    tree = ast.parse(program)
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules - {*sys.stdlib_module_names} == {"rollover"}


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=["scheduler", "driver"])
def test_programs_print_what_the_page_says_and_need_the_core_alone(program: str, printed: str, tmp_path: Path) -> None:
    modules = [module for extra in EXTRAS.values() for module in extra]
    (tmp_path / "core.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({modules}))\nimport program\n")
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "core.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=within(60),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_first_program_serves_every_strategy(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is recorded under the version that sampled it, no call is longer than its budget, and a run could
    resume the journal."""
    monkeypatch.chdir(tmp_path)
    own = {"april": '"over_sampling_batch_size": 6', "token_budget": '"tokens_per_round": 5'}.get(kind, "")
    bound = "" if STRATEGIES[kind].on_policy else '"max_staleness": 3, '
    program = PROGRAMS[0][0]
    for old, new in (
        ('"april"', f'"{kind}"'),
        ('"max_staleness": 3, "over_sampling_batch_size": 6', bound + own),
        ("max_context_tokens=4096", "max_context_tokens=4096, in_flight_update=True"),
        ("self.noise.randrange(20)", "self.noise.randrange(20) and 1 + self.version"),
    ):
        assert old in program
        program = program.replace(old, new)
    exec(program, {})
    ledger = Ledger(event for _, event in read_events(Path("journal.sqlite")))
    ledger.check()
    assert ledger.next_step == 4
    segments = [e.segment for _, e in read_events(Path("journal.sqlite")) if isinstance(e, SegmentEnded)]
    assert {s.policy_version for s in segments} >= {0, 1, 2}
    assert all({*s.token_ids} <= {0, 1 + s.policy_version} for s in segments)
    assert (max(len(s.token_ids) for s in segments) == 5) is (kind == "token_budget")
