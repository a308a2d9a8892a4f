"""What a user can get wrong: each gives one message that names the place and the mend, exit code 2, and nothing is lost.

The command line runs in this process; only what needs a second process or a damaged machine gets one.
"""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollover import cli
from rollover.batch import WasteCause
from rollover.rollout.journal import Journal
from rollover.trainer.local import LocalTrainer
from tests import runs
from tests.runs import Say

pytestmark = pytest.mark.usefixtures("experiment")


def refused_start(refused: Say, *argv: str) -> str:
    """A start that is refused leaves no directory behind."""
    message = refused("train", "run.toml", "--run-dir", "out", *argv)
    assert not Path("out").exists()
    return message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks.train.0.reward.function", "program:share"], "the module 'program' ends the program when it is imported (exit code 3); move script code under `if __name__"),
        (["--tasks.train.0.reward.function", "unfinished:share"], "cannot import 'unfinished' (SyntaxError: "),
        (["--tasks.train.0.reward.function", "letter_reward"], "reward.function must read 'module:function', got 'letter_reward'"),
        (["--tasks.train", '[{kind="reasoning_gym", name="chain_sum", config={terms=3}}]'], "no parameter 'terms'; did you mean 'min_terms'?"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_refused_at_the_start(refused: Say, argv: list[str], message: str) -> None:
    Path("program.py").write_text("import sys\nsys.exit(3)\n")
    Path("unfinished.py").write_text("def share(:\n")
    assert message in refused_start(refused, *argv)


def test_a_dry_run_finds_what_a_run_would_and_makes_nothing(refused: Say, done: Say) -> None:
    before = sorted(Path().iterdir())
    for argv, message in (
        (["--tasks.train.0.path", "gone.jsonl"], "no file gone.jsonl"),
        (["--tasks.train.0.reward.function", "letter_reward:shar"], "did you mean 'share'?"),
        (["--model.path", "nowhere/at/all"], "does not exist"),
        (["--tasks.train", "[]"], "tasks.train names no source"),
        (["--rollout.max_new_tokens", "100"], "the model's context holds 80"),
    ):
        assert message in refused("train", "run.toml", "--dry-run", *argv)
    assert "# train source letters: jsonl, 16 rows, scored by function" in done("train", "run.toml", "--dry-run")
    assert [p for p in sorted(Path().iterdir()) if p.name != "__pycache__"] == before


# -- run directories ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("two-steps")
    with runs.working_in(folder, tiny_model):
        assert cli.main(["train", "run.toml", "--run-dir", "out", "--steps", "2", "--checkpoint.every_steps", "1"]) == 0
    yield folder / "out"


@pytest.fixture
def run(two_steps: Path, experiment: Path) -> Path:
    """A copy of that run, to be damaged."""
    shutil.copytree(two_steps, "out")
    return Path("out")


def state(run: Path) -> dict[str, bytes]:
    """Every file that must outlive a refusal."""
    kept = [p for p in run.rglob("*") if p.is_file() and not p.name.startswith(("journal.sqlite-", "lock"))]
    return {str(p): p.read_bytes() for p in kept}


def refused_resume(refused: Say, run: Path, *argv: str) -> str:
    before = state(run)
    message = refused("train", "--resume", str(run), "--steps", "3", *argv)
    after = state(run)
    config = str(run / "config.json")
    assert {k: v for k, v in after.items() if k != config} == {k: v for k, v in before.items() if k != config}
    return message


def changed(statement: str) -> Callable[[Path], None]:
    def change(journal: Path) -> None:
        with sqlite3.connect(journal) as db:
            db.execute(statement)
        db.close()

    return change


@pytest.mark.parametrize(
    ("damage", "told", "elsewhere"),
    [
        pytest.param(lambda file: file.write_bytes(b"no database" * 100), " is not a journal", True, id="no database"),
        pytest.param(changed("UPDATE events SET body = '{' WHERE seq = 5"), ", event 5", True, id="no event"),
        pytest.param(
            changed("DELETE FROM events WHERE seq > 5"),
            " ends at event 5, but out/checkpoints/step_2 includes event",
            False,
            id="older than the checkpoint",
        ),
        pytest.param(Path.unlink, "step_2", False, id="gone"),
    ],
)
def test_a_journal_that_cannot_be_gone_on_with_is_named_and_left_alone(
    refused: Say, run: Path, damage: Callable[[Path], object], told: str, elsewhere: bool
) -> None:
    damage(run / "journal.sqlite")
    message = refused_resume(refused, run)
    assert "out/journal.sqlite" in message and told in message
    assert not elsewhere or f"out/journal.sqlite{told}" in refused("report", "out")


def test_a_damaged_checkpoint_names_itself_and_the_one_before(refused: Say, run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_2"
    for name in ("model.safetensors", "trainer/optimizer.safetensors", "trainer.json", "config.json"):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(b"\x08\x00")
        message = refused_resume(refused, run)
        assert "checkpoints/step_2" in message and "delete" in message and "step_1" in message, name
        (checkpoint / name).write_bytes(content)


def test_a_checkpoint_of_another_model_is_refused(refused: Say, run: Path) -> None:
    Path("model").unlink()
    runs.save_model(Path("model"), intermediate_size=64)
    assert "intermediate_size = 48, but the run's model 'model' has 64" in refused_resume(refused, run)


def test_a_run_is_not_resumed_over_another_dataset_but_over_the_right_one(refused: Say) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    assert cli.main(["train", "run.toml", "--run-dir", "out", "--steps", "1"]) == 0
    for name in ("letters", "unseen"):
        file = Path(f"{name}.jsonl")
        right = file.read_bytes()
        file.write_bytes(right.splitlines(keepends=True)[0])
        told = refused_resume(refused, Path("out"))
        assert f"{file} has changed since the run began ({len(right)} bytes then, " in told
        file.unlink()
        told = refused_resume(refused, Path("out"))
        assert f"a dataset of this run is missing: source '{name}': no file {file}" in told
        file.write_bytes(right)
    assert cli.main(["train", "--resume", "out", "--steps", "2"]) == 0
    assert len(runs.batches(Path("out"))) == 2


def test_a_run_recorded_without_fingerprints_is_resumed_and_gets_them(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    recorded = config["meta"].pop("datasets")["train/letters"]
    (run / "config.json").write_text(json.dumps(config))
    assert cli.main(["train", "--resume", "out", "--steps", "3"]) == 0
    again = json.loads((run / "config.json").read_text())["meta"]["datasets"]["train/letters"]
    assert (again["size"], again["sha256"]) == (recorded["size"], recorded["sha256"])


# -- a machine that has run out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["journal", "checkpoint"])
def test_a_full_disk_stops_the_run_which_can_go_on(refused: Say, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    def write_journal(journal: Journal, events: object) -> None:
        if journal.last_seq > 60:
            journal._db.execute("PRAGMA max_page_count = 1")
        append(journal, events)  # type: ignore[arg-type]

    def save(trainer: LocalTrainer, folder: Path, extra: object) -> None:
        no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with monkeypatch.context() as patch:
            patch.setattr("rollover.trainer.moments.save_file", no_room)
            save_as_ever(trainer, folder, extra)  # type: ignore[arg-type]

    append, save_as_ever = Journal.append, LocalTrainer.save
    with monkeypatch.context() as patch:
        if full == "journal":
            patch.setattr(Journal, "append", write_journal)
        else:
            patch.setattr(LocalTrainer, "save", save)
        message = refused("train", "run.toml", "--run-dir", "out")
    assert "disk" in message and "space" in message and "resume with: rollover train --resume out" in message
    before = runs.ledger(Path("out"))
    assert before.next_group_id > 0
    assert cli.main(["train", "--resume", "out"]) == 0
    after = runs.ledger(Path("out"))
    assert after.tokens.wasted[WasteCause.FAILED] == before.tokens.wasted[WasteCause.FAILED]


def test_a_cache_that_does_not_fit_into_memory_is_named(refused: Say) -> None:
    message = refused("train", "run.toml", "--engine.kv_cache_bytes", str(10**16))
    assert f"lower engine.kv_cache_bytes (now {10**16})" in message


def test_a_malformed_reward_ends_the_run_and_is_scored_again_once_mended(refused: Say) -> None:
    wrong = "async def f(completions, **columns):\n    return 1.0\n"
    Path("plain_reward.py").write_text(wrong)
    argv = ("train", "run.toml", "--run-dir", "out", "--tasks.train.0.reward.function", "plain_reward:f")
    message = refused(*argv)
    assert "reward function plain_reward:f must return a list of 1 number, got float 1.0 (prompt letters/" in message
    ledger = runs.ledger(Path("out"))
    num_scored = sum(group.num_scored for group in ledger.groups.values())
    assert (ledger.num_failed, num_scored, len(ledger.unscored) > 0) == (0, 0, True)
    del sys.modules["plain_reward"]
    Path("plain_reward.py").write_text(wrong.replace("return 1.0", "return [float(len(completions[0]))]"))
    assert cli.main(["train", "--resume", "out"]) == 0
    assert runs.ledger(Path("out")).num_failed == 0


def test_a_reward_that_always_fails_stops_the_run_with_its_reason(refused: Say) -> None:
    Path("broken_reward.py").write_text("async def f(completions, **columns):\n    return 1 / 0\n")
    message = refused("train", "run.toml", "--run-dir", "out", "--tasks.train.0.reward.function", "broken_reward:f")
    assert "ZeroDivisionError: division by zero (broken_reward.py, line 2)" in message
