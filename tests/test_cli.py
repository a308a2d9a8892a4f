from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from rollover import cli
from rollover.errors import EXTRAS, DataError, ResourceError
from rollover.run import directory, jobs
from rollover.run.building import build_config
from rollover.run.config import RunConfig
from rollover.run.directory import RunDir
from rollover.run.sections import WarmupConfig
from rollover.trainer.checkpoint import CheckpointManifest, prune_checkpoints, write_manifest
from rollover.version import __version__
from tests.runs import Say
from tests.speed import within

TEXT = """\
steps = 12
[model.scratch]
max_position = 2048
[[tasks.train]]
kind = "reasoning_gym"
name = "chain_sum"
"""


class Signalled(Exception):
    """Stands for a signal that comes while the work is done."""

    def __init__(self, number: int) -> None:
        self.number = number


class Jobs:
    """Stands in for the work: remembers what it was asked to do."""

    def __init__(self) -> None:
        self.done: list[tuple[str, RunConfig, Path]] = []
        self.failure: BaseException | None = None
        self.leaves: str | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    def named(self, name: str) -> object:
        def job(config: RunConfig, run: RunDir, *, skip_batch: int | None = None) -> None:
            self.done.append((name, config, run.path))
            self.meanwhile()
            if self.leaves is not None:
                (run.path / self.leaves).touch()
            if isinstance(self.failure, Signalled):
                signal.raise_signal(self.failure.number)
            elif self.failure is not None:
                raise self.failure
            run.report.write_text("<html>")

        return job


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Jobs:
    """An empty directory with ``run.toml`` in it, and the jobs replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory, "MIN_FREE_BYTES", 0)
    Path("run.toml").write_text(TEXT)
    work = Jobs()
    for name in ("train", "sft", "evaluate"):
        monkeypatch.setattr(jobs, name, work.named(name))
    monkeypatch.setattr("rollover.run.dry_run.dry_run", lambda config, job: [f"{config.steps} steps"])
    return work


@pytest.mark.parametrize(
    "argv",
    [
        ["run.toml", "--rollout.group_size", "2", "--run-dir", "out", "--tasks.prompt_suffix=-4"],
        ["--tasks.prompt_suffix", "-4", "--rollout.group_size=2", "--output-dir=out", "run.toml"],
        ["--run_dir", "out", "--rollout.group-size", "2", "run.toml", "--tasks.prompt_suffix", "-4"],
    ],
)
def test_overrides_and_options_may_stand_in_any_order(work: Jobs, done: Say, argv: list[str]) -> None:
    assert done("train", *argv) == "report: out/report.html\n"
    wanted = build_config("run.toml", ["--rollout.group_size", "2", "--tasks.prompt_suffix", "-4"])
    assert work.done == [("train", wanted, Path("out"))]


@pytest.mark.parametrize(
    ("command", "job", "stem"), [("train", "train", "run"), ("sft", "sft", "run-sft"), ("eval", "evaluate", "run-eval")]
)  # fmt: skip
def test_a_run_gets_a_directory_named_after_its_config(work: Jobs, command: str, job: str, stem: str) -> None:
    assert cli.main([command, "run.toml"]) == 0
    [(name, _, path)] = work.done
    assert (name, path.parent, path.name.rsplit("-", 2)[0]) == (job, Path("runs"), stem)


def test_a_resumed_run_works_in_its_directory_under_its_config(work: Jobs) -> None:
    assert cli.main(["train", "run.toml", "--seed", "3", "--run-dir", "out"]) == 0
    assert cli.main(["train", "--resume", "out", "--steps", "20"]) == 0
    assert work.done[1] == ("train", build_config("run.toml", ["--seed", "3", "--steps", "20"]), Path("out"))


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_holds_for_one_call_and_is_not_remembered_by_the_run(work: Jobs, done: Say, option: str) -> None:
    new = ("train", "run.toml", option, "--run-dir", "out", "--logging.progress", "plain")
    for argv in (new, ("train", "--resume", "out"), ("train", "--resume", "out", option)):
        assert done(*argv) == "report: out/report.html\n"
    assert [config.logging.progress for _, config, _ in work.done] == ["off", "plain", "off"]


def test_a_dry_run_prints_a_config_and_leaves_nothing(work: Jobs, done: Say) -> None:
    before = set(Path().iterdir())
    printed = done("train", "run.toml", "--dry-run", "--seed", "3")
    assert (work.done, set(Path().iterdir())) == ([], before)
    assert printed.endswith("\n\n# 12 steps\n")
    Path("printed.toml").write_text(printed)
    assert build_config("printed.toml") == build_config("run.toml", ["--seed", "3"])


@pytest.mark.usefixtures("work")
def test_a_dry_run_of_a_resume_changes_nothing(done: Say) -> None:
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    saved = Path("out/config.json").read_text()
    assert "# 20 steps" in done("train", "--resume", "out", "--steps", "20", "--dry-run")
    assert Path("out/config.json").read_text() == saved


def test_sft_without_a_section_takes_the_defaults_and_says_so(work: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", "run.toml"]) == 0
    assert work.done[-1][1].sft == WarmupConfig()
    assert "no [sft] section: 200 steps of 64 examples at a learning rate of 1e-05" in capsys.readouterr().err


def checkpoint(step: int) -> Path:
    folder = Path("out/checkpoints") / f"step_{step}"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(8))
        write_manifest(folder, CheckpointManifest(version=step, identity={}, num_threads=1))
    return folder


def test_eval_measures_the_newest_checkpoint(work: Jobs, refused: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    assert "out has no checkpoint yet" in refused("eval", "out")
    Path("out/model").mkdir()
    assert "the model that its warm-up has made is out/model" in refused("export", "out", "exported")
    variants = ["--variants", "{a = {}, b = {seed = 1}}"]
    assert cli.main(["train", "run.toml", "--run-dir", "both", *variants]) == 0
    assert "both compares variants, which have the checkpoints: name both/a" in refused("eval", "both")
    for step in (9, 10):
        checkpoint(step)
    assert cli.main(["eval", "out", "--eval.num_prompts", "5"]) == 0
    job, config, path = work.done[-1]
    assert (job, config.model.path, config.model.scratch) == ("evaluate", "out/checkpoints/step_10", None)
    assert (config.eval.num_prompts, config.tasks.train) == (5, build_config("run.toml").tasks.train)
    assert config.tasks.eval == config.tasks.train
    assert "measured on newly drawn items (tasks.train)" in capsys.readouterr().err
    assert path.parent == Path("out") and path.name.startswith("eval-")


@pytest.mark.usefixtures("work")
def test_a_merged_model_goes_with_its_checkpoint() -> None:
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    for step in (9, 10):
        (checkpoint(step) / "adapter_config.json").write_text("{}")
    models = [Path("out/merged") / name for name in ("step_8", "step_9", "step_10", ".partial-step_8", "notes")]
    for model in models:
        model.mkdir(parents=True)
    assert cli.main(["eval", "out"]) == 0
    assert [model.is_dir() for model in models] == [False, True, True, True, True]


def test_evaluating_a_run_asks_no_set_for_its_metric(work: Jobs, refused: Say) -> None:
    kept = ["--eval.keep_best", "true", "--eval.metric", "accuracy/held", "--eval.every_steps", "1"]
    sets = ["--eval.sets.held.temperature", "0.6", "--eval.patience", "2"]
    source = "{kind = 'reasoning_gym', name = '%s', dataset = 'chain_sum'}"
    held = ["--tasks.eval", f"[{source % 'held'}]"]
    assert cli.main(["train", "run.toml", "--run-dir", "out", *held, *kept, *sets]) == 0
    checkpoint(10)
    assert cli.main(["eval", "out"]) == 0
    assert cli.main(["eval", "out", "--tasks.eval", f"[{source % 'other'}]"]) == 0
    ours, other = (config for _, config, _ in work.done[-2:])
    assert (ours.eval.of("held").temperature, other.eval.of("other").temperature) == (0.6, 1.0)
    assert "no evaluation measures" in refused("eval", "out", "--eval.metric", "pass@8")


@pytest.mark.parametrize("damage", ["weights", "manifest"])
def test_a_damaged_checkpoint_is_not_measured(work: Jobs, refused: Say, damage: str) -> None:
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    folder = checkpoint(10)
    (folder / ("trainer.json" if damage == "manifest" else "model.safetensors")).write_text("{}")
    assert "is damaged" in refused("eval", "out")
    assert [job for job, _, _ in work.done] == ["train"]


def test_a_checkpoint_that_is_measured_is_not_pruned(work: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def nfs(opened: Any, operation: int) -> None:
        """Lock as NFS does: for one process alone only what can be written."""
        is_readable_only = fcntl.fcntl(opened, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if operation & fcntl.LOCK_EX and is_readable_only:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(opened, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    folders = [checkpoint(step) for step in (9, 10)]
    kept: list[list[bool]] = []

    def prune() -> None:
        checkpoint(11)
        prune_checkpoints(Path("out/checkpoints"), keep_last=1)
        kept.append([folder.is_dir() for folder in folders])

    work.meanwhile = prune
    assert cli.main(["eval", "out"]) == 0
    prune()
    assert kept == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--dryrun"], "no option '--dryrun'; did you mean '--dry-run'?"),
        (["train", "--step", "3"], "no option '--step'; did you mean '--steps'?"),
        (["train", "run.toml", "--steps"], "command line: --steps needs a value: --steps VALUE"),
        (["train", "run.toml", "--run-dir", "--seed", "3"], "Option '--run-dir' requires an argument."),
        (["train", "run.toml", "more"], "Got unexpected extra argument (more)"),
        (["train", "run.toml", "--resume", "x"], "--resume reads the config of its run and writes to its directory; leave out CONFIG"),
        (["train", "--resume", "x", "--run-dir", "y"], "--resume reads the config of its run and writes to its directory; leave out --run-dir"),
        (["eval"], "Missing argument 'CONFIG|RUN'."),
        (["report", "gone"], "gone is not a run directory: it has no config.json"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("work")
def test_a_refused_command_line_says_why_in_its_first_line(refused: Say, argv: list[str], message: str) -> None:
    assert refused(*argv).splitlines()[0] == message
    assert not Path("runs").exists()


@pytest.mark.usefixtures("work")
def test_every_mistake_of_a_config_is_shown(refused: Say) -> None:
    Path("run.toml").write_text(TEXT + "[rollout]\ngroup_size = 'x'\ntop_q = 1\n")
    assert refused("train", "run.toml") == (
        'run.toml:8: rollout.group_size: expected a whole number, got the string "x"\n'
        "       run.toml:9: rollout.top_q: unknown key; did you mean 'top_p'?"
    )


@pytest.mark.parametrize("kind", [DataError, ResourceError])
def test_a_run_that_did_not_begin_leaves_its_directory_free(work: Jobs, refused: Say, kind: type[Exception]) -> None:
    work.failure = kind("rows.jsonl, line 3: no column 'answer'")
    assert refused("train", "run.toml", "--run-dir", "out") == "rows.jsonl, line 3: no column 'answer'"
    assert not Path("out").exists()
    Path("out").mkdir()
    refused("train", "run.toml", "--run-dir", "out")
    assert list(Path("out").iterdir()) == [], "a directory of the user is not removed"
    work.failure = None
    assert cli.main(["train", "run.toml", "--seed", "4", "--run-dir", "out"]) == 0


@pytest.mark.parametrize("failure", [DataError("x"), KeyboardInterrupt(), ResourceError("x")])
def test_a_run_that_has_begun_keeps_its_directory_and_is_free_to_go_on(work: Jobs, failure: BaseException) -> None:
    work.failure = failure
    work.leaves = None if isinstance(failure, KeyboardInterrupt) else "journal.sqlite"
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == (130 if isinstance(failure, KeyboardInterrupt) else 2)
    work.failure = None
    assert cli.main(["train", "--resume", "out"]) == 0


REFUSALS = {
    errno.ENOSPC: "no space left on device; make room",
    errno.EACCES: "permission denied; change its permissions",
    errno.EROFS: "read-only file system; choose a place",
    errno.ENAMETOOLONG: "file name too long; choose a shorter name",
    errno.EISDIR: "is a directory; a file is needed there",
    errno.EIO: "input/output error; the disk or its connection",
    errno.ENOTEMPTY: "directory not empty; the operating system refused it",
}


@pytest.mark.parametrize("number", REFUSALS)
def test_whatever_the_system_refuses_is_one_line(work: Jobs, refused: Say, number: int) -> None:
    work.failure = OSError(number, os.strerror(number), "out/metrics.jsonl")
    told, resume = refused("train", "run.toml", "--run-dir", "out").splitlines()
    assert told.startswith(f"out/metrics.jsonl: {REFUSALS[number]}")
    assert resume.strip() == "once that is fixed, resume with: rollover train --resume out"


@pytest.mark.parametrize("place", ["x" * 300, "run.toml/out", "/proc/none/out"])
@pytest.mark.usefixtures("work")
def test_a_directory_that_cannot_be_made_is_one_line(refused: Say, place: str) -> None:
    told = refused("train", "run.toml", "--run-dir", place)
    assert told.startswith(f"{place}: ") and "\n" not in told


@pytest.mark.parametrize("name", ["lock", "config.json"])
@pytest.mark.usefixtures("work")
def test_a_directory_in_the_place_of_a_file_is_one_line(refused: Say, name: str) -> None:
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    file = Path("out", name)
    file.unlink(missing_ok=True)
    file.mkdir()
    told = refused("train", "--resume", "out")
    assert told == f"out/{name}: is a directory; a file is needed there: choose another place"


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), OSError("a bug"), TimeoutError("a bug")])
def test_a_bug_is_not_dressed_up_as_a_mistake_of_the_user(work: Jobs, bug: Exception) -> None:
    """The system's own errors have a number."""
    work.failure = bug
    with pytest.raises(type(bug), match="a bug"):
        cli.main(["train", "run.toml"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_with_its_own_exit_code(work: Jobs, number: int) -> None:
    work.failure = Signalled(number)
    assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 128 + number
    assert signal.getsignal(number) is not signal.SIG_IGN


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(work: Jobs) -> None:
    """``nohup`` works so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        work.failure = Signalled(signal.SIGHUP)
        assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["train", "--help"], ["report", "-h"]])
def test_help_is_printed_on_request_and_in_want_of_a_command(done: Say, argv: list[str]) -> None:
    assert done(*argv).startswith("Usage: rollover ")


def test_the_module_and_the_console_script_are_the_same_program() -> None:
    script = Path(sys.executable).with_name("rollover")
    outputs = [
        subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=within(60)).stdout
        for program in ([sys.executable, "-m", "rollover"], *([[str(script)]] if script.exists() else []))
    ]
    assert set(outputs) == {f"rollover {__version__}\n"}


@pytest.mark.parametrize("place", ["", ".", "full"])
@pytest.mark.usefixtures("work")
def test_a_directory_that_a_new_run_cannot_have_is_left_as_it_was(refused: Say, place: str) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    before = sorted(Path().rglob("*"))
    assert "is neither empty nor a run directory" in refused("train", "run.toml", "--run-dir", place)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("command", ["sft", "eval"])
@pytest.mark.usefixtures("work")
def test_what_is_no_training_says_so_when_it_is_to_be_resumed(refused: Say, command: str) -> None:
    assert cli.main([command, "run.toml", "--run-dir", "out"]) == 0
    assert f"out is the directory of a rollover {command}" in refused("train", "--resume", "out")


@pytest.mark.parametrize(
    ("argv", "extra"),
    [
        (["train", "run.toml"], "train"),
        (["train", "--resume", "out"], "train"),
        (["sft", "run.toml"], "train"),
        (["eval", "run.toml"], "train"),
        (["plan", "8xh100", "--model", "."], "plan"),
        (["workload", "fit", "lengths.jsonl"], "plan"),
        (["calibrate", "--out", "mine.toml"], "plan"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("work")
def test_a_command_without_its_packages_says_how_to_install_them(
    refused: Say, monkeypatch: pytest.MonkeyPatch, argv: list[str], extra: str
) -> None:
    for modules in EXTRAS.values():
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)
    assert f"pip install 'rollover[{extra}]'" in refused(*argv)
    assert [path.name for path in Path().iterdir()] == ["run.toml"]


def without_a_reader(opened: Callable[[], tuple[int, int]]) -> TextIO:
    reader, writer = opened()
    os.close(reader)
    return os.fdopen(writer, "w")


GONE = "the reader of the output has gone: continuing without it"
FULL = "stdout cannot be written (No space left on device): continuing without it"


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        pytest.param(partial(without_a_reader, os.pipe), GONE, id="pipe"),
        pytest.param(partial(without_a_reader, os.openpty), GONE, id="terminal"),
        pytest.param(partial(Path("/dev/full").open, "w"), FULL, id="full disk"),
    ],
)
@pytest.mark.parametrize("argv", [["train", "run.toml"], ["train", "run.toml", "--dry-run"], ["--help"]])
def test_an_output_that_cannot_be_written_does_not_end_the_work(
    work: Jobs,
    argv: list[str],
    opened: Callable[[], TextIO],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with opened() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(argv) == 0
    assert len(work.done) == (argv == ["train", "run.toml"])
    assert capsys.readouterr().err.count(said) == 1


def test_a_command_started_without_stdout_does_its_work(work: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["train", "run.toml"]) == 0 and len(work.done) == 1


def test_characters_that_an_encoding_lacks_are_escaped(work: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.run.dry_run.dry_run", lambda config, job: ["12 steps · 3 ± 1 µs"])
    with Path("out").open("w", encoding="latin-1", errors="strict") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["train", "run.toml", "--dry-run", "--logging.run_name", "→"]) == 0
    assert "12 steps · 3 ± 1 µs" in (out := Path("out").read_text(encoding="latin-1")) and "\\u2192" in out


@pytest.mark.parametrize("option", ["--json", "--out"])
def test_a_folder_that_may_not_be_written_is_told_before_the_work(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)  # root may write everywhere
    file = tmp_path / "found"
    assert cli.main(["simulate", "light-8k", "--steps", "3", "--seeds", "1", option, str(file)]) == 2
    assert f"{file}: may not be written here: choose another place" in capsys.readouterr().err
