"""The page on embedding shows a whole program and what it prints: both are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rollover.errors import EXTRAS
from rollover.rollout.journal import Journal
from rollover.rollout.ledger import Ledger

ROOT = Path(__file__).parent.parent
MAX_LINES = 60


def block(language: str) -> str:
    """The only block of ``language`` on the page."""
    page = (ROOT / "docs" / "embedding.md").read_text()
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_program_on_the_page_prints_what_the_page_says_and_needs_the_core_alone(tmp_path: Path) -> None:
    program = block("python")
    assert len(program.splitlines()) <= MAX_LINES
    modules = [module for extra in EXTRAS.values() for module in extra]
    (tmp_path / "core.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({modules}))\nimport program\n")
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "core.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == block("text")
    journal = Journal(tmp_path / "journal.sqlite")
    ledger = Ledger(event for _, event in journal.read())
    journal.close()
    ledger.check()
    assert ledger.next_step == 4
    assert ledger.parked, "a run that stopped here could go on"
