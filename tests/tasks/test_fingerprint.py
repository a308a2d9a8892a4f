"""Datasets that are changed, replaced or deleted under a run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.errors import DataError
from rollover.tasks import fingerprint
from rollover.tasks.config import TasksConfig
from rollover.tasks.fingerprint import DataFile, Fingerprint
from rollover.tasks.open import same_datasets
from rollover.tasks.sources import HubConfig, JsonlConfig, ReasoningGymConfig, SourceConfig
from tests.tasks.kit import EXACT, jsonl, sums


def file_of(path: Path, count: int = 5) -> SourceConfig:
    return jsonl(path, *sums(count), name="sums")


def recorded(tasks: TasksConfig) -> dict[str, Fingerprint]:
    """As a run's directory gives it back."""
    back: dict[str, Fingerprint] = json.loads(json.dumps(same_datasets(tasks, None)))
    return back


def test_the_same_files_are_the_same_also_when_they_were_written_again(tmp_path: Path) -> None:
    source = file_of(tmp_path / "a.jsonl")
    tasks = TasksConfig(train=(source,), eval=(source,))
    before = recorded(tasks)
    assert before.keys() == {"train/sums", "eval/sums"}
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert same_datasets(tasks, before) == before
    file_of(tmp_path / "a.jsonl")
    assert same_datasets(tasks, before) == before


@pytest.mark.parametrize("role", ["train", "eval"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + '{"question": "9", "answer": "9"}\n', r"changed since the run began \(\d+ bytes then, \d+ now"),
        (lambda text: text.replace("3+1", "3+2"), r"changed since the run began \(\d+ bytes as before, with other content"),
        (None, r"a dataset of this run is missing: source 'sums': no file .*a.jsonl"),
    ],
)  # fmt: skip
def test_another_or_no_file_is_named_with_what_to_do(tmp_path: Path, role: str, change: Any, message: str) -> None:
    file = tmp_path / "a.jsonl"
    tasks = TasksConfig(**{role: (file_of(file),)})  # type: ignore[arg-type]
    before = recorded(tasks)
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text()))
    with pytest.raises(DataError, match=message) as caught:
        same_datasets(tasks, before)
    text = str(caught.value)
    assert str(file) in text and "\n" not in text
    assert f"restore the original dataset, give its new path on --resume, or start a new run ({role}/sums)" in text


def test_evaluation_rows_may_change_if_training_does_not_leave_them_out(tmp_path: Path) -> None:
    tasks = TasksConfig(train=(file_of(tmp_path / "a.jsonl"),), eval=(file_of(tmp_path / "b.jsonl"),))
    before = recorded(tasks)
    file_of(tmp_path / "b.jsonl", 6)
    with pytest.raises(DataError, match="its rows are no longer those that the run keeps out of training; restore"):
        same_datasets(tasks, before)
    tasks = replace(tasks, keep_eval_out=False)
    now = same_datasets(tasks, before)
    assert now["train/sums"] == before["train/sums"]
    assert now["eval/sums"]["sha256"] != before["eval/sums"]["sha256"]
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="that the run has counted; restore"):
        same_datasets(tasks, now)


def test_a_source_without_a_record_is_recorded_unless_generated(tmp_path: Path) -> None:
    gym = ReasoningGymConfig(name="chain_sum")
    tasks = TasksConfig(train=(gym, file_of(tmp_path / "a.jsonl")))
    assert same_datasets(tasks, {}).keys() == {"train/sums"}
    with pytest.raises(DataError, match=r"no file gone.jsonl .* correct its path"):
        same_datasets(TasksConfig(train=(JsonlConfig(name="s", path="gone.jsonl", reward=EXACT),)), None)


def test_of_a_large_file_size_ends_and_blocks_between_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(fingerprint, "_NUM_BLOCKS", 4)
    path = tmp_path / "large"
    content = bytes(range(250)) * 40
    seen = []
    for place in (None, 0, 9, 10, 3330, 3339, 3340, 9989, 9990, 9999):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 255
        path.write_bytes(changed)
        seen.append(DataFile(path).content)
    whole, *others = seen
    assert [place != whole for place in others] == [True, True, False, True, True, False, False, True, True]
    path.write_bytes(content + b"\0")
    assert DataFile(path).content != whole


def test_of_a_saved_dataset_rows_count_and_not_files(tmp_path: Path) -> None:
    import datasets

    def saved(name: str, table: list[dict[str, Any]]) -> TasksConfig:
        datasets.Dataset.from_list(table).save_to_disk(tmp_path / name)
        return TasksConfig(train=(HubConfig(name="s", path=str(tmp_path / name), reward=EXACT),))

    before = recorded(saved("one", sums(9)))
    assert before["train/s"]["size"] == 9 and before["train/s"]["unit"] == "rows"
    same_datasets(saved("again", sums(9)), before)
    changed = sums(9)
    changed[4]["question"] = "?"
    with pytest.raises(DataError, match="9 rows as before, with other content"):
        same_datasets(saved("changed", changed), before)
    with pytest.raises(DataError, match="9 rows then, 8 now"):
        same_datasets(saved("shorter", sums(8)), before)


def test_a_file_that_changes_while_it_is_read_yields_no_wrong_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    opened = file_of(path).open(seed=0)
    assert opened[2] == sums(5)[2]
    os.utime(path, (1, 1))
    assert opened[2] == sums(5)[2]
    file_of(path)
    assert opened[2] == sums(5)[2], "written again as it was"
    path.write_text(path.read_text().replace("0+1", "9+1"))
    with pytest.raises(DataError, match=r"a.jsonl changed while it was being read"):
        opened[2]
    path.unlink()
    with pytest.raises(DataError, match=r"a.jsonl cannot be read: No such file or directory"):
        opened[2]
