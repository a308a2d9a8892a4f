"""Modules of users that do not come back from their import."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from rollover.environments import user_function
from rollover.environments.episodes.instances import ClassConfig
from rollover.environments.episodes.tools import ToolsConfig
from rollover.environments.rewards import FunctionConfig
from rollover.environments.rewards.base import RewardSpec
from rollover.errors import DataError
from tests.speed import within

WRITE_PID = "import os\nopen('pid', 'w').write(str(os.getpid()))\n"


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("leaves", "import os\nos._exit(0)\n", "imports the module 'leaves' died (exit code 0); move script code"),
        ("leaves_with_a_code", "import os\nos._exit(5)\n", "'leaves_with_a_code' died (exit code 5); move script"),
        ("kills_itself", "import os\nos.kill(os.getpid(), 9)\n", "'kills_itself' was killed (SIGKILL); was it out of"),
        ("hangs", WRITE_PID + "while True: pass\n", "importing 'hangs' took more than 1 s; move script code"),
    ],
)
def test_a_module_whose_import_never_returns_is_reported_and_ended(
    module: str, code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_function, "_IMPORT_TIMEOUT_S", 1.0 if module == "hangs" else 120.0)
    Path(f"{module}.py").write_text(code)
    config = FunctionConfig(function=f"{module}:f")
    for use in (config.needed_columns, lambda: config.check(RewardSpec(source="s", config=config))):
        with pytest.raises(DataError, match=re.escape(message)):
            use()
    if module == "hangs":
        deadline_s = time.monotonic() + within(10.0)
        while Path("/proc", Path("pid").read_text()).exists():
            assert time.monotonic() < deadline_s, "the module still runs"
            time.sleep(0.01)


@pytest.mark.parametrize("code", ["def f(completions): return [1.0]\n", "1 / 0\n", "raise SystemExit(3)\n"])
def test_what_an_import_raises_is_left_to_the_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fine.py").write_text(code)
    user_function._check_import("fine", str(tmp_path))


def test_a_tool_nobody_can_import_is_no_template_s_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serves.py").write_text("import os\nos._exit(0)\n")
    for settings in (ToolsConfig(functions=("serves:search",)), ClassConfig(factory="serves:Search")):
        with pytest.raises(DataError, match=r"imports the module 'serves' died \(exit code 0\)"):
            settings.schemas()
