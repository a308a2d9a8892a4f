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

import pytest

from rollover import cli
from rollover.batch import WasteCause
from rollover.rollout.journal import Journal
from rollover.run import directory
from rollover.trainer.local import LocalTrainer
from tests import runs

Say = Callable[..., str]


@pytest.fixture
def refused(experiment: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """What ``rollover`` says when it refuses ``argv``."""

    def say(*argv: str) -> str:
        capsys.readouterr()
        assert cli.main(argv) == 2, capsys.readouterr().out[-500:]
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert err.startswith("error: ")
        return err.removeprefix("error: ").strip()

    return say


def refused_start(refused: Say, *argv: str) -> str:
    """A start that is refused leaves no directory behind."""
    message = refused("train", "run.toml", "--run-dir", "out", *argv)
    assert not Path("out").exists()
    return message


DATASETS = [
    ("", "source 'letters': data.jsonl contains no rows"),
    ('{"prompt": "a=", "answer": "a"}\n{"prompt"', "data.jsonl, line 2: not valid JSON"),
    ('{"prompt": "a=", "answer": "a"}\n\n[1]\n', "data.jsonl, line 3: expected a JSON object, got list"),
    ('{"prompt": "a=", "answer": "a"}\n{"answer": "a"}\n', "data.jsonl, line 2: column 'prompt' is missing; the columns are answer;"),
    ('{"prompt": "a=", "answer": "a"}\n{"prompt": "a="}\n', "data.jsonl, line 2: column 'answer' is missing; the columns are prompt; fix the row or change reward.function"),
    ('{"text": "a=", "answer": "a"}\n', "data.jsonl, line 1: none of the columns prompt, question, problem, query, instruction, input, messages exists; the columns are text, answer; set prompt_column"),
    ('{"prompt": "a=", "question": "b", "answer": "a"}\n', "columns 'prompt' and 'question' are both candidates; set prompt_column"),
    ('{"prompt": 3, "answer": "a"}\n', "data.jsonl, line 1: a prompt is text or a list of messages"),
    ('{"prompt": "", "answer": "a"}\n', "data.jsonl, line 1: the prompt is blank"),
    ("\x00\x01PAR1", "data.jsonl, line 1: not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), DATASETS)
def test_a_dataset_that_cannot_be_used_is_named_with_its_line(refused: Say, content: str, message: str) -> None:
    Path("data.jsonl").write_text(content)
    assert message in refused_start(refused, "--tasks.train.0.path", "data.jsonl")


def test_a_missing_or_torn_file_is_named(refused: Say) -> None:
    assert "source 'letters': no file gone.jsonl" in refused_start(refused, "--tasks.train.0.path", "gone.jsonl")
    Path("torn.parquet").write_bytes(b"PAR1 and nothing else")
    torn = refused_start(refused, "--tasks.train.0.path", "torn.parquet", "--tasks.train.0.kind", "parquet")
    assert "torn.parquet: not a readable Parquet file" in torn


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks.train.0.reward.function", "letter_reward:shar"], "no function 'shar' in letter_reward; did you mean 'share'?"),
        (["--tasks.train.0.reward.function", "gone:share"], "cannot import 'gone' (ModuleNotFoundError: No module named 'gone'); it must be installed or be in"),
        (["--tasks.train.0.reward.function", "program:share"], "the module 'program' ends the program when it is imported (exit code 3); move script code under `if __name__"),
        (["--tasks.train.0.reward.function", "unfinished:share"], "cannot import 'unfinished' (SyntaxError: "),
        (["--tasks.train.0.reward.function", "letter_reward:share"], "is not async and would block the run; set reward.workers to 1 or more"),
        (["--tasks.train.0.reward.function", "letter_reward"], "reward.function must read 'module:function', got 'letter_reward'"),
        (["--tasks.train.0.reward.kind", "exakt"], "'exakt' is not allowed; did you mean 'exact'?"),
        (["--tasks.train", '[{kind="reasoning_gym", name="chain_summ"}]'], "no dataset 'chain_summ'; did you mean 'chain_sum'?"),
        (["--tasks.train", '[{kind="reasoning_gym", name="chain_sum", config={terms=3}}]'], "no parameter 'terms'; did you mean 'min_terms'?"),
    ],
)  # fmt: skip
def test_an_unknown_task_or_reward_gets_the_nearest(refused: Say, argv: list[str], message: str) -> None:
    Path("program.py").write_text("import sys\nsys.exit(3)\n")
    Path("unfinished.py").write_text("def share(:\n")
    assert message in refused_start(refused, *argv)


def damaged(model: Path, change: Callable[[Path], object]) -> None:
    shutil.copytree(model, "wrong")
    change(Path("wrong"))


def edited(file: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return edit


MODELS: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "model 'wrong' is not a folder here and could not be fetched from the hub"),
    (lambda folder: (folder / "config.json").unlink(), "model folder 'wrong' has no config.json"),
    (edited("config.json", '"qwen3"', '"gpt2"'), "model_type 'gpt2' cannot be trained"),
    (edited("config.json", "{", "("), "wrong/config.json is not a model config"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "wrong: no tokenizer (tokenizer.json, "),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "wrong: the tokenizer cannot be loaded ("),
    (edited("tokenizer_config.json", '"eos_token"', '"eos"'), "names no end token (eos_token in tokenizer_config.json)"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model folder 'wrong' has no *.safetensors weights"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "model folder 'wrong' cannot be loaded: "),
    (edited("config.json", '"intermediate_size": 48', '"intermediate_size": 64'), "weights do not fit config.json"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MODELS)
def test_a_model_that_cannot_be_used_says_what_is_wrong_with_it(
    refused: Say, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str
) -> None:
    import huggingface_hub

    def offline(*args: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    damaged(tiny_model, change)
    assert message in refused_start(refused, "--model.path", "wrong")
    assert "\n" not in refused_start(refused, "--model.path", "wrong")


def test_a_dry_run_finds_what_a_run_would_and_makes_nothing(refused: Say, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    for argv, message in (
        (["--tasks.train.0.path", "gone.jsonl"], "no file gone.jsonl"),
        (["--tasks.train.0.reward.function", "letter_reward:shar"], "did you mean 'share'?"),
        (["--model.path", "nowhere/at/all"], "does not exist"),
        (["--tasks.train", "[]"], "tasks.train names no source"),
        (["--rollout.max_new_tokens", "100"], "the model's context holds 80"),
    ):
        assert message in refused("train", "run.toml", "--dry-run", *argv)
    assert cli.main(["train", "run.toml", "--dry-run"]) == 0
    assert "# train source letters: jsonl, 16 rows, scored by function" in capsys.readouterr().out
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


def test_a_directory_with_a_run_takes_no_other(refused: Say, run: Path) -> None:
    assert "out holds a run of another config (it differs in steps" in refused("train", "run.toml", "--run-dir", "out")
    assert "rollout.group_size cannot change when a run is resumed" in refused_resume(
        refused, run, "--rollout.group_size", "4"
    )
    Path("thesis").mkdir()
    Path("thesis/thesis.tex").write_text("x")
    assert "neither empty nor a run directory" in refused("train", "run.toml", "--run-dir", "thesis")


def test_a_directory_is_used_by_one_process_at_a_time(refused: Say, run: Path) -> None:
    with directory.RunDir(run):
        assert "out is in use by pid" in refused("train", "--resume", "out")
        assert "out is in use by pid" in refused("train", "run.toml", "--run-dir", "out")


def test_what_is_no_run_is_neither_resumed_nor_reported(refused: Say) -> None:
    assert "model is not a run directory" in refused("report", "model")
    assert "model/config.json is damaged: its content was not written by a run" in refused("train", "--resume", "model")
    assert "gone is not a run directory" in refused("train", "--resume", "gone")
    assert not Path("model/report.html").exists()


def test_a_damaged_config_is_named(refused: Say, run: Path) -> None:
    (run / "config.json").write_text("{")
    assert "out/config.json is damaged" in refused("train", "--resume", "out")
    assert "out/config.json" in refused("report", "out")


def test_a_damaged_journal_is_named_and_left_alone(refused: Say, run: Path) -> None:
    (run / "journal.sqlite").write_bytes(b"this is no database" * 100)
    assert "out/journal.sqlite is not a journal" in refused_resume(refused, run)
    assert "out/journal.sqlite is not a journal" in refused("report", "out")


def test_an_event_that_cannot_be_read_is_named(refused: Say, run: Path) -> None:
    with sqlite3.connect(run / "journal.sqlite") as db:
        db.execute("UPDATE events SET body = '{' WHERE seq = 5")
    db.close()
    assert "out/journal.sqlite, event 5" in refused_resume(refused, run)
    assert "out/journal.sqlite, event 5" in refused("report", "out")


def test_a_journal_older_than_the_checkpoint_is_refused(refused: Say, run: Path) -> None:
    with sqlite3.connect(run / "journal.sqlite") as db:
        db.execute("DELETE FROM events WHERE seq > 5")
    db.close()
    message = refused_resume(refused, run)
    assert "out/journal.sqlite ends at event 5, but out/checkpoints/step_2 includes event" in message


def test_a_missing_journal_does_not_start_the_rollout_afresh(refused: Say, run: Path) -> None:
    (run / "journal.sqlite").unlink()
    message = refused_resume(refused, run)
    assert "out/journal.sqlite" in message and "step_2" in message


def test_a_damaged_line_of_metrics_is_named(refused: Say, run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(["nonsense\n", *lines]))
    assert "out/metrics.jsonl:1 is not a metrics row" in refused("report", "out")
    assert "out/metrics.jsonl:1 is not a metrics row" in refused_resume(refused, run)


def test_a_damaged_checkpoint_names_itself_and_the_one_before(refused: Say, run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_2"
    for name in ("model.safetensors", "trainer/optimizer.safetensors", "trainer.json", "config.json"):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(b"\x08\x00")
        message = refused_resume(refused, run)
        assert "checkpoints/step_2" in message and "delete" in message and "step_1" in message, name
        (checkpoint / name).write_bytes(content)
    shutil.rmtree(checkpoint)
    assert cli.main(["train", "--resume", "out", "--steps", "3"]) == 0
    assert len(runs.batches(run)) == 3, "the mend that was offered works"


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


def test_a_disk_too_full_to_begin_is_told_before_work(refused: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MIN_FREE_BYTES", 10**18)
    assert "GB are free; make room or choose another place with --run-dir" in refused("train", "run.toml")


@pytest.mark.parametrize("full", ["journal", "checkpoint"])
def test_a_disk_that_fills_up_stops_the_run_which_can_go_on(
    refused: Say, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def write_journal(journal: Journal, events: object) -> None:
        if journal.last_seq > 60:
            journal._db.execute("PRAGMA max_page_count = 1")
        append(journal, events)  # type: ignore[arg-type]

    def save(trainer: LocalTrainer, folder: Path, extra: object) -> None:
        def no_room(*args: object, **options: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("rollover.trainer.checkpoint.save_file", no_room)
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


def test_a_malformed_reward_ends_the_run_and_is_scored_again_once_mended(
    refused: Say,
) -> None:
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
