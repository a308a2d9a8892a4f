"""``rollover plan`` as a user meets it: what it prints and writes, and what it refuses, with exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from rollover import cli
from rollover.planner import job
from rollover.planner.plan import Plan
from tests.planner.kit import EPISODES, QWEN_1B
from tests.speed import within

MODEL = QWEN_1B | {"tie_word_embeddings": True, "max_position_embeddings": 32768}
FLEET = """\
network = { gbit_s = 100 }

[[nodes]]
device = "h100-sxm"
num_devices = 4

[[nodes]]
device = "l4"
num_devices = 8
"""
WORK = ("--workload", "light-8k", "--num-groups", "16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "fleet.toml").write_text(FLEET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(*argv: str, fleet: str = "fleet.toml", model: str = "model") -> int:
    return cli.main(["plan", fleet, "--model", model, *WORK, "--quick", *argv])


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def say(*argv: str, fleet: str | None = None, model: str = "model") -> str:
        if fleet is not None:
            (folder / "fleet.toml").write_text(fleet)
        assert planned(*argv, model=model) == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return err

    return say


def test_it_plans_and_writes_what_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "fleet.toml", "--model", "model", *WORK, "--html", "p.html", "--json", "p.json"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    for words in ("train", "rollout", "Training throughput", "alone, for"):
        assert words in said
    made = TypeAdapter(Plan).validate_json((folder / "p.json").read_text())
    assert made.simulated_steps_per_s is not None
    assert made.alternatives
    assert "<!DOCTYPE html>" in (folder / "p.html").read_text()


def test_a_plan_on_single_responses_says_siblings_are_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "one.jsonl").write_text('{"prompt": 1, "length": 300}\n{"prompt": 2, "length": 900}\n')
    assert planned("--workload", "one.jsonl") == 0
    assert "2 of 2 prompts in one.jsonl have fewer lengths than a group of 8" in capsys.readouterr().out


def test_a_plan_for_episodes_lets_environments_hold_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "read_lengths", lambda name, cap_tokens: EPISODES)
    for option, held_s in (([], 30.0), (["--held-s", "8"], 8.0)):
        assert planned("--json", "p.json", *option) == 0
        made = TypeAdapter(Plan).validate_json((folder / "p.json").read_text())
        assert made.workload.held_s == job.scenario(made).reward.base_s == held_s
        assert f"the plan lets each be held for {held_s:.2f} s by its environment" in made.notes[0]


@pytest.mark.parametrize("name", ["8xh100", "a100-l40s", "desk", "h100-l4", "h800-h20"])
def test_packaged_fleets_can_be_planned_with(name: str, folder: Path) -> None:
    assert planned(fleet=name) == 0


def test_an_unknown_fleet_gets_the_nearest_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(fleet="h800-h21") == 2
    assert "did you mean 'h800-h20'?" in capsys.readouterr().err


def test_a_fleets_mistakes_are_named_with_file_and_line(refused: Callable[..., str]) -> None:
    said = refused(fleet=FLEET.replace('"l4"', '"l40"'))
    assert "fleet.toml:8: nodes.1.device: unknown device 'l40'; did you mean 'l40s'?" in said


def test_a_budget_needs_prices(refused: Callable[..., str]) -> None:
    fleet = FLEET.replace('device = "l4"', 'device = "mi300x"')
    said = refused("--budget", "10", fleet=fleet)
    assert "the price of mi300x is not known in USD: write price_per_hour in its [[nodes]] of fleet.toml" in said


@pytest.mark.parametrize("given", ["--budget 0", "--budget -5", "--target 0", "--target -5", "--max-staleness -1"])
def test_numbers_out_of_range_are_refused(given: str, refused: Callable[..., str]) -> None:
    option, number = given.split()
    assert option in refused(option, number)


def test_aims_that_contradict_are_refused(refused: Callable[..., str]) -> None:
    assert "--aim cost needs --target" in refused("--aim", "cost")
    assert "--aim cost needs --target" in refused("--target", "100")


def test_a_plan_for_launch_knows_the_servers_and_the_models(folder: Path, refused: Callable[..., str]) -> None:
    assert "--server has no effect without --for-launch" in refused("--server", "vllm")
    big = MODEL | {"hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32}
    (folder / "model" / "config.json").write_text(json.dumps(big))
    argv = ("--for-launch", "--json", "p.json")
    assert planned(*argv, "--server", "embedded_server") == 0
    made = TypeAdapter(Plan).validate_json((folder / "p.json").read_text())
    assert {kind.num_devices for kind in made.problem.replica_kinds} == {1}
    (folder / "one.toml").write_text('[[nodes]]\ndevice = "h100-sxm"\nnum_devices = 8\n')
    assert cli.main(["plan", "one.toml", "--model", "model", *WORK, *argv]) == 0
    made = TypeAdapter(Plan).validate_json((folder / "p.json").read_text())
    assert [a.steps_per_s for a in made.alternatives] == [made.solution.steps_per_s], "the same devices, launchable too"
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | experts))
    said = refused("--for-launch", "--server", "embedded_server")
    assert "the embedded engine cannot run model: model_type 'mixtral' is not supported" in said
    assert planned(*argv, "--server", "vllm") == 0
    assert TypeAdapter(Plan).validate_json((folder / "p.json").read_text()).obstacles == ()


def test_what_cannot_be_reached_is_explained(refused: Callable[..., str]) -> None:
    said = refused("--aim", "cost", "--target", "100000000")
    assert re.search(r"without the target, the fastest has [\d,]+ tokens/s", said)
    aim = ("--aim", "cost", "--target", "100")
    assert planned(*aim) == 0
    for limit in (["--budget", "0.01"], [*aim, "--budget", "0.01"]):
        said = refused(*limit)
        assert "no plan satisfies its limits" in said and "budget" in said
    said = refused(*aim, fleet="budget_per_hour = 0.01\n" + FLEET)
    assert "no plan satisfies its limits" in said


def test_a_missing_model_and_an_unknown_workload_are_named(refused: Callable[..., str]) -> None:
    assert "nowhere: no such folder" in refused(model="nowhere")
    assert "did you mean 'math-16k'?" in refused("--workload", "math-17k")


def test_it_plans_where_torch_is_not_installed(folder: Path) -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from rollover import cli\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    argv = ["plan", "fleet.toml", "--model", "model", *WORK]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=within(300))
    assert done.returncode == 0, done.stderr
    assert "Training throughput" in done.stdout
