"""The page on TRL shows whole scripts and what is logged: they are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas
import pytest

from rollover.report.record import read_run
from tests.integrations.slime.kit import shows_its_run
from tests.integrations.trl.kit import logged

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "trl.md").read_text()


def script(trainer: str) -> str:
    """The script on the page that trains with this trainer."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if f"trainer = {trainer}(" in block)
    return str(found)


def run(max_steps: int) -> Any:
    """The trainer of the script, after so many steps."""
    whole = script("GRPOTrainer")
    shortened = whole.replace("max_steps=40", f"max_steps={max_steps}").replace("save_steps=10", "save_steps=1")
    assert shortened != whole
    shortened = shortened.replace(
        "output_dir",
        "log_completions=True, num_completions_to_print=0, logging_steps=1, disable_tqdm=True, use_cpu=True, output_dir",
    )
    names: dict[str, Any] = {}
    exec(compile(shortened, "train.py", "exec"), names)
    return names["trainer"]


def test_the_script_trains_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(2)
    assert len(logged(first, "reward")) == 2
    listed = [name for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE) for name in re.findall("`(.*?)`", row)]
    assert len(listed) == 8
    known = {name for row in first.state.log_history for name in row}
    for name in listed:
        assert any(re.fullmatch(re.escape(name).replace(r"\*", ".*"), seen) for seen in known), name
    again = run(5)
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [1, 2, 3, 4, 5]
    steps = [row.step for row in read_run(tmp_path / "out" / "_rollover").metrics if row.kind == "step"]
    assert steps == [0, 1, 2, 3, 4]
    shows_its_run(tmp_path / "out" / "_rollover")
    written = pandas.read_parquet(tmp_path / "out/completions/completions_00005.parquet")
    assert len(written) == 64 and {"prompt", "completion"} <= {*written.columns}
    assert all(isinstance(text, str) for text in written["completion"])
