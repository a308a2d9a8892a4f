"""A run of TRL's trainer that dies goes on with the batches that it had, each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from rollover.errors import ConfigError, RunError
from rollover.integrations.trl.trainer import run_folder, whole_checkpoints
from rollover.rollout.events import BatchTrained, Restarted, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.run.directory import RunDir
from tests.integrations.trl.killed import POINTS, STEPS
from tests.integrations.trl.kit import GENERATIONS, PROMPTS, WatchedTrainer, arguments, journaled, letters, trainer
from tests.speed import within

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


class Died(Exception):
    """What a run of these tests dies of."""


@dataclass(slots=True)
class History:
    """A run of two epochs of 8 rows: 2 batches an epoch, each trained in two halves."""

    trainer: Any
    epoch_ends: list[int]
    minibatches: list[list[list[int]]]
    """For each optimizer step, the tokens of prompt and response of each row."""

    @property
    def epochs(self) -> list[tuple[int, float]]:
        return [(row["step"], row["epoch"]) for row in self.trainer.state.log_history if "loss" in row]


def history(model: Path, folder: Path, *, dies_after: int | None = None) -> History:
    from transformers import TrainerCallback

    ends: list[int] = []
    trained: list[list[list[int]]] = []

    class Kept(WatchedTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            parts = [inputs[name] * inputs[name.replace("ids", "mask")] for name in ("prompt_ids", "completion_ids")]
            trained.append([[i for i in row if i] for row in torch.cat(parts, dim=1).tolist()])
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Watch(TrainerCallback):  # type: ignore[misc]
        has_died = False

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == dies_after and not self.has_died:
                self.has_died = True
                raise Died

    made = trainer(
        model,
        folder,
        asked={"rollout": {"strategy": "sync"}},
        made_by=Kept,
        dataset=letters().select(range(8)),
        per_device_train_batch_size=8,
        steps_per_generation=2,
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
    )
    made.add_callback(Watch())
    return History(made, ends, trained)


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


def test_a_run_killed_at_every_point_trains_each_batch_as_journaled(tiny_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.trl.killed", str(tiny_model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=within(500),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    batches = journaled(tmp_path)
    assert [batch.step for batch in batches] == [*range(STEPS)]
    assert len({g.group_id for batch in batches for g in batch.groups}) == STEPS * PROMPTS
    as_journaled = {
        batch.step: ([g.group_id for g in batch.groups], [list(t.token_ids) for t in batch.trajectories])
        for batch in batches
    }
    given = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    assert {entry["point"] for entry in given} >= {*POINTS[1:], ""}
    for entry in given:
        assert (entry["groups"], entry["tokens"]) == as_journaled[entry["step"]], entry["point"]
    steps = [entry["step"] for entry in given]
    assert len(steps) > STEPS, "no step was repeated, and the test shows nothing"
    last = [entry["step"] for entry in given if entry["point"] == ""]
    assert last == [*range(last[0], STEPS)]
    events = [event for _, event in read_events(tmp_path / "out" / "_rollover" / "journal.sqlite")]
    assert sum(isinstance(event, Restarted) for event in events) == len(POINTS)
    assert {e.step for e in events if isinstance(e, BatchTrained)} == {*range(STEPS)}
    assert [step for step, _ in whole_checkpoints(tmp_path / "out")] == [STEPS]


def test_a_resumed_run_decodes_nothing_twice(tiny_model: Path, tmp_path: Path) -> None:
    first = trainer(tiny_model, tmp_path, max_steps=2, **SAVING)
    first.train()
    assert first.seen[-1].account["rollout/parked_samples"] > 0
    journal = tmp_path / "out" / "_rollover" / "journal.sqlite"
    before = [event for _, event in read_events(journal)]
    again = trainer(tiny_model, tmp_path, max_steps=4, **SAVING)
    again.train(resume_from_checkpoint=True)
    assert [seen.batch.step for seen in again.seen] == [2, 3]
    after = [event for _, event in read_events(journal)]
    assert after[: len(before)] == before
    tokens = sum(len(e.segment.token_ids) for e in after if isinstance(e, SegmentEnded))
    assert again.seen[-1].account["rollout/decoded_tokens"] == tokens
    assert again.seen[-1].account["rollout/wasted_tokens/failed_or_crashed"] == 0


def test_uploads_to_the_hub_leave_out_the_run_by_either_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Mock()
    hub.create_repo().repo_id = "somebody/model"
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    place, older = tmp_path / "out" / "_rollover", tmp_path / "out" / "rollover"
    trainer(tiny_model, tmp_path, max_steps=1, **SAVING).train()
    place.rename(older)
    again = trainer(tiny_model, tmp_path, max_steps=2, push_to_hub=True, **SAVING)
    again.train(resume_from_checkpoint=True)
    again.push_to_hub()
    assert (place / "journal.sqlite").exists() and not older.exists()
    uploads = [call.kwargs for call in hub.upload_folder.call_args_list]
    assert {said["folder_path"] for said in uploads} == {str(tmp_path / "out")} and len(uploads) == 2
    there = [str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*")]
    for said in uploads:
        sent = [*filter_repo_objects(there, ignore_patterns=said["ignore_patterns"])]
        assert "model.safetensors" in sent and not [name for name in sent if "rollover" in name]


def test_the_folder_of_an_earlier_version_is_renamed_only_for_its_own_run(tmp_path: Path) -> None:
    place, older = tmp_path / "_rollover", tmp_path / "rollover"
    older.mkdir()
    for job, has_begun, resume, found in (
        (None, True, True, place),
        ("train", True, True, place),
        ("trl", True, False, older),
        ("trl", True, True, None),
        ("trl", False, False, None),
    ):
        (older / "config.json").write_text(json.dumps({"meta": {"job": job}} if job else {}))
        (older / "journal.sqlite").touch() if has_begun else (older / "journal.sqlite").unlink()
        if found is not None:
            assert run_folder(tmp_path, resume=resume) == found and older.exists() and not place.exists()
            continue
        with RunDir(older), pytest.raises(RunError, match=f"{older} is in use by pid {os.getpid()}"):
            run_folder(tmp_path, resume=resume)
        assert run_folder(tmp_path, resume=resume) == place == run_folder(tmp_path, resume=False)
        place.rename(older)


def test_an_earlier_run_is_neither_written_over_nor_mixed_with_another(tiny_model: Path, tmp_path: Path) -> None:
    trainer(tiny_model, tmp_path, max_steps=1, **SAVING).train()
    with pytest.raises(RunError, match=r"resume it with trainer\.train\(resume_from_checkpoint=True\)"):
        trainer(tiny_model, tmp_path, max_steps=1).train()
    with pytest.raises(RunError, match="seed differs from the value that this run began with"):
        trainer(tiny_model, tmp_path, max_steps=2, seed=12).train(resume_from_checkpoint=True)
    other = letters().select(range(8))
    with pytest.raises(RunError, match=r"this run began with dataset 16 rows, .*, but now it is 8 rows"):
        trainer(tiny_model, tmp_path, max_steps=2, dataset=other).train(resume_from_checkpoint=True)
    halves = {"per_device_train_batch_size": PROMPTS * GENERATIONS // 2, "steps_per_generation": 2}
    with pytest.raises(RunError, match="this run began with steps per batch 1, but now it is 2"):
        trainer(tiny_model, tmp_path, max_steps=4, **halves).train(resume_from_checkpoint=True)
    answered = letters().map(lambda row: {"answer": row["answer"].upper()})
    with pytest.raises(RunError, match=r"this run began with dataset 16 rows, .*, but now it is 16 rows"):
        trainer(tiny_model, tmp_path, max_steps=2, dataset=answered).train(resume_from_checkpoint=True)


def test_a_new_run_does_not_begin_beside_checkpoints_of_another(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-20").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-20" / "trainer_state.json").write_text("{}")
    with pytest.raises(RunError, match="checkpoint-20 is a checkpoint of another run, from which this one would be"):
        trainer(tiny_model, tmp_path, max_steps=1).train()
    assert not (tmp_path / "out" / "_rollover").exists()


@pytest.mark.parametrize("limit", [2, 0, None])
def test_the_best_checkpoint_keeps_no_batches(tmp_path: Path, limit: int | None) -> None:
    for step in (10, 40, 50):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    state = SimpleNamespace(global_step=50, best_model_checkpoint=str(tmp_path / "out" / "checkpoint-10"))
    saved: list[int] = []
    host: Any = SimpleNamespace(
        args=arguments(tmp_path, save_total_limit=limit), state=state, _rollouts=SimpleNamespace(saved=saved.append)
    )
    WatchedTrainer._saved(host)
    assert saved == [40]


@pytest.mark.parametrize("is_same_process", [False, True])
def test_a_run_resumed_within_an_epoch_continues_there(tiny_model: Path, tmp_path: Path, is_same_process: bool) -> None:
    straight = history(tiny_model, tmp_path / "straight")
    straight.trainer.train()
    assert straight.epochs == [(step, step / 4) for step in range(1, 9)]
    assert straight.epoch_ends == [4, 8]

    killed = history(tiny_model, tmp_path / "resumed", dies_after=3)
    with pytest.raises(Died):
        killed.trainer.train()
    assert [step for step, _ in whole_checkpoints(tmp_path / "resumed" / "out")] == [2]
    assert killed.minibatches == straight.minibatches[:3]
    resumed = killed if is_same_process else history(tiny_model, tmp_path / "resumed")
    resumed.minibatches.clear()
    resumed.trainer.train(resume_from_checkpoint=True)

    assert resumed.epochs == straight.epochs
    assert resumed.epoch_ends == straight.epoch_ends
    assert resumed.minibatches == straight.minibatches[2:]


def test_a_trained_model_is_not_trained_from_the_beginning_again(tiny_model: Path, tmp_path: Path) -> None:
    killed = history(tiny_model, tmp_path, dies_after=1)
    with pytest.raises(Died):
        killed.trainer.train()
    with pytest.raises(RunError, match=r"trained for 1 steps, and no checkpoint was saved, .* start the script again"):
        killed.trainer.train(resume_from_checkpoint=True)


def test_there_must_be_something_to_resume(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run to resume: call train"):
        trainer(tiny_model, tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_in_the_middle_of_a_batch_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class SaveNow(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = True

    made = trainer(tiny_model, tmp_path, steps_per_generation=2, max_steps=2)
    made.add_callback(SaveNow())
    with pytest.raises(ConfigError, match="after 1 optimizer steps, in the middle of a batch of 2"):
        made.train()
