"""The page on TRL shows whole scripts and what is logged: they are true."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import AutoTokenizer

from rollover.report.record import read_run
from rollover.types import FinishReason, Group, Prompt, SampleId, Segment, Trajectory
from tests.integrations.slime.kit import shows_its_run
from tests.integrations.trl.kit import logged

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL says that it may change
    from trl.experimental.async_grpo import AsyncGRPOTrainer

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
    again = run(4)
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [1, 2, 3, 4]
    steps = [row.step for row in read_run(tmp_path / "out" / "rollover").metrics if row.kind == "step"]
    assert steps == [0, 1, 2, 3]
    shows_its_run(tmp_path / "out" / "rollover")
    written = pandas.read_parquet(tmp_path / "out/completions/completions_00004.parquet")
    assert len(written) == 64 and {"prompt", "completion"} <= {*written.columns}
    assert all(isinstance(text, str) for text in written["completion"])


def test_the_script_of_the_asynchronous_trainer_is_whole_up_to_the_trainer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer itself needs a GPU."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {}

    class Trainer:
        def __init__(self, model: str, reward_funcs: Any, **arguments: Any) -> None:
            given.update(arguments, model=model, reward_funcs=reward_funcs)

        def train(self) -> None:
            given["trains"] = True

    monkeypatch.setattr("trl.experimental.async_grpo.AsyncGRPOTrainer", Trainer)
    whole = script("AsyncGRPOTrainer").replace("Qwen/Qwen3-0.6B", str(tiny_model))
    exec(
        compile(
            whole.replace("token_budget", "use_cpu=True, bf16=False, report_to=[], token_budget"), "train.py", "exec"
        ),
        {},
    )
    assert given["trains"] and given["weight_transfer"] is given["rollout_worker"]
    assert {*given} <= {*inspect.signature(AsyncGRPOTrainer.__init__).parameters, "trains"}
    prompt = Prompt(prompt_id="train/0@0", token_ids=(1,), text="", source="train", columns={"row": 0})
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trajectories = []
    for index, text in enumerate(("200", "201")):
        ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        segment = Segment(
            token_ids=ids,
            rollout_logprobs=(-1.0,) * len(ids),
            policy_version=0,
            kv_version=0,
            finish_reason=FinishReason.STOP,
            start_s=0.0,
            end_s=1.0,
        )
        sample = SampleId(0, index)
        trajectories.append(Trajectory(sample_id=sample, prompt=prompt, segments=(segment,), reward=0.0))
    group = Group(group_id=0, prompt=prompt, trajectories=tuple(trajectories))
    assert given["rollout_worker"]._rewards(group) == [{"is_right": 1.0}, {"is_right": 0.0}]
