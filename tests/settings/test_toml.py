from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.errors import ConfigError
from rollover.settings.toml import dumps, parse, read

TEXT = '''\
seed = 1  # the first
model.path = "x = y"

[rollout]
sizes = [
  1,
  2,
]
text = """
[not.a.table]
seed = 2
"""
[[tasks.train]]
name = "a"
config = { k = 1 }
[tasks.train.reward]
kind = "exact"
[[tasks.train]]
name = "b"
["odd name"]
'''


def test_every_key_knows_the_line_it_was_written_on() -> None:
    lines = parse(TEXT, "run.toml").lines
    wanted = {
        ("seed",): 1,
        ("model",): 2,
        ("model", "path"): 2,
        ("rollout",): 4,
        ("rollout", "sizes"): 5,
        ("rollout", "sizes", 1): 5,
        ("rollout", "text"): 9,
        ("tasks",): 13,
        ("tasks", "train"): 13,
        ("tasks", "train", 0): 13,
        ("tasks", "train", 0, "name"): 14,
        ("tasks", "train", 0, "config", "k"): 15,
        ("tasks", "train", 0, "reward"): 16,
        ("tasks", "train", 0, "reward", "kind"): 17,
        ("tasks", "train", 1): 18,
        ("tasks", "train", 1, "name"): 19,
        ("odd name",): 20,
    }
    assert {path: lines.get(path) for path in wanted} == wanted
    assert ("not",) not in lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\nb = = 2\n", r"bad\.toml:2:5: Invalid value"),
        (b"a = 1\na = 2\n", r"bad\.toml:2:\d+: Cannot overwrite a value"),
        (b"a = [1,", r"bad\.toml: .*end of document"),
        (b"a = " + b"1" * 5000, r"bad\.toml: a number has thousands of digits"),
        (b"a = " + b"[" * 5000, r"bad\.toml: lists or tables are nested too deeply"),
        (b"a = '\xff'", r"bad\.toml: not UTF-8 text \(byte 5\)"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(file, "bad.toml")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file"):
        read(tmp_path / "gone.toml")


_strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _strings
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_strings, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(_strings, _values, max_size=5))
def test_what_is_written_is_what_was_meant_and_each_key_has_a_line(data: dict[str, object]) -> None:
    text = dumps(data)
    document = parse(text, "written")
    assert document.data == data
    assert {path[0] for path in document.lines} == data.keys()
    assert all(1 <= line <= text.count("\n") for line in document.lines.values())


def test_an_unset_key_is_written_as_a_comment() -> None:
    assert dumps({"a": None, "b": 1, "t": {"c": None}}) == "b = 1\n# unset: a\n\n[t]\n# unset: c\n"


def test_a_long_text_is_parsed_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of Windows, whose first bytes say so."""
    real, parsed = tomllib.loads, []
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or real(text))
    (tmp_path / "run.toml").write_text('text = """\n' + "a line\n" * 500 + '"""\nseed = 1\n', encoding="utf-8-sig")
    document = read(tmp_path / "run.toml")
    assert document.lines == {("text",): 1, ("seed",): 503}
    assert len(parsed) < 8
