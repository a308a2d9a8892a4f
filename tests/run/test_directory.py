from __future__ import annotations

import asyncio
import datetime
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.cluster.config import ClusterConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.environments.rewards import ExactConfig
from rollover.errors import ConfigError, ResourceError, RunError
from rollover.rollout.config import RolloutConfig
from rollover.run import directory
from rollover.run.building import build_config
from rollover.run.checkpoint_schedule import Checkpointer
from rollover.run.config import RunConfig
from rollover.run.sections import ModelConfig
from rollover.settings.plain import resolved
from rollover.tasks.config import TasksConfig
from rollover.tasks.sources import JsonlConfig
from rollover.trainer.config import CheckpointConfig, TrainerConfig
from tests.speed import within

CONFIG = RunConfig(model=ModelConfig(path="models/tiny"), seed=5)


@pytest.fixture(autouse=True)
def _roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MIN_FREE_BYTES", 0)


def test_a_run_has_a_name_of_its_own_that_a_resume_does_not_change(tmp_path: Path) -> None:
    names = []
    for parent in ("a", "b"):
        path = tmp_path / parent / "my run: ü"
        with directory.create(CONFIG, path) as run:
            names.append(run.identity())
        with directory.RunDir(path) as run:
            assert run.identity() == names[-1]
    assert len(set(names)) == 2
    assert all(name.startswith("my-run---") and ":" not in name and " " not in name for name in names)


def test_a_new_run_leaves_its_resolved_config_and_what_ran_it(tmp_path: Path) -> None:
    with directory.create(CONFIG, tmp_path / "a" / "b", ["rollover", "train", "x y.toml"]) as run:
        saved = json.loads(run.config_file.read_text())
    meta = saved.pop("meta")
    assert saved == resolved(CONFIG)
    assert meta["command"] == "rollover train 'x y.toml'"
    assert meta["seed"] == 5
    assert {"started", "rollover", "python", "torch", "transformers", "machine"} <= meta.keys()


def test_a_directory_in_use_is_refused_naming_who_uses_it(tmp_path: Path) -> None:
    with (
        directory.create(CONFIG, tmp_path / "run"),
        pytest.raises(RunError, match=f"is in use by pid {os.getpid()} on "),
    ):
        directory.open_for_resume(tmp_path / "run")


def open_files(process: str) -> dict[str, int]:
    """The descriptor of each file that a process has open (of two, the later)."""
    return {os.readlink(link): int(link.name) for link in Path("/proc", process, "fd").iterdir() if link.exists()}


def test_a_child_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = str((tmp_path / "run" / "lock").resolve())
    script = "print('running', flush=True); input()"
    with directory.create(CONFIG, tmp_path / "run"):
        assert lock in open_files("self")
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        )
        try:
            assert child.stdout is not None and child.stdout.readline() == b"running\n"
            assert lock not in open_files(str(child.pid)), "it would keep the run of a killed trainer locked"
        finally:
            child.communicate(b"\n", timeout=within(60))


def test_the_lock_is_free_at_once_though_a_child_is_being_started(tmp_path: Path) -> None:
    """Between its fork and its program, a child has every open file of its parent."""
    run = directory.create(CONFIG, tmp_path / "run")
    of_the_child = os.dup(open_files("self")[str((tmp_path / "run" / "lock").resolve())])
    run.close()
    directory.open_for_resume(tmp_path / "run")[1].close()
    os.close(of_the_child)


def test_a_run_goes_on_under_the_config_it_began_with(tmp_path: Path) -> None:
    directory.create(CONFIG, tmp_path).close()
    config, run = directory.open_for_resume(tmp_path, ["--steps", "7", "--logging.tensorboard", "false"], ["r"])
    with run:
        assert (config.steps, config.logging.tensorboard, config.seed) == (7, False, 5)
        assert json.loads((tmp_path / "config.json").read_text())["steps"] == CONFIG.steps, "it may still fail"
        run.settle()
        run.settle()
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 7


def test_settings_that_change_what_evaluations_measure_are_named(tmp_path: Path) -> None:
    free = ("--tasks.keep_eval_out", "false", "--tasks.eval.0.name", "k", "--eval.sets.k.k", "[1]")
    directory.create(build_config("quickstart", free), tmp_path).close()
    same = ("--eval.every_steps", "7", "--eval.k", "[1, 4]", "--eval.samples_per_prompt", "4", "--eval.sets.k.k", "[2]")
    same += ("--tasks.eval.0.reward.workers", "1", "--tasks.eval.0.weight", "2", "--eval.sets.long.temperature", "1.0")
    other = ("--eval.sets.k.top_p", "0.5", "--tasks.eval.0.reward.pass_score", "0.5", "--tasks.eval.0.config.k", "2")
    other += ("--tasks.eval.0.reward.timeout_s", "9")
    measures = [f"tasks.eval.0.{key}" for key in ("config.k", "reward.pass_score", "reward.timeout_s")]
    measures = ["eval.sets.k.top_p", *measures]
    for changes, named in ((same, []), ((*same, *other), measures)):
        config, run = directory.open_for_resume(tmp_path, changes)
        with run:
            assert sorted(run.changed_measure(config)) == named


def resumed(path: Path, command: str) -> None:
    with directory.open_for_resume(path, [], [command])[1] as run:
        run.settle()


def test_each_resume_is_on_record_with_what_had_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.create(CONFIG, tmp_path).close()
    resumed(tmp_path, "one")
    monkeypatch.setattr(directory, "__version__", "9.9")
    resumed(tmp_path, "two")
    first, second = json.loads((tmp_path / "config.json").read_text())["meta"]["resumed"].split("; ")
    assert first.endswith(" by one")
    assert second.endswith(" by two under rollover 9.9")


CHANGES = {
    "what may change at any time": (
        *("--steps", "7", "--checkpoint.keep_last", "1", "--eval.samples_per_prompt", "2", "--logging.progress", "off"),
        *("--rollout.stall_timeout_s", "5", "--rollout.max_retries", "9", "--engine.command_timeout_s", "3"),
        *("--model.path", "elsewhere", "--tasks.train.0.path", "b.jsonl", "--tasks.train.0.reward.timeout_s", "1"),
        *("--tasks.train.0.reward.workers", "0", "--engine.max_context_tokens", "4000"),
    ),
    "what may change where bits are not promised": (
        *("--trainer.micro_batch_tokens", "9", "--trainer.gradient_checkpointing", "true", "--trainer.device", "cpu"),
        *("--engine.kv_cache_bytes", "9000000", "--engine.max_running", "9", "--engine.device", "cpu"),
        *("--engine.prefill_chunk_tokens", "64", "--engine.cpu_kernels", "torch"),
    ),
    "what stays": (
        *("--seed", "6", "--rollout.group_size", "2", "--rollout.strategy", "sync", "--rollout.max_new_tokens", "9"),
        *("--rollout.temperature", "0.5", "--algorithm.name", "dapo", "--trainer.learning_rate", "1e-3"),
        *("--trainer.mini_batches", "2", "--trainer.dtype", "bfloat16", "--tasks.train.0.weight", "2"),
        *("--tasks.train.0.name", "b", "--tasks.max_prompt_tokens", "9"),
        *("--eval.num_prompts", "9", "--engine.dtype", "bfloat16"),
    ),
}
SOURCE = JsonlConfig(name="a", path="a.jsonl", reward=ExactConfig())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_setting_that_changes_nothing_learned_may_change(tmp_path: Path, kind: str, deterministic: bool) -> None:
    config = replace(CONFIG, deterministic=deterministic, tasks=TasksConfig(train=(SOURCE,)))
    directory.create(config, tmp_path).close()
    for key, value in zip(CHANGES[kind][::2], CHANGES[kind][1::2], strict=True):
        if kind == "what stays" or (deterministic and kind == "what may change where bits are not promised"):
            reason = "what the run has learned depends on it" if kind == "what stays" else "promises identical results"
            with pytest.raises(RunError, match=rf"{key[2:]}.* cannot change when a run is resumed: .*{reason}"):
                directory.saved_config(tmp_path, [key, value])
        else:
            assert directory.saved_config(tmp_path, [key, value]) != config, key


SERVERS = VLLMConfig(urls=("http://a:1",))
OTHERS = (
    *("--engine.token_timeout_s", "5", "--engine.logprob_tolerance", "0.3", "--engine.max_running", "3"),
    *("--engine.weights_dir", "w", "--engine.served_model", "m"),
)
OTHER = VLLMConfig(
    urls=("http://b:1",), token_timeout_s=5, logprob_tolerance=0.3, max_running=3, weights_dir="w", served_model="m"
)


@pytest.mark.parametrize(
    ("began", "changes", "expected"),
    [
        pytest.param({}, ["--rollout.group_size", "8"], {}, id="no change"),
        pytest.param(
            {"engine": SERVERS}, ["--engine.urls", '["http://b:1"]', *OTHERS], {"engine": OTHER}, id="other servers"
        ),
        pytest.param(
            {"engine": SERVERS},
            ["--engine.urls", "[]", "--engine.launch", "true"],
            {"engine": VLLMConfig(launch=True)},
            id="servers that are launched",
        ),
        pytest.param(
            {},
            ["--cluster.address", "10.0.0.5:6379"],
            {"cluster": ClusterConfig(address="10.0.0.5:6379")},
            id="a table whose keys may change",
        ),
        pytest.param(
            {"deterministic": True},
            ["--deterministic", "false", "--trainer.micro_batch_tokens", "9"],
            {"trainer": TrainerConfig(micro_batch_tokens=9)},
            id="the same bits no longer",
        ),
    ],
)
def test_a_run_goes_on_with_what_may_change(
    tmp_path: Path, began: dict[str, Any], changes: list[str], expected: dict[str, Any]
) -> None:
    directory.create(replace(CONFIG, **began), tmp_path).close()
    assert directory.saved_config(tmp_path, changes) == replace(CONFIG, **expected)


@pytest.mark.parametrize(
    ("began", "changes", "message"),
    [
        ({}, ["--rollout.group_sise", "2"], r"command line: --rollout\.group_sise: unknown key"),
        ({}, ["--trainer.lora.rank", "8"], r"trainer\.lora cannot change when a run is resumed: what the run has"),
        ({}, ["--deterministic", "true"], r"deterministic cannot change .* the steps so far were not repeatable"),
        ({"engine": SERVERS}, ["--engine.kv_on_update", "keep"], r"engine\.kv_on_update cannot change"),
        ({"trainer": TrainerConfig(schedule="cosine")}, ["--steps", "7"], r"steps cannot change .*schedule 'cosine'"),
    ],
)
def test_what_cannot_change_is_refused(tmp_path: Path, began: dict[str, Any], changes: list[str], message: str) -> None:
    directory.create(replace(CONFIG, **began), tmp_path).close()
    with pytest.raises((RunError, ConfigError), match=message):
        directory.saved_config(tmp_path, changes)


def test_a_run_of_an_earlier_version_goes_on_without_a_new_setting(tmp_path: Path) -> None:
    with directory.create(CONFIG, tmp_path) as run:
        saved = json.loads(run.config_file.read_text())
        del saved["rollout"]["unit"], saved["algorithm"]["advantage"]
        run.config_file.write_text(json.dumps(saved))
    assert directory.saved_config(tmp_path, ["--steps", "7"]) == replace(CONFIG, steps=7)


def test_a_run_whose_strategy_is_simulated_only_now_is_refused(tmp_path: Path) -> None:
    with directory.create(CONFIG, tmp_path) as run:
        saved = json.loads(run.config_file.read_text())
        saved["rollout"] |= {"strategy": "sorted", "over_sampling_batch_size": 64}
        run.config_file.write_text(json.dumps(saved))
    with pytest.raises(RunError) as caught:
        directory.saved_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} cannot be resumed: it was created with rollout.strategy 'sorted'; it is simulated only"
        " (rollover simulate --strategies sorted); to train, use 'rollover'"
    )


def test_the_same_run_with_settings_that_may_change_is_offered_to_go_on(tmp_path: Path) -> None:
    directory.create(CONFIG, tmp_path).close()
    other = replace(CONFIG, trainer=TrainerConfig(micro_batch_tokens=9))
    with pytest.raises(RunError, match=f"differs in trainer.micro_batch_tokens.: resume it with --resume {tmp_path}"):
        directory.create(other, tmp_path)


def test_a_resumed_run_that_fails_before_its_journal_keeps_its_directory(tmp_path: Path) -> None:
    directory.create(CONFIG, tmp_path).close()
    with directory.open_for_resume(tmp_path)[1] as run:
        run.discard_after(ConfigError())
    assert directory.saved_config(tmp_path) == CONFIG


def test_a_new_run_that_cannot_begin_leaves_no_directory_it_made(tmp_path: Path) -> None:
    with directory.create(CONFIG, tmp_path / "runs" / "deep" / "run") as run:
        (run.path / "model-untrained").mkdir()
        run.discard_after(ConfigError())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError), directory.create(CONFIG, tmp_path / "runs" / "one") as one:
        directory.create(CONFIG, tmp_path / "runs" / "two").close()
        one.discard_after(ConfigError())
        raise ConfigError
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]


def test_a_directory_that_holds_a_run_takes_no_other(tmp_path: Path) -> None:
    directory.create(CONFIG, tmp_path).close()
    with pytest.raises(RunError, match=f"holds a run of this config: resume it with --resume {tmp_path}"):
        directory.create(CONFIG, tmp_path)
    with pytest.raises(RunError, match="holds a run of this config: choose another directory"):
        directory.create(CONFIG, tmp_path, job="sft")
    other = RunConfig(model=ModelConfig(path="models/tiny"), rollout=RolloutConfig(group_size=2), seed=5)
    with pytest.raises(RunError, match=r"of another config \(it differs in rollout\.group_size\)"):
        directory.create(other, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rollout"]["group_size"] == 8


@pytest.mark.parametrize("moment", ["dump", "fsync", "replace"])
def test_a_run_killed_at_its_start_can_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Killed when ``config.json`` is half written, written but not flushed, and flushed but not in its place."""
    owner = {"dump": json, "fsync": os, "replace": Path}[moment]

    def killed(*arguments: object, **options: object) -> None:
        if moment == "dump":
            arguments[1].write('{"see')  # type: ignore[attr-defined]
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, moment, killed)
        directory.create(CONFIG, tmp_path / "run")
    assert (tmp_path / "run" / "config.partial").exists()
    directory.create(CONFIG, tmp_path / "run").close()
    assert directory.saved_config(tmp_path / "run") == CONFIG


class Killed(BaseException):
    """Stands for the death of the process: nothing tidies up behind it."""


@pytest.mark.parametrize("content", [None, "{", "[]", "3", '{"seed": 1}'])
def test_what_is_no_run_directory_cannot_be_resumed(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=r"is not a run directory|config\.json cannot be read"):
        directory.open_for_resume(tmp_path)


def test_a_run_inside_another_trainer_is_resumed_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"meta": {"job": "trl", "host": "trl 1.16.0"}}')
    with pytest.raises(RunError, match=r"holds the rollouts of trl 1\.16\.0: that trainer resumes and saves its"):
        directory.open_for_resume(tmp_path)
    with pytest.raises(RunError, match="holds the rollouts of trl"):
        directory.derived_config(tmp_path)


def test_a_full_disk_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MIN_FREE_BYTES", 10**18)
    with pytest.raises(ResourceError, match=r"a new run needs 1000000000\.0 GB of disk, but .* are free"):
        directory.create(CONFIG, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_note_is_added_to_what_is_known_of_the_run(tmp_path: Path) -> None:
    with directory.create(CONFIG, tmp_path) as run:
        run.note(device="cpu")
        meta = json.loads(run.config_file.read_text())["meta"]
        assert (meta["device"], meta["seed"]) == ("cpu", 5)
        assert directory.saved_config(tmp_path) == CONFIG, "it may be read while the run is at work"
        assert directory.derived_config(tmp_path, ["--seed", "6"]).seed == 6


def test_default_directories_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    first = directory.default_path("quickstart", now=now)
    assert first == Path("runs/quickstart-20260102-030405")
    first.mkdir(parents=True)
    assert directory.default_path("quickstart", now=now) == Path("runs/quickstart-20260102-030405-2")


def test_a_run_knows_which_versions_it_began_under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with directory.create(CONFIG, tmp_path / "run") as run:
        assert run.changed_environment() == []
        before = directory.__version__
        monkeypatch.setattr(directory, "__version__", "9.9")
        assert run.changed_environment() == [f"rollover {before}, now 9.9"]


def test_evaluation_may_change_on_resume_if_no_prompt_is_held_out_for_it() -> None:
    kept_out = build_config("quickstart")
    refused = directory.refusals(kept_out, build_config("quickstart", ["--tasks.eval", "[]"]))
    assert set(refused.values()) == {"its prompts are kept out of training (tasks.keep_eval_out)"}
    free = ["--tasks.keep_eval_out", "false"]
    assert (
        directory.refusals(build_config("quickstart", free), build_config("quickstart", [*free, "--tasks.eval", "[]"]))
        == {}
    )


@pytest.mark.real_time
async def test_the_loop_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint names the events from before."""
    written, looped = [], threading.Event()

    def save(folder: Path, extra: Any) -> None:
        assert looped.wait(within(60.0)), "the loop stands still"
        written.append((folder.name, extra))

    journal = SimpleNamespace(sync=lambda: None, last_seq=7)
    trainer: Any = SimpleNamespace(version=0, save=save)
    driver: Any = SimpleNamespace(flush=lambda: None, saved=lambda oldest: written.append(oldest))
    monkeypatch.setattr(Checkpointer, "_oldest_kept", lambda self: 1)
    checkpoints = Checkpointer(CheckpointConfig(), tmp_path, trainer, driver, journal, lambda: ())  # type: ignore[arg-type]
    trainer.version = 20
    saving = asyncio.create_task(checkpoints.save())
    await asyncio.sleep(0)
    journal.last_seq = 9
    looped.set()
    await saving
    assert written == [("step_20", {"journal_seq": 7}), 1]
