"""The public names of the package, and what they need."""

from __future__ import annotations

import ast
import asyncio
import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import rollover
from tests.speed import within

ROOT = Path(__file__).parent.parent
PUBLIC = sorted(rollover.__all__)
NEED_TORCH = ["EmbeddedEngine", "LocalTrainer", "TrainingSetup"]
EXAMPLE = ROOT / "examples" / "grpo_in_one_file.py"
INTERNAL = {
    "Batch": "batch",
    "GenerateRequest": "engine.base",
    "Group": "batch",
    "Ledger": "rollout.ledger",
    "OnFull": "rollout.strategy",
    "ReplicaModel": "sim.scenario",
    "Observation": "types",
    "RunConfig": "run.config",
    "STRATEGIES": "rollout.strategies",
    "SampleId": "types",
    "Scenario": "sim.scenario",
    "Strategy": "rollout.strategy",
    "Trajectory": "types",
    "View": "rollout.state",
    "Workload": "workload.base",
    "build_config": "run.building",
    "simulate": "sim.run",
}
"""Names within the package whose docstrings have examples, with their modules."""
NAMES = {name: getattr(rollover, name) for name in PUBLIC} | {
    name: getattr(import_module(f"rollover.{module}"), name) for name, module in INTERNAL.items()
}


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_can_be_used_and_says_what_it_is(name: str) -> None:
    found = getattr(rollover, name)
    assert name in dir(rollover)
    if name != "__version__":
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


def test_all_public_names_but_engine_and_trainer_need_the_core_alone() -> None:
    code = (
        "import sys, rollover\n"
        "loaded = [m for m in sys.modules if m.startswith('rollover.')]\n"
        "assert not loaded, loaded\n"
        "for extra in sum(map(list, __import__('rollover.errors').errors.EXTRAS.values()), []):\n"
        "    sys.modules[extra] = None\n"
        "for name in rollover.__all__:\n"
        f"    if name not in {NEED_TORCH}:\n"
        "        getattr(rollover, name)\n"
        "try:\n"
        "    rollover.LocalTrainer\n"
        "except rollover.RolloverError as error:\n"
        "    assert 'pip install' in str(error) and 'rollover[train]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('torch is not there')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=within(120))
    assert done.returncode == 0, done.stderr


def test_rollover_train_trains_as_the_command_line_does(experiment: Path) -> None:
    run = rollover.train("run.toml", ["--steps", "1", "--logging.progress", "off"], run_dir="out")
    assert run == Path("out")
    assert (run / "report.html").is_file()
    assert (run / "checkpoints" / "step_1" / "model.safetensors").is_file()


def test_rollover_train_leaves_nothing_behind_when_the_run_cannot_begin(experiment: Path) -> None:
    async def notebook() -> None:
        rollover.train("run.toml", run_dir="out")

    with pytest.raises(rollover.RolloverError, match=re.escape("await asyncio.to_thread(rollover.train, ...)")):
        asyncio.run(notebook())
    with pytest.raises(rollover.RolloverError, match="nowhere"):
        rollover.train("run.toml", ["--model.path", "nowhere/at-all"], run_dir="out")
    assert not Path("out").exists()


def documentation(name: str) -> str:
    """Return the docstring of a name; for a table, the text that follows it."""
    if name != "STRATEGIES":
        return NAMES[name].__doc__ or ""
    body = ast.parse((ROOT / "rollover" / "rollout" / "strategies" / "__init__.py").read_text()).body
    place = next(
        i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    text = body[place + 1]
    assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    return str(text.value.value)


def examples(name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(documentation(name), NAMES | {"Path": Path}, name, None, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_name_are_true(name: str) -> None:
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples(name), out=told.append)
    assert not told, "".join(told)


ELSEWHERE = {"train": "test_rollover_train_trains_as_the_command_line_does", "__version__": "test_cli"}
"""Names whose example takes a run or a program, with what checks it."""


def test_every_public_name_has_an_example_that_is_checked() -> None:
    """It is one of its docstring, of ``examples``, or of ``docs/embedding.md``, whose programs ``test_embedding`` runs."""
    page = (ROOT / "docs" / "embedding.md").read_text()
    imported = {
        name for line in re.findall(r"^from rollover import (.*)$", page, re.MULTILINE) for name in line.split(", ")
    }
    imported |= {
        alias.name
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "rollover"
        for alias in node.names
    }
    with_examples = {name for name in PUBLIC if examples(name).examples}
    assert {*PUBLIC} - imported - with_examples == {*ELSEWHERE}
    assert [name for name in PUBLIC if name != "__version__" and "Example" not in documentation(name)] == []
