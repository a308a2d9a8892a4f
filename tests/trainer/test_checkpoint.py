from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollover.errors import ModelError, ResourceError
from rollover.hf.folder import write_folder
from rollover.trainer.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_manifest,
    sum_of_file,
)
from rollover.trainer.config import LoraConfig
from tests.trainer.builders import apart_from_time, assert_same, make_batch, make_folder, make_trainer, trained
from tests.trainer.test_families import PADDED, config_of


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint after one step."""
    trained(folder).save(checkpoint_path(tmp_path, 1), {"journal": 17})
    return checkpoint_path(tmp_path, 1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"algorithm": "reinforce++"}, {"algorithm": "dapo", "lora": LoraConfig(rank=4, alpha=8.0)}],
    ids=["grpo", "reinforce++", "adapters"],
)
def test_a_resumed_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"mini_batches": 2, "deterministic": True, "schedule": "cosine", "weight_decay": 0.1, **settings}
    straight = trained(folder, 2, **settings)
    straight.save(tmp_path / "step_2")
    resumed = make_trainer(folder, **settings, resume_from=tmp_path / "step_2")
    assert resumed.version == 2
    for step in (2, 3):
        one, other = (apart_from_time(t.step(make_batch(step=step)).metrics) for t in (straight, resumed))
        assert one == other
    assert_same(straight.weights(), resumed.weights())


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_resumed_run_saves_on_without_the_folders_it_came_from(folder: Path, tmp_path: Path, keep_last: int) -> None:
    initial, root = tmp_path / "initial", tmp_path / "checkpoints"
    shutil.copytree(folder, initial)
    trained(initial).save(checkpoint_path(root, 1))
    trainer = make_trainer(initial, resume_from=checkpoint_path(root, 1))
    shutil.rmtree(initial)
    for step in range(1, 6):
        trainer.step(make_batch(step=step))
        trainer.save(checkpoint_path(root, step + 1))
        prune_checkpoints(root, keep_last)
    assert [p.name for p in list_checkpoints(root)] == [f"step_{n}" for n in range(7 - keep_last, 7)]
    assert (root / "step_6" / "tokenizer.json").read_text() == "{}"


def test_a_checkpoint_before_the_first_step_resumes_too(folder: Path, tmp_path: Path) -> None:
    fresh = make_trainer(folder)
    fresh.save(tmp_path / "step_0")
    resumed = make_trainer(folder, resume_from=tmp_path / "step_0")
    for trainer in (fresh, resumed):
        trainer.step(make_batch())
    assert_same(fresh.weights(), resumed.weights())


def test_a_checkpoint_is_an_ordinary_model_folder(folder: Path, saved: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(saved)
    assert_same(dict(found.named_parameters()), make_trainer(folder, resume_from=saved).weights())
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_the_callers_json_comes_back(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.version == 1 and manifest.extra == {"journal": 17}


def test_generators_go_on_where_they_were(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    torch.manual_seed(5)
    trainer.save(tmp_path / "step_0")
    expected = torch.rand(3)
    torch.manual_seed(6)
    make_trainer(folder, resume_from=tmp_path / "step_0")
    assert torch.equal(torch.rand(3), expected)


def test_only_finished_checkpoints_are_listed_and_the_newest_kept(tmp_path: Path) -> None:
    for version in (2, 10, 9):
        write_folder(checkpoint_path(tmp_path, version), lambda folder: (folder / "trainer.json").touch())
    (tmp_path / "step_11").mkdir()
    (tmp_path / ".partial-step_12-x").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_2", "step_9", "step_10"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_10"
    prune_checkpoints(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_11", "step_9"]
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_full_disk_leaves_the_previous_checkpoint(folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(folder, resume_from=saved)
    trainer.step(make_batch(step=1))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(ResourceError, match=r"no space left .*step_2 was not written.*checkpoint\.keep_last"):
        trainer.save(checkpoint_path(saved.parent, 2))
    monkeypatch.undo()
    assert list_checkpoints(saved.parent) == (saved,)
    assert make_trainer(folder, resume_from=saved).version == 1


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


NAMES = ["model.safetensors", "trainer/optimizer.safetensors", "config.json", "tokenizer.json", "trainer.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_in_any_file_is_noticed_and_named(folder: Path, saved: Path, name: str) -> None:
    shutil.copytree(saved, checkpoint_path(saved.parent, 0))
    flip_a_bit(saved / name)
    with pytest.raises(ModelError) as raised:
        make_trainer(folder, resume_from=saved)
    assert str(saved / name) in str(raised.value) and " is damaged" in str(raised.value)
    assert str(raised.value).endswith(f"or start a new run with --model.path {saved.parent / 'step_0'}")


@pytest.mark.parametrize(
    ("damaged", "mend"),
    [
        ({"4"}, "delete {4} to resume from step_3, or start a new run with --model.path {3}"),
        ({"4", "3"}, "delete {4} and {3} to resume from step_2, or start a new run with --model.path {2}"),
        ({"4", "2"}, "delete {4} to resume from step_3, or start a new run with --model.path {3}"),
        ({"4", "3", "2"}, "no other is intact: restore one, or start a new run"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json"])
def test_only_a_whole_checkpoint_is_offered(folder: Path, saved: Path, damaged: set[str], mend: str, name: str) -> None:
    places = {number: saved.parent / f"step_{number}" for number in "234"}
    for number, place in places.items():
        shutil.copytree(saved, place)
        if number in damaged:
            flip_a_bit(place / name)
    shutil.rmtree(saved)
    with pytest.raises(ModelError) as raised:
        make_trainer(folder, resume_from=places["4"])
    for number, place in places.items():
        mend = mend.replace(f"{{{number}}}", str(place))
    assert str(raised.value).startswith(str(places["4"] / name)) and str(raised.value).endswith(f"; {mend}")
    assert str(raised.value).count(mend) == 1


def test_a_file_that_is_gone_is_named(folder: Path, saved: Path) -> None:
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing; no other is left: restore it, or start a new"):
        make_trainer(folder, resume_from=saved)


def test_a_checkpoint_without_checksums_goes_on(folder: Path, saved: Path) -> None:
    forget_checksums(saved)
    assert not read_manifest(saved).files
    assert make_trainer(folder, resume_from=saved).version == 1


def forget_checksums(checkpoint: Path, **changes: object) -> None:
    """As versions wrote it that had none."""
    manifest = json.loads((checkpoint / "trainer.json").read_text())
    del manifest["files"], manifest["sha256"]
    (checkpoint / "trainer.json").write_text(json.dumps({**manifest, **changes}))


def test_settings_that_differ_are_named(folder: Path, saved: Path) -> None:
    with pytest.raises(ModelError, match=r"trainer\.learning_rate = 0\.001, now it is 0\.5: restore the setting"):
        make_trainer(folder, learning_rate=0.5, resume_from=saved)
    with pytest.raises(ModelError, match=r"algorithm\.advantage = 'group_std', now it is 'leave_one_out'"):
        make_trainer(folder, algorithm="rloo", resume_from=saved)
    with pytest.raises(ModelError, match=r"temperature = 0\.8, now it is 1\.0"):
        make_trainer(folder, temperature=1.0, resume_from=saved)
    make_trainer(folder, micro_batch_tokens=50, num_steps=99, resume_from=saved)  # change nothing that is learned


def test_a_deterministic_run_refuses_another_number_of_threads(folder: Path, saved: Path) -> None:
    forget_checksums(saved, num_threads=64)
    with pytest.raises(ModelError, match=r"written with 64 threads.*OMP_NUM_THREADS=64"):
        make_trainer(folder, deterministic=True, resume_from=saved)


def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    other = make_folder(tmp_path / "other", hidden_size=16)
    with pytest.raises(ModelError, match=r"hidden_size = 32.*has 16: resume with the model that the run started from"):
        make_trainer(other, resume_from=saved)


def test_a_model_whose_config_has_a_size_under_another_name_resumes(tmp_path: Path) -> None:
    """As LFM2's has on the hub. transformers writes it into checkpoints under its own name."""
    model: Any = AutoModelForCausalLM.from_config(config_of("lfm2", **PADDED["lfm2"]))
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    shape = json.loads(path.read_text())
    path.write_text(json.dumps({"block_ff_dim": shape.pop("intermediate_size"), **shape}))
    make_trainer(tmp_path / "model").save(tmp_path / "step_0")
    assert make_trainer(tmp_path / "model", resume_from=tmp_path / "step_0").version == 0


def test_optimizer_state_that_does_not_fit_is_named(folder: Path, saved: Path) -> None:
    forget_checksums(saved)
    path = saved / "trainer" / "optimizer.safetensors"
    tensors = load_file(path)
    name = "exp_avg/model.norm.weight"
    save_file({**tensors, name: torch.zeros(5)}, path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the shape \(5,\), but the model needs \(32,\)"):
        make_trainer(folder, resume_from=saved)
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(ModelError, match=r"lacks exp_avg/model\.norm\.weight"):
        make_trainer(folder, resume_from=saved)
    save_file({**tensors, "exp_avg/other": torch.zeros(5)}, path)
    with pytest.raises(ModelError, match="has exp_avg/other, which the model does not have; resume with"):
        make_trainer(folder, resume_from=saved)
    path.write_bytes(b"rubbish")
    with pytest.raises(ModelError, match=r"optimizer\.safetensors cannot be read"):
        make_trainer(folder, resume_from=saved)


def test_a_folder_that_is_no_checkpoint_is_told_as_such(folder: Path, saved: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a checkpoint: it has no trainer\.json"):
        read_manifest(folder)
    forget_checksums(saved, format_version=99)
    with pytest.raises(ModelError, match="format version 99 cannot be read; this program reads 1"):
        read_manifest(saved)
    (saved / "trainer.json").write_text('{"format_version": 1')
    with pytest.raises(ModelError, match=r"trainer\.json is damaged"):
        read_manifest(saved)


def test_a_sum_is_taken_in_pieces_between_which_progress_is_shown(tmp_path: Path) -> None:
    (tmp_path / "moments").write_bytes(b"ab")
    ticks: list[None] = []
    assert sum_of_file(tmp_path / "moments", lambda: ticks.append(None)) == hashlib.sha256(b"ab").hexdigest()
    assert ticks
