"""A trainer of one device in a process of its own: to the bit the one in the process of a run, and replaced when it is
lost."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollover.trainer.checkpoint import read_manifest, verify_files
from rollover.trainer.config import LoraConfig
from tests.trainer.builders import apart_from_time, assert_same, make_batch, make_folder, make_trainer
from tests.trainer.test_fleet import PROMPTS, fleet, published

BATCHES = [make_batch(step=step, num_groups=5) for step in range(3)]
ADAPTER = LoraConfig(rank=3, alpha=6.0, publish="adapter")


@pytest.mark.parametrize("settings", [{}, {"lora": ADAPTER}], ids=["full", "adapter"])
def test_a_lone_rank_equals_a_trainer_also_after_a_kill(tmp_path: Path, forked: None, settings: dict[str, Any]) -> None:
    folder = make_folder(tmp_path / "policy")
    here = make_trainer(folder, deterministic=True, **settings)
    told: list[str] = []
    with fleet(folder, tmp_path, told, num_devices=1, **settings) as trainer:
        assert_alike(trainer, here)
        for batch in BATCHES:
            os.kill(trainer.pids[0], signal.SIGTERM)  # as it comes to all processes of a job
            assert apart_from_time(trainer.step(batch).metrics) == apart_from_time(here.step(batch).metrics)
            if batch.step == 1:
                trainer.save(tmp_path / "ours")
                here.save(tmp_path / "theirs")
                changed = next((tmp_path / "ours").glob("*config.json"))
                content = changed.read_text()
                changed.write_text(content + "\n")  # which the rank does not find: it reads no checkpoint twice
                os.kill(trainer.pids[0], signal.SIGKILL)
        assert (trainer.next_logits(PROMPTS) == here.next_logits(PROMPTS)).all()
        assert_alike(trainer, here)
    (line,) = told
    assert line.startswith("trainer: rank 0 of 1 was killed") and line.endswith("0 steps to repeat (restart 1 of 3)")
    assert_same(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    manifest = read_manifest(tmp_path / "ours")
    changed.write_text(content)
    verify_files(tmp_path / "ours", manifest)
    assert manifest.num_ranks == 1 and manifest.files.keys() == read_manifest(tmp_path / "theirs").files.keys()
    again = make_trainer(folder, deterministic=True, resume_from=tmp_path / "ours", **settings)
    assert again.version == 2


@pytest.mark.parametrize("num", [1, 2])
def test_weights_in_the_machines_memory_are_trained_and_saved_as_others(tmp_path: Path, forked: None, num: int) -> None:
    """Also continued with the weights on the device, from such a checkpoint."""
    folder = make_folder(tmp_path / "policy")
    here = make_trainer(folder)
    with fleet(folder, tmp_path, num_devices=num, offload=True, deterministic=False) as trainer:
        for batch in BATCHES[:2]:
            found, expected = trainer.step(batch).metrics, here.step(batch).metrics
            for name in ("loss", "grad_norm"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
        compare(published(trainer), published(here))
        trainer.save(tmp_path / "ours")
    again = make_trainer(folder, resume_from=tmp_path / "ours")
    for one in (again, here):
        one.step(BATCHES[2])
    compare(published(again), published(here))


compare = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)


def assert_alike(trainer: Any, here: Any) -> None:
    """The same weights for engines, read and as they would be sent."""
    assert_same(published(trainer), published(here))
    sent, expected = trainer.weights_to_send(), here.weights_to_send()
    assert (sent and sent.manifest) == (expected and expected.manifest)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by the file and the name there, but for the states of each process's generators."""
    files = sorted(folder.rglob("*.safetensors"))
    found = {f"{file.relative_to(folder)}:{name}": t for file in files for name, t in load_file(file).items()}
    return {name: tensor for name, tensor in found.items() if "_generator/" not in name}
