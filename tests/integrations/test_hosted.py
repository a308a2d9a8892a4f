"""Settings of a run inside another trainer, and the directory that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover.engine.base import Capabilities
from rollover.errors import ConfigError, RunError
from rollover.integrations.hosted import Given, HostedConfig, check_capabilities, hosted_config
from rollover.integrations.record import HostedRun
from rollover.report.metrics import read_metrics
from rollover.report.record import read_run
from rollover.rollout.journal import Journal

GIVEN = {
    "seed": Given(7, "Args.seed"),
    "rollout.rollout_batch_size": Given(4, "Args.batch"),
    "rollout.group_size": Given(2, "Args.generations"),
    "rollout.temperature": Given(0.9, "Args.temperature"),
}


def config(asked: object = None) -> HostedConfig:
    return hosted_config(asked, GIVEN, source="rollover=")  # type: ignore[arg-type]


def test_the_host_decides_and_the_user_says_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[rollout]\nmax_staleness = 3\n[rollout.strategy]\nkind = "april"\nover_sampling_batch_size = 6\n'
        "[engine]\nmax_running = 24\n"
    )
    table = {
        "rollout": {"max_staleness": 3, "strategy": {"kind": "april", "over_sampling_batch_size": 6}},
        "engine": {"max_running": 24},
    }
    for asked in (file, str(file), table):
        made = config(asked)
        assert (made.seed, made.rollout.rollout_batch_size, made.rollout.temperature) == (7, 4, 0.9)
        assert (made.rollout.staleness_bound, made.engine.max_running) == (3, 24)
    assert config("sync").rollout.strategy.kind == "sync"
    assert config().rollout.strategy.kind == "april"
    assert table["rollout"] == {"max_staleness": 3, "strategy": {"kind": "april", "over_sampling_batch_size": 6}}


def test_a_setting_may_repeat_the_host_but_not_contradict_it() -> None:
    with pytest.raises(ConfigError) as refused:
        config({"rollout": {"temperature": 0.7}})
    assert "rollout.temperature is 0.7, but Args.temperature sets it to 0.9: leave" in str(refused.value)
    assert config({"rollout": {"temperature": 0.9}}) == config()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("aprill", "rollover=: 'aprill' is neither a strategy nor a .toml file .*; did you mean 'april'?"),
        ("nowhere.toml", "nowhere.toml: no such file"),
        (7, "rollover=: 7 is neither a strategy nor a .toml file"),
        ({"rollout": 3}, "rollover=: rollout must be a table of settings, got 3"),
        ({"rollouts": {}}, "rollouts: unknown key; did you mean 'rollout'?"),
        ({"trainer": {"learning_rate": 1.0}}, "trainer: unknown key"),
        ({"rollout": {"strategy": "tail_rounds"}}, "simulated only"),
        ({"engine": {"colocated": True}}, "engine.colocated has no effect inside another trainer"),
        ({"rollout": {"max_stalenes": 2}}, "max_stalenes: unknown key; did you mean 'max_staleness'?"),
        (
            {"rollout": {"strategy": {"kind": "april", "over_sampling_batch_size": 2}}},
            r"\(2\) must be at least .*\(4\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(asked: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        config(asked)


@pytest.mark.parametrize("asked", ["sync", {"rollout": {"strategy": {"kind": "sync"}}}])
def test_an_unusable_bound_of_the_host_is_named_as_the_host_names_it(asked: object) -> None:
    given = {**GIVEN, "rollout.max_staleness": Given(4, "--max-weight-staleness")}
    with pytest.raises(ConfigError, match=r"^rollover=: strategy 'sync' .*, but --max-weight-staleness is 4: choose"):
        hosted_config(asked, given, source="rollover=")  # type: ignore[arg-type]
    none = {**GIVEN, "rollout.max_staleness": Given(0, "--max-weight-staleness")}
    assert hosted_config(asked, none, source="rollover=").rollout.staleness_bound == 0  # type: ignore[arg-type]


def test_an_engine_that_lacks_what_the_strategy_needs_is_refused() -> None:
    needy = config({"rollout": {"strategy": "inflight"}})
    with pytest.raises(ConfigError, match="'inflight' loads weights while samples are running"):
        check_capabilities(needy, Capabilities(max_running=4, max_context_tokens=4096))
    with pytest.raises(ConfigError, match="responses may have 1024 tokens, but this engine has room for only 512"):
        check_capabilities(config(), Capabilities(max_running=4, max_context_tokens=512))


# -- the directory ------------------------------------------------------------------------------------------------


def begin(path: Path, asked: object = None, *, resume: bool = False, dataset: str = "8 rows") -> HostedRun:
    return HostedRun(path, config(asked), host="host 1.2", resume=resume, facts={"dataset": dataset})


def begun(path: Path, asked: object = None) -> str:
    """Leave a run that has a journal. Returns its name."""
    with begin(path, asked) as run:
        Journal(run.journal).close()
        return run.identity()


def test_the_directory_is_one_that_reports_can_read(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        Journal(run.journal).close()
        run.step_ended(0, 1.5, {"reward/mean": 0.25})
    record = read_run(tmp_path / "run")
    assert record.config["rollout"]["temperature"] == 0.9
    assert (record.meta["job"], record.meta["host"], record.meta["seed"]) == ("host", "host 1.2", 7)
    assert [(row.step, row.values) for row in read_metrics(tmp_path / "run")] == [(0, {"reward/mean": 0.25})]


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    name = begun(tmp_path)
    with pytest.raises(RunError, match="holds the rollouts of an earlier run: resume it, or use another"):
        begin(tmp_path)
    with begin(tmp_path, resume=True) as run:
        assert run.identity() == name
    assert "resumed" in json.loads((tmp_path / "config.json").read_text())["meta"]


def test_a_run_that_never_began_leaves_its_directory_to_another(tmp_path: Path) -> None:
    begin(tmp_path).close()
    begin(tmp_path, "sync").close()
    assert json.loads((tmp_path / "config.json").read_text())["rollout"]["strategy"]["kind"] == "sync"


def test_a_resumed_run_may_change_only_what_was_not_learned_from(tmp_path: Path) -> None:
    begun(tmp_path)
    begin(tmp_path, {"engine": {"max_running": 12}, "rollout": {"stall_timeout_s": 30.0}}, resume=True).close()
    with pytest.raises(RunError, match="this run began with dataset 8 rows, but now it is 9 rows"):
        begin(tmp_path, resume=True, dataset="9 rows")


def test_another_strategy_is_named_before_the_settings_that_came_with_it(tmp_path: Path) -> None:
    begun(tmp_path, {"rollout": {"strategy": "april", "max_staleness": 2}})
    with pytest.raises(RunError, match=r"rollout\.strategy\.kind differs from the value that this run began with"):
        begin(tmp_path, "sync", resume=True)
    with pytest.raises(RunError, match=r"rollout\.max_staleness differs from the value that this run began with"):
        begin(tmp_path, {"rollout": {"strategy": "april", "max_staleness": 3}}, resume=True)


def test_two_processes_do_not_share_a_directory(tmp_path: Path) -> None:
    with begin(tmp_path), pytest.raises(RunError, match="is in use by pid"):
        begin(tmp_path)
