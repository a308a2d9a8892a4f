from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rollover import cli
from rollover.frontier import job
from tests.planner.kit import EPISODES, QWEN_1B

CALIBRATED = Path(__file__).parents[2] / "benchmarks" / "results" / "calibration" / "cpu.toml"
QUICK = ["--seeds", "1", "--steps", "6", "--batch-size", "4", "--group-size", "2", "--strategies", "april"]
TINY = "median_tokens = 40.0\nsigma = 0.7\nicc = 0.5\nloop_probability = 0.02\ncap_tokens = 150\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    return tmp_path


def test_a_workload_becomes_a_table_a_page_a_file_and_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "tiny.toml", *QUICK, "--lag", "0.2,9", "--out", "a.html", "--json", "a.json"]) == 0
    said = capsys.readouterr().out
    assert "No engine given: times are in iterations over an empty batch" in said
    assert "For a batch lag of at most 0.2:" in said.replace("\n", " ")
    assert Path("a.html").read_text().startswith("<!DOCTYPE html>")
    advice = json.loads(Path("a.json").read_text())["advice"]
    assert [a["lag_budget"] for a in advice] == [0.2, 9.0]
    assert tomllib.loads(advice[1]["toml"])["rollout"]["rollout_batch_size"] == 4


def test_a_calibrated_device_is_an_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command says what it leaves out of the lengths of episodes."""
    Path("config.json").write_text(json.dumps(QWEN_1B))
    monkeypatch.setattr(job, "read_lengths", lambda name, cap_tokens: EPISODES)
    own = ["--device", "this-cpu", "--catalogue", str(CALIBRATED), "--model", "."]
    assert cli.main(["simulate", "runs/r", *QUICK, *own]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Engine: 1 x Intel(R) Xeon(R)" in said and "runs/r has episodes, simulated without turns" in said


@pytest.mark.parametrize("steps", ["1", "2", "3"])
def test_a_file_of_one_response_is_enough_however_short_the_run(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").write_text('{"prompt": "a", "length": 512}\n')
    argv = ["simulate", "one.jsonl", "--seeds", "1", "--batch-size", "4", "--group-size", "4", "--steps", steps]
    assert cli.main([*argv, "--warmup", str(int(steps) - 1)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "[rollout]" in said and "1 of 1 prompts in one.jsonl have fewer lengths than a group of 4" in said


def test_a_bound_that_leaves_synchronous_rollout_alone_is_a_study() -> None:
    assert cli.main(["simulate", "tiny.toml", *QUICK[:-2], "--max-staleness", "0", "--json", "a.json"]) == 0
    points = json.loads(Path("a.json").read_text())["points"]
    assert "april" not in {p["strategy"] for p in points} and all(p["lag"] == 0 for p in points)


def test_a_setting_without_a_limit_is_no_neighbour_of_others() -> None:
    Path("s.toml").write_text(
        "[engine]\nc0_s = 0.01\nb0 = 20.0\nmax_running = 8\n"
        "[rollout]\nstrategy = 'concurrency'\nrollout_batch_size = 4\ngroup_size = 8\nmax_new_tokens = 120\n"
    )
    assert cli.main(["simulate", "tiny.toml", *QUICK[:4], "--scenario", "s.toml", "--strategies", "concurrency"]) == 0


def test_a_scenario_file_says_engine_and_current_setting(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text(
        "[engine]\nc0_s = 0.01\nb0 = 20.0\nreplicas = 2\n[trainer]\nbase_s = 0.5\n"
        "[rollout]\nstrategy = { kind = 'concurrency', num_running = 12 }\nrollout_batch_size = 4\ngroup_size = 2\n"
        "max_new_tokens = 120\n"
    )
    options = ["--scenario", "s.toml", "--json", "a.json"]
    for replicas, simulated in (([], 2), (["--replicas", "1"], 1)):
        assert cli.main(["simulate", "tiny.toml", *QUICK[:4], *options, *replicas]) == 0
        content = json.loads(Path("a.json").read_text())
        assert len(content["scenario"]["replicas"]) == simulated
    assert content["unit"] == "s"
    assert content["rollout"]["strategy"]["num_running"] == 12
    assert content["rollout"]["max_new_tokens"] == 120, "the cap of the lengths"
    assert "concurrency C=12" in [p["setting"] for p in content["points"]]
    assert "Training takes no time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r1-16"], "unknown workload 'r1-16': it is not a preset; did you mean 'r1-16k'"),
        (["tiny.toml", "--strategies", "aprill"], "unknown strategy 'aprill'; did you mean 'april'"),
        (["tiny.toml", "--from", "runs/x"], "--from names a run whose lengths are used: omit WORKLOAD"),
        (["--from", "."], "not a run directory"),
        (["tiny.toml", "--device", "h100-sxm"], "--device needs --model"),
        (["tiny.toml", "--tp", "2"], "--tp has no effect without --device"),
        (["tiny.toml", "--catalogue", "tiny.toml"], "--catalogue has no effect without --device"),
        (["--from", ".", "--device", "a", "--model", "b"], "--device and --from each describe"),
        (["tiny.toml", "--lag", "1,x"], "is not a comma-separated list of numbers"),
        (["tiny.toml", "--lag", "-1"], "--lag must be at least 0 versions, got -1"),
        (["tiny.toml", "--seeds", "0"], "0 is not in the range 1<=x<=1000000000"),
        (["tiny.toml", "--steps", "5", "--warmup", "5"], "--warmup must be at least 0 and below --steps (5)"),
        (["tiny.toml", "--out", "no/where.html"], "the folder 'no' does not exist"),
        (["tiny.toml", "--scenario", "gone.toml"], "gone.toml: no such file"),
        (["bad.jsonl"], "bad.jsonl:1: a response must have at least 1 token, got -1"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.jsonl").write_text('{"prompt": 1, "length": -1}\n')
    assert cli.main(["simulate", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
