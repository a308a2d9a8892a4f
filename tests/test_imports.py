"""What a fresh interpreter imports: commands answer at once, and scheduling and reporting never load torch."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

from tests.speed import within

ROOT = Path(__file__).parent.parent
ROOMS_WITHOUT_TORCH = ("cli", "rollout", "report", "tasks", "workload", "frontier", "planner")


def python(code: str) -> str:
    """Output of ``code`` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=within(120), check=True
    )
    return done.stdout.strip()


def test_help_answers_within_half_a_second_and_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "rollover", "train", "--help"]
    times_s = []
    for _ in range(5):
        start_s = cpu_s_of_children()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=within(60), check=True)
        times_s.append(cpu_s_of_children() - start_s)
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "click" in imported
    assert not {"torch", "transformers", "numpy", "pydantic", "datasets"} & imported
    # CPU time, the least of five: what the program needs, not what else the machine was doing.
    assert min(times_s) < 0.5


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_scheduling_reporting_tasks_and_configs_import_without_torch() -> None:
    light = [name_of(module) for module in sorted((ROOT / "rollover").rglob("*.py")) if needs_no_torch(module)]
    assert {"rollover.cli", "rollover.rollout.driver", "rollover.report", "rollover.trainer.config"} <= {*light}
    guilty = python(
        "import sys, importlib\n"
        f"for name in {light}:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'transformers'} & {*sys.modules}:\n"
        "        print(name); break"
    )
    assert not guilty, f"{guilty} imports torch"


def name_of(module: Path) -> str:
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needs_no_torch(module: Path) -> bool:
    place = module.relative_to(ROOT / "rollover").parts
    if place == ("__main__.py",):
        return False  # a program, not a library
    return len(place) == 1 or place[0] in ROOMS_WITHOUT_TORCH or module.name == "config.py"


def test_a_config_loads_without_torch_and_with_few_modules() -> None:
    """The settings of a run are one file for each kind of engine, strategy, source, reward and environment, and little
    else."""
    code = (
        "import sys; from pathlib import Path; import rollover.run.config;"
        "files = [m.__file__ for name, m in sys.modules.items() if name.startswith('rollover.')];"
        "print(sum('import' in Path(file).read_text() for file in files));"
        "from rollover.run.building import restore;"
        "restore({'model': {'scratch': {'max_position': 2048}}}, 'x'); print('torch' in sys.modules)"
    )
    num_modules, has_torch = python(code).split()
    assert int(num_modules) <= 83 and has_torch == "False"
