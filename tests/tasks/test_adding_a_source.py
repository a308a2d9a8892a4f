"""A task source is one file and one row: the config, prompts, the check on resume and the documentation then know it."""

from __future__ import annotations

from pathlib import Path

from tests.package_copy import PackageCopy

SOURCE = '''
"""``kind = "csv"``: a table with a heading and a row per line."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any, Literal

from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import FileSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvConfig(FileSettings):
    """Takes prompts from a table with a heading and a row per line."""

    kind: Literal["csv"] = "csv"
    """``"csv"`` chooses a table."""
    delimiter: str = ","
    """Stands between two columns."""

    def open(self, seed: int) -> DatasetRows:
        with self.file().open(newline="") as file:
            return self._not_empty(CsvRows(self.path, list(csv.DictReader(file, delimiter=self.delimiter))))


class CsvRows:
    def __init__(self, path: str, rows: list[dict[str, Any]]) -> None:
        self._path = path
        self._rows = rows

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[row]

    def where(self, row: int) -> str:
        return f"{self._path}, row {row + 1}"
'''

USE = """
import os
from pathlib import Path
import rollover
from rollover.errors import RolloverError
from rollover.run.building import restore
from rollover.settings.plain import resolved
from rollover.settings import toml
from rollover.settings.schema import build
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import check_source, train_source
from rollover.tasks.open import same_datasets
from tests.environments.words import char_tokenizer

assert Path(rollover.__file__).is_relative_to(os.getcwd())

def tasks(text):
    return build(TasksConfig, toml.parse("[[train]]\\nreward = { kind = 'exact' }\\nname = 'sums'\\npath = 'sums.csv'\\n" + text, "run.toml"))

def told(act):
    try:
        act()
    except RolloverError as error:
        print(str(error).replace(os.getcwd(), "HERE"))

told(lambda: tasks("kind = 'jsonl'\\ndelimiter = ';'"))
told(lambda: tasks("kind = 'csv'\\nsplit = 'test'"))
wanted = tasks("kind = 'csv'\\ndelimiter = ';'")
told(lambda: train_source(wanted, char_tokenizer(), seed=0))
Path("sums.csv").write_text("question;answer\\n1+1;2\\n2+2;4\\n3+3;6\\n")
source = train_source(wanted, char_tokenizer(), seed=0)
prompts = [source.prompt(i) for i in range(6)]
print(sorted({p.prompt_id for p in prompts}))
print(sorted({(p.text, p.columns["answer"], source.solution(p)) for p in prompts}))
print(check_source(wanted.train[0], wanted, char_tokenizer())[0].num_given)
run = resolved(restore({"model": {"path": "m"}, "tasks": resolved(wanted)}, "config.json"))
assert restore(run, "config.json").tasks == wanted
recorded = same_datasets(wanted, None)
same_datasets(wanted, recorded)
Path("sums.csv").write_text("question;answer\\n1+1;3\\n2+2;4\\n3+3;6\\n")
told(lambda: same_datasets(wanted, recorded))
"""


def test_a_source_is_one_file_and_one_row(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    package.add_kind("rollover/tasks/sources/csv_table.py", SOURCE, name="CsvConfig", last="HubConfig")
    *lines, changed = package.run(USE).splitlines()
    assert lines == [
        "run.toml:6: train.0.delimiter: unknown key of kind 'jsonl'; it belongs to kind 'csv'",
        "run.toml:6: train.0.split: unknown key of kind 'csv'; it belongs to kind 'hf'",
        "source 'sums': no file sums.csv (relative to HERE); correct its path",
        "['sums/0@0', 'sums/0@1', 'sums/1@0', 'sums/1@1', 'sums/2@0', 'sums/2@1']",
        "[('1+1', '2', '2'), ('2+2', '4', '4'), ('3+3', '6', '6')]",
        "3",
    ]
    assert changed.startswith("sums.csv has changed since the run began (34 bytes as before, with other content")
    page = package.configuration_page()
    assert (
        '## `[[tasks.train]]` of kind `"csv"`\n\nTakes prompts from a table with a heading and a row per line.\n'
        in page
    )
    assert '- **`delimiter`** (string; default `","`). Stands between two columns.\n' in page
