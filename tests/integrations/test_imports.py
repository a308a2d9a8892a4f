"""The integrations of slime, miles and verl can be imported where neither torch nor any of these trainers is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.speed import within

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_they_import_no_trainer_and_no_torch_before_they_are_used() -> None:
    (contract,) = (c for c in CONTRACTS if c["name"].startswith("What the integrations share"))
    script = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({contract["forbidden_modules"]!r}))
for name in {contract["source_modules"]!r}:
    module = importlib.import_module(name)
    for _, inner, _ in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        importlib.import_module(inner)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=within(120), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
