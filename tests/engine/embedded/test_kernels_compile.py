"""Every Triton kernel compiles for every GPU that the embedded engine is meant for, in every number format."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.speed import within

pytest.importorskip("triton")

TARGETS, NUMBERS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950"), ("bf16", "fp16", "fp32")


def test_kernels_compile_ahead_of_time() -> None:
    """In a process of its own: here the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.embedded.compile_kernels", *NUMBERS]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3], timeout=within(600)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Counter(done.stdout.splitlines()) == {f"{target} {n}": 8 for target in TARGETS for n in NUMBERS}
