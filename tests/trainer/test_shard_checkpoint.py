"""Checkpoints know nothing of who wrote them: any number of ranks goes on from the checkpoints of any other number."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollover.errors import ModelError
from rollover.hf.weights import read_weight_infos
from rollover.trainer import shares
from rollover.trainer.checkpoint import read_manifest, verify_files
from rollover.trainer.world import World
from tests.trainer.builders import apart_from_time, assert_same, make_batch, make_trainer
from tests.trainer.rank_pool import RankPool
from tests.trainer.test_sharded import EPSILON, Trained, assert_alike, refused, train, whole, written

SETTINGS: dict[str, Any] = {
    "algorithm": "dapo",
    "mini_batches": 2,
    "micro_batch_tokens": 60,
    "schedule": "cosine",
    "weight_decay": 0.1,
    "adam_epsilon": EPSILON,
}
BATCHES = [make_batch(step=step, num_groups=5) for step in range(4)]


@pytest.fixture
def pools(two: RankPool, three: RankPool) -> dict[int, RankPool]:
    return {2: two, 3: three}


def written_by(pools: dict[int, RankPool], ranks: int, folder: Path, saved: Path, **setup: Any) -> Path:
    """A checkpoint at version 2."""
    if ranks > 1:
        return written(pools[ranks], saved, folder=folder, given=BATCHES[:2], **SETTINGS, **setup)
    trainer = make_trainer(folder, **SETTINGS, **setup)
    for batch in BATCHES[:2]:
        trainer.step(batch)
    trainer.save(saved)
    return saved


def go_on(world: World | None, *, folder: Path, saved: Path) -> Trained:
    return train(world, folder=folder, given=BATCHES[2:], resume_from=saved, **SETTINGS)


@pytest.mark.parametrize("written", [1, 2, 3])
def test_any_ranks_go_on_from_others(pools: dict[int, RankPool], folder: Path, tmp_path: Path, written: int) -> None:
    saved = written_by(pools, written, folder, tmp_path / "step_2")
    verify_files(saved, read_manifest(saved))
    straight = train(None, folder=folder, given=BATCHES, **SETTINGS).after(2)
    assert_alike(go_on(None, folder=folder, saved=saved), straight)
    for pool in pools.values():
        for found in pool.call(go_on, folder=folder, saved=saved):
            assert_alike(found, straight)


def test_ranks_go_on_bit_for_bit(pools: dict[int, RankPool], folder: Path, tmp_path: Path) -> None:
    saved = written_by(pools, 2, folder, tmp_path / "step_2")
    arguments: dict[str, Any] = {"folder": folder, "deterministic": True, **SETTINGS}
    straight = pools[2].call(train, given=BATCHES, **arguments)[0]
    resumed = pools[2].call(train, given=BATCHES[2:], resume_from=saved, **arguments)[0]
    assert_same(straight.weights, resumed.weights)
    assert [*map(apart_from_time, straight.metrics[2:])] == [*map(apart_from_time, resumed.metrics)]


def test_ranks_save_a_model_folder_in_parts(pools: dict[int, RankPool], folder: Path, tmp_path: Path) -> None:
    saved = written_by(pools, 3, folder, tmp_path / "step_2")
    expected = make_trainer(folder, resume_from=saved, **SETTINGS).weights()
    assert_same(dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters()), expected)
    assert (saved / "tokenizer.json").read_text() == "{}"
    parts = sorted(path.name for path in saved.glob("model-*.safetensors"))
    assert parts == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    sizes = [sum(t.numel() for t in load_file(saved / part).values()) for part in parts]
    largest = max(tensor.numel() for tensor in expected.values())
    assert max(sizes) <= sum(sizes) / 3 + largest, "one rank has written most of the model"
    infos = read_weight_infos(saved)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: info.file.name for name, info in sorted(infos.items())}


def test_an_optimizer_that_saw_no_gradient_is_kept(pools: dict[int, RankPool], folder: Path, tmp_path: Path) -> None:
    saved = written(pools[2], tmp_path / "step_0", folder=folder, given=[], adam_epsilon=EPSILON)
    alone = train(None, folder=folder, given=BATCHES[:2])
    assert_alike(pools[2].call(train, folder=folder, given=BATCHES[:2], resume_from=saved)[0], alone)
    assert_alike(train(None, folder=folder, given=BATCHES[:2], resume_from=saved), alone)


def test_a_rank_makes_progress_only_while_what_it_writes_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = np.zeros(1, dtype=np.uint64)
    looks, found, written = [True, False, True, False, False], [], threading.Event()

    def wait(futures: list[Future[None]], timeout_s: float) -> SimpleNamespace:
        found.append(int(progress[0]))
        if looks and looks.pop(0):
            with (tmp_path / ".tmp").open("ab") as file:
                file.write(bytes(1 << 20))
                os.fsync(file)
        elif not looks:
            written.set()
        return SimpleNamespace(done=set() if looks else set(futures))

    monkeypatch.setattr(shares, "wait", wait)
    monkeypatch.setattr(shares, "save_file", lambda *_, **__: written.wait())
    shares.write_share(World(progress=progress), {"w": torch.ones(1)}, tmp_path / "model.safetensors", {"w": 0})
    assert found == [1, 2, 2, 3, 3]


def test_other_ranks_are_refused_where_bits_matter(pools: dict[int, RankPool], folder: Path, tmp_path: Path) -> None:
    saved = written_by(pools, 2, folder, tmp_path / "step_2", deterministic=True)
    with pytest.raises(ModelError, match=r"written with trainer\.num_devices = 2, now it is 1: restore the setting"):
        make_trainer(folder, resume_from=saved, deterministic=True, **SETTINGS)
    assert whole(make_trainer(folder, resume_from=saved, **SETTINGS))


def test_moments_that_do_not_fit_are_named(pools: dict[int, RankPool], folder: Path, tmp_path: Path) -> None:
    saved = written_by(pools, 2, folder, tmp_path / "step_2")
    path = sorted((saved / "trainer").glob("optimizer-*"))[0]
    path.write_bytes(b"rubbish")
    for _, message in pools[3].call(refused, folder=folder, given=[], resume_from=saved, **SETTINGS):
        assert message.startswith(f"{path} cannot be read")
