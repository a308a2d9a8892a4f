"""What the pages have users run on a length log of their own."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.integrations.slime.settings import SlimeOptions, slime_settings
from tests.integrations.slime.kit import arguments
from tests.integrations.slime.recorded import Sample

PAGES = Path(__file__).parents[2] / "docs/how-to"
TOKENIZER = str(Path(__file__).parents[1] / "run/recorded/model")
GROUPS, GROUP, CAP = 40, 4, 400
LENGTHS = [
    (group, place, CAP if group % 10 == 0 and place == 3 else 20 + 37 * ((7 * group + 3 * place) % 9))
    for group in range(GROUPS)
    for place in range(GROUP)
]
"""Group, place and number of tokens of each response; the last of each tenth group is cut off."""


def text(num_tokens: int) -> str:
    """A response as verl and TRL write it, without its end token."""
    return "1" * (num_tokens if num_tokens == CAP else num_tokens - 1)


@pytest.fixture
def of_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a page's script for lengths, and its command on ``lengths.jsonl`` with sizes of the log and less to simulate."""

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        page = (PAGES / f"{name}.md").read_text()
        scripts = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        (script,) = (script for script in scripts if "json.dumps" in script)
        (tmp_path / "lengths.py").write_text(script)
        monkeypatch.setattr(sys, "argv", ["lengths.py", *arguments])
        capsys.readouterr()
        runpy.run_path(str(tmp_path / "lengths.py"))
        printed = capsys.readouterr().out
        (tmp_path / "lengths.jsonl").write_text(printed)
        (asked,) = re.findall(r"^\$ rollover (simulate lengths\.jsonl .*)$", page, re.MULTILINE)
        command = asked.replace("--cap 16384", f"--cap {CAP}").replace("--batch-size 32", "--batch-size 4")
        command = command.replace("--group-size 8", f"--group-size {GROUP}").replace("--lag 1,2", "--lag 1")
        assert command.count("--") == 4
        options = command.replace("lengths.jsonl", str(tmp_path / "lengths.jsonl")).split()
        assert cli.main([*options, "--strategies", "april", "--seeds", "1", "--steps", "6"]) == 0
        assert "april" in capsys.readouterr().out
        return [json.loads(line) for line in printed.splitlines()]

    return run


def test_lengths_from_slimes_dumps(tmp_path: Path, of_page: Any) -> None:
    torch = pytest.importorskip("torch")
    samples = []
    for group, _, n in LENGTHS:
        status = Sample.Status.TRUNCATED if n == CAP else Sample.Status.COMPLETED
        sample = Sample(group_index=group, tokens=[1] * (9 + n), response_length=n, status=status)
        samples.append({**vars(sample), "status": status.value})
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    rows = of_page("slime", str(tmp_path / "0.pt"))
    assert len(rows) == GROUPS * GROUP
    assert rows[3] == {"prompt": "0", "length": CAP, "prompt_tokens": 9, "finished": False}


def test_slimes_settings_are_ones_that_there_are(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (block,) = re.findall(r"```yaml\n(.*?)```", (PAGES / "slime.md").read_text(), flags=re.DOTALL)
    sizes = {"rollout_batch_size": 32, "over_sampling_batch_size": 64}
    settings = slime_settings(arguments(tmp_path, 1, **sizes, **yaml.safe_load(block)))
    assert settings.hosted.rollout.strategy.kind == "april" and settings.servers.abort_timeout_s == 30.0
    assert settings.options == SlimeOptions(), "the page names defaults"


@pytest.mark.parametrize("name", ["slime", "trl", "verl"])
def test_names_on_a_page_can_be_imported(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    paths = set(re.findall(r"rollover\.integrations\.[\w.]+\.[A-Za-z]\w*", page))
    imports = re.findall(r"^from (rollover\.integrations\.[\w.]+) import (\w+)", page, flags=re.MULTILINE)
    paths |= {f"{module}.{attribute}" for module, attribute in imports}
    assert len(paths) >= 1
    for path in paths:
        module, _, attribute = path.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), path


def test_lengths_from_verls_dumps(tmp_path: Path, of_page: Any) -> None:
    rows = ({"input": f"{group}+1=", "output": text(n), "uid": f"{group}_{place}_0"} for group, place, n in LENGTHS)
    (tmp_path / "1.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = of_page("verl", TOKENIZER, str(CAP), str(tmp_path / "1.jsonl"))
    assert [row["length"] for row in found] == [n for _, _, n in LENGTHS]


@pytest.mark.parametrize("chat", [False, True])
def test_lengths_from_trls_completions(tmp_path: Path, of_page: Any, chat: bool) -> None:
    pandas = pytest.importorskip("pandas")

    def said(role: str, content: str) -> Any:
        return [{"role": role, "content": content}] if chat else content

    rows = [
        {"step": 1, "prompt": said("user", f"{group}+1="), "completion": said("assistant", text(n)), "exact": 0.0}
        for group, _, n in LENGTHS
    ]
    pandas.DataFrame(rows).assign(advantage=0.0).to_parquet(tmp_path / "completions_00001.parquet")
    found = of_page("trl", TOKENIZER, str(CAP), str(tmp_path / "completions_00001.parquet"))
    assert [row["length"] for row in found] == [n for _, _, n in LENGTHS]
    assert len({row["prompt"] for row in found}) == GROUPS
