from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rollover.errors import DataError
from rollover.workload.source import DEFAULT_PROMPT_TOKENS, read_file
from rollover.workload.trace import TracePrompt

SAMPLES: list[dict[str, Any]] = [
    {"prompt": "a", "length": 5, "prompt_tokens": 11},
    {"prompt": "b", "length": 9, "prompt_tokens": 12},
    {"prompt": "a", "length": 7, "prompt_tokens": 11, "finished": False},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "a", "lengths": [5, 7], "prompt_tokens": 11, "finished": [True, False]},
    {"prompt": "b", "lengths": [9], "prompt_tokens": 12},
]


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows, _schema(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _schema(rows: list[dict[str, Any]]) -> pyarrow.Schema:
    values = {key: value for row in rows for key, value in row.items()}
    return pyarrow.Table.from_pylist([values]).schema


@pytest.mark.parametrize("rows", [SAMPLES, PROMPTS], ids=["a row a sample", "a row a prompt"])
@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_all_forms_of_a_file_say_the_same(tmp_path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    trace = read_file(written(tmp_path / name, rows), cap_tokens=20)
    assert trace.cap_tokens == 20
    assert trace.prompts == (
        TracePrompt(prompt_id="a", prompt_tokens=11, lengths=(5, 7), unfinished=frozenset({1})),
        TracePrompt(prompt_id="b", prompt_tokens=12, lengths=(9,)),
    )


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    trace = read_file(written(tmp_path / "t.jsonl", [{"lengths": [3, 8]}, {"lengths": [2]}]))
    assert trace.cap_tokens == 8
    assert [p.lengths for p in trace.prompts] == [(3, 8), (2,)]
    assert {p.prompt_tokens for p in trace.prompts} == {DEFAULT_PROMPT_TOKENS}
    assert read_file(tmp_path / "t.jsonl", cap_tokens=5) == trace.capped(5), "longer ones are cut"


MISTAKES = [
    ('{"prompt": "a", "length": -3}', ":2: a response must have at least 1 token, got -3"),
    ('{"prompt": "a", "length": 0}', ":2: a response must have at least 1 token, got 0"),
    ('{"prompt": "a", "length": 2.5}', ":2: a length must be a whole number of tokens, got 2.5"),
    ('{"prompt": "a", "length": true}', ":2: a length must be a whole number of tokens, got True"),
    ('{"prompt": "a", "lenght": 3}', ":2: unknown column 'lenght'; did you mean 'length'?"),
    ('{"prompt": "a"}', ":2: a row has either 'length', of one sample, or 'lengths'"),
    ('{"prompt": "a", "length": 3, "lengths": [3]}', ":2: a row has either 'length', of one sample, or 'lengths'"),
    ('{"length": 3}', ":2: a sample's row needs 'prompt', so that siblings can be grouped"),
    ('{"prompt": "a", "lengths": []}', ":2: 'lengths' must be a list of at least one whole number, got []"),
    ('{"lengths": [1, 2], "finished": [true]}', ":2: 'finished' must be true or false for each of 2 lengths"),
    ('{"lengths": [1], "prompt_tokens": 0}', ":2: 'prompt_tokens' must be a whole number from 1 to 16777216, got 0"),
    ('{"prompt": "a", "length": 3', ":2: not JSON: "),
    ("[3, 4]", ":2: expected an object with a prompt and its lengths, got [3, 4]"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f'{{"prompt": "z", "length": 4}}\n{line}\n')
    with pytest.raises(DataError) as raised:
        read_file(file, cap_tokens=20)
    assert str(raised.value).startswith(f"{file}{message}")


def test_a_mistake_in_parquet_is_named_with_its_row(tmp_path: Path) -> None:
    file = written(tmp_path / "t.parquet", [{"prompt": "a", "length": 3}, {"prompt": "a", "length": 0}])
    with pytest.raises(DataError, match=r"t.parquet, row 2: a response must have at least 1 token, got 0"):
        read_file(file)


def test_files_that_are_not_what_their_name_says_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("t.parquet", b"not parquet", "not a readable Parquet file"),
        ("t.jsonl", b"\xff\xfe\x00", "not UTF-8 text"),
        ("e.jsonl", b"\n\n", "the trace is empty"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_file(tmp_path / name)
    with pytest.raises(DataError, match=r"gone.jsonl cannot be read: No such file"):
        read_file(tmp_path / "gone.jsonl")
