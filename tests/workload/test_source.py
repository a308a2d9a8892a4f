from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollover import cli
from rollover.errors import ConfigError, DataError, RunError
from rollover.workload.law import LengthLaw
from rollover.workload.report import law_toml
from rollover.workload.source import PRESETS, read_lengths, read_trace
from rollover.workload.trace import Trace
from tests.workload.kit import LAW, drawn


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_are_presets_and_aliases() -> None:
    assert read_lengths("qwen3-16k") == PRESETS["qwen3-16k"]
    assert read_lengths("math-16k") == PRESETS["r1-16k"]
    assert read_lengths("r1-16k", cap_tokens=1000) == replace(PRESETS["r1-16k"], cap_tokens=1000)


def test_a_law_comes_back_from_its_file() -> None:
    law = replace(LAW, drift_per_1k_prompts=0.01)
    Path("mine.toml").write_text(law_toml(law, ("fitted to something",)))
    assert read_lengths("mine.toml") == law


def test_a_file_may_change_a_preset() -> None:
    Path("mine.toml").write_text('preset = "heavy-32k"\nsigma = 1.3\n')
    assert read_lengths("mine.toml") == replace(PRESETS["heavy-32k"], sigma=1.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('preset = "heavy-32k"\nsigmaa = 1.3\n', "mine.toml:2: sigmaa: unknown key; did you mean 'sigma'?"),
        ('preset = "heavy"\n', "mine.toml:1: preset: unknown workload 'heavy'"),
        ("preset = 3\n", "mine.toml:1: preset: expected the name of a preset, got 3"),
        ('preset = "r1-16k"\nicc = 7.0\n', "mine.toml:2: icc must be in [0, 1], got 7.0"),
        (f'preset = "r1-16k"\ncap_tokens = {2**62}\n', "mine.toml:2: cap_tokens must be at most 16777216, got"),
        ("median_tokens = 100.0\nsigma = 1.0\n", "mine.toml: icc: this key is required"),
        ("sigma = \n", "mine.toml:1:9: "),
    ],
)
def test_a_mistake_in_a_workload_file_is_named_with_its_line(text: str, message: str) -> None:
    Path("mine.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_lengths("mine.toml")
    assert message in str(raised.value)


def test_what_cannot_be_found_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown workload 'r1-16': it is not a preset; did you mean 'r1-16k'"):
        read_lengths("r1-16")
    with pytest.raises(ConfigError, match=r"gone.toml: no such file"):
        read_lengths("gone.toml")
    with pytest.raises(RunError, match=r"has no config.json"):
        read_lengths(".")
    with pytest.raises(DataError, match="gone does not exist; give a run directory or a file of lengths"):
        read_trace("gone")


def test_a_file_of_lengths_is_a_trace() -> None:
    Path("t.jsonl").write_text('{"lengths": [3, 8]}\n')
    found = read_lengths("t.jsonl")
    assert isinstance(found, Trace)
    assert found.cap_tokens == 8


# -- the command ----------------------------------------------------------------------------------------------------


def test_fitting_writes_a_workload_that_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": p.prompt_id, "lengths": p.lengths} for p in drawn(LAW, 100).prompts]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["workload", "fit", "t.jsonl", "--cap", "8192", "--out", "mine.toml"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "KS distance" in said
    law = read_lengths("mine.toml")
    assert isinstance(law, LengthLaw)
    assert law.cap_tokens == 8192
    assert f"{law.sigma:.3f}" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.jsonl"], "gone.jsonl cannot be read"),
        (["bad.jsonl"], "bad.jsonl:1: a response must have at least 1 token, got -4"),
        (["good.jsonl", "--out", "no/where.toml"], "the folder 'no' does not exist"),
        (["good.jsonl", "--caps", "7"], "no such option"),
        (["good.jsonl"], "1 of 2 responses ended by themselves"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.jsonl").write_text('{"prompt": 1, "length": -4}\n')
    Path("good.jsonl").write_text('{"lengths": [3, 8]}\n')
    assert cli.main(["workload", "fit", *arguments]) == 2
    assert message.lower() in capsys.readouterr().err.lower()


@pytest.mark.parametrize("name", ["r1-16k", "lengths.jsonl"])
def test_a_cap_that_no_response_can_reach_is_refused(name: str) -> None:
    Path("lengths.jsonl").write_text('{"prompt": "a", "length": 512}\n')
    message = "a cap of 16777217 tokens is above the maximum of 16777216 tokens"
    with pytest.raises(ConfigError, match=message):
        read_lengths(name, cap_tokens=2**24 + 1)
    assert read_lengths(name, cap_tokens=2**24).cap_tokens == 2**24
