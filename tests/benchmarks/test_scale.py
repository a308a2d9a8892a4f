"""The benchmark of the sharded trainer runs to its end in its shortest form, and records what it says it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.speed import within

ROOT = Path(__file__).parents[2]


def recorded(tmp_path: Path, script: str, *argv: str) -> dict[str, Any]:
    """Run a script as a user does and return the result that it writes."""
    out = tmp_path / "found.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("SGLANG_PYTHON", None)
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *argv, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=within(240),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_scale_compares_steps_and_deals(tmp_path: Path) -> None:
    found = recorded(tmp_path, "scale.py", "--small")
    one, same, half = (found["step"][way] for way in ("one process", "FSDP2 over 1 rank", "FSDP2 over 2 ranks"))
    assert one["of_one_process"] == 1.0 and len(half["held_mib"]) == 2
    assert one["held_mib"] == same["held_mib"] and sum(half["held_mib"]) == pytest.approx(one["held_mib"][0], rel=0.1)
    for ranks, row in found["dealing_recorded"].items():
        assert 1.0 <= row["busiest_over_mean"] < row["in_turn"] < float(ranks)
