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
GROUPS, GROUP, CAP = 40, 4, 400


def length(group: int, place: int) -> int:
    """The last of each tenth group is cut off."""
    return CAP if group % 10 == 0 and place == 3 else 20 + 37 * ((7 * group + 3 * place) % 9)


@pytest.fixture
def of_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a page's script for lengths, and leaves ``lengths.jsonl`` as its console does."""

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        script = tmp_path / "lengths.py"
        script.write_text(script_of(name))
        monkeypatch.setattr(sys, "argv", ["lengths.py", *arguments])
        capsys.readouterr()
        runpy.run_path(str(script))
        printed = capsys.readouterr().out
        (tmp_path / "lengths.jsonl").write_text(printed)
        return [json.loads(line) for line in printed.splitlines()]

    return run


def script_of(name: str) -> str:
    """The script for lengths, which prints JSON."""
    scripts = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
    (script,) = (script for script in scripts if "json.dumps" in script)
    return str(script)


def simulate(page: str, folder: Path) -> None:
    """Run the page's command on the lengths, with sizes of the log and less to simulate."""
    (asked,) = re.findall(
        r"^\$ rollover (simulate lengths\.jsonl .*)$", (PAGES / f"{page}.md").read_text(), re.MULTILINE
    )
    command = asked.replace("--cap 16384", f"--cap {CAP}").replace("--batch-size 32", "--batch-size 4")
    command = command.replace("--group-size 8", f"--group-size {GROUP}").replace("--lag 1,2", "--lag 1")
    assert command.count("--") == 4
    options = command.replace("lengths.jsonl", str(folder / "lengths.jsonl")).split()
    assert cli.main([*options, "--strategies", "april", "--seeds", "1", "--steps", "6"]) == 0


def test_lengths_from_slimes_dumps(tmp_path: Path, of_page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    samples = []
    for group in range(GROUPS):
        for place in range(GROUP):
            n = length(group, place)
            status = Sample.Status.TRUNCATED if n == CAP else Sample.Status.COMPLETED
            sample = Sample(group_index=group, tokens=[1] * (9 + n), response_length=n, status=status)
            samples.append({**vars(sample), "status": status.value})
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    rows = of_page("slime", str(tmp_path / "0.pt"))
    assert len(rows) == GROUPS * GROUP
    assert rows[3] == {"prompt": "0", "length": CAP, "prompt_tokens": 9, "finished": False}
    simulate("slime", tmp_path)
    assert "april" in capsys.readouterr().out


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


def test_lengths_from_verls_dumps(tmp_path: Path, of_page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Path(__file__).parents[1] / "run/recorded/model"
    with (tmp_path / "1.jsonl").open("w") as file:
        for group in range(GROUPS):
            for place in range(GROUP):
                n = length(group, place)
                text = "1" * (n if n == CAP else n - 1)  # the end token is left out of what verl writes
                file.write(json.dumps({"input": f"{group}+1=", "output": text, "uid": f"{group}_{place}_0"}) + "\n")
    rows = of_page("verl", str(tokenizer), str(CAP), str(tmp_path / "1.jsonl"))
    assert [row["length"] for row in rows[:GROUP]] == [length(0, place) for place in range(GROUP)]
    simulate("verl", tmp_path)
    assert "april" in capsys.readouterr().out


@pytest.mark.parametrize("chat", [False, True])
def test_lengths_from_trls_completions(
    tmp_path: Path, of_page: Any, capsys: pytest.CaptureFixture[str], chat: bool
) -> None:
    pandas = pytest.importorskip("pandas")
    tokenizer = Path(__file__).parents[1] / "run/recorded/model"
    rows: dict[str, list[Any]] = {"step": [], "prompt": [], "completion": [], "exact": [], "advantage": []}
    for group in range(GROUPS):
        for place in range(GROUP):
            n = length(group, place)
            asked, text = (
                f"{group}+1=",
                "1" * (n if n == CAP else n - 1),
            )  # the end token is left out of what TRL writes
            rows["step"].append(1)
            rows["prompt"].append([{"role": "user", "content": asked}] if chat else asked)
            rows["completion"].append([{"role": "assistant", "content": text}] if chat else text)
            rows["exact"].append(0.0)
            rows["advantage"].append(0.0)
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions_00001.parquet")
    found = of_page("trl", str(tokenizer), str(CAP), str(tmp_path / "completions_00001.parquet"))
    assert [row["length"] for row in found[:GROUP]] == [length(0, place) for place in range(GROUP)]
    assert len({row["prompt"] for row in found}) == GROUPS
    simulate("trl", tmp_path)
    assert "april" in capsys.readouterr().out
