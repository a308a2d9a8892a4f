"""The public names of the package, and what they need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rollover

ROOT = Path(__file__).parent.parent
PUBLIC = [
    "STRATEGIES",
    "Batch",
    "Capabilities",
    "Chunk",
    "ConsumeBatch",
    "Engine",
    "FinishReason",
    "GenerateRequest",
    "Group",
    "Journal",
    "Ledger",
    "Limits",
    "Prompt",
    "RolloutDriver",
    "RolloutState",
    "RolloverError",
    "RunConfig",
    "SampleId",
    "SamplingParams",
    "Scheduler",
    "Segment",
    "StartSample",
    "Statistics",
    "StopAll",
    "Strategy",
    "Trajectory",
    "View",
    "WeightTarget",
    "__version__",
    "simulate",
    "train",
]


def test_these_are_the_public_names() -> None:
    assert sorted(rollover.__all__) == sorted(PUBLIC)
    assert {*PUBLIC} <= {*dir(rollover)}


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_can_be_used_and_says_what_it_is(name: str) -> None:
    found = getattr(rollover, name)
    if name not in ("STRATEGIES", "__version__"):
        assert found.__name__ == name
        assert found.__doc__ and not found.__doc__.startswith(f"{name}(")


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "rollover" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (alias.name, node.module.removeprefix("rollover."))
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == {*rollover.PUBLIC_MODULES.items()}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Schedular'"):
        _ = rollover.Schedular


def test_the_package_and_its_public_names_need_the_core_alone() -> None:
    code = (
        "import sys, rollover\n"
        "loaded = [m for m in sys.modules if m.startswith('rollover.')]\n"
        "assert not loaded, loaded\n"
        "for extra in sum(map(list, __import__('rollover.errors').errors.EXTRAS.values()), []):\n"
        "    sys.modules[extra] = None\n"
        "for name in rollover.__all__:\n"
        "    getattr(rollover, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_rollover_train_trains_as_the_command_line_does(experiment: Path) -> None:
    run = rollover.train("run.toml", ["--steps", "1", "--logging.progress", "off"], run_dir="out")
    assert run == Path("out")
    assert (run / "report.html").is_file()
    assert (run / "checkpoints" / "step_1" / "model.safetensors").is_file()


def test_rollover_train_leaves_nothing_behind_when_the_run_cannot_begin(experiment: Path) -> None:
    with pytest.raises(rollover.RolloverError, match="nowhere"):
        rollover.train("run.toml", ["--model.path", "nowhere/at-all"], run_dir="out")
    assert not Path("out").exists()


def test_every_public_name_has_an_example() -> None:
    documented = [name for name in rollover.__all__ if name not in ("__version__", "STRATEGIES")]
    assert [name for name in documented if "Example" not in (getattr(rollover, name).__doc__ or "")] == []
