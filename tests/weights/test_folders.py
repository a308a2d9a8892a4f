"""Weight folders are complete or absent, keep what may still be read, and hold what was given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover.errors import ResourceError
from rollover.hf.raw_tensors import untied
from rollover.weights import folders
from rollover.weights.folders import WeightFolders
from rollover.weights.sources import MemoryWeights

EMBEDDING = torch.arange(12, dtype=torch.float32).reshape(4, 3)


@pytest.fixture
def like(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def weights(version: int, value: float) -> MemoryWeights:
    tensors = {"model.embed_tokens.weight": EMBEDDING + value, "model.norm.weight": torch.full((3,), value)}
    return MemoryWeights(version, tensors)


def written(store: WeightFolders, version: int, value: float) -> Path:
    folder = store.write(weights(version, value)).folder
    assert folder is not None
    return folder


def test_a_version_is_a_model_folder_in_the_formats_of_the_initial_model(like: Path, tmp_path: Path) -> None:
    """The initial model may be deleted by then."""
    store = WeightFolders(tmp_path / "weights", like=like)
    shutil.rmtree(like)
    folder = written(store, 3, 0.1)
    assert folder == tmp_path / "weights" / "v3"
    assert {p.name for p in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    found = load_file(folder / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], EMBEDDING + 0.1)
    assert torch.equal(found["model.norm.weight"], torch.full((3,), 0.1).bfloat16())


def test_a_matrix_under_another_name_is_not_taken_for_the_output(like: Path, tmp_path: Path) -> None:
    """Of a tied model whose input matrix has a name of its family."""
    save_file({"wte.weight": EMBEDDING, "lm_head.weight": EMBEDDING.clone()}, like / "model.safetensors")
    folder = WeightFolders(tmp_path / "weights", like=like).write(MemoryWeights(1, {"wte.weight": EMBEDDING})).folder
    assert folder is not None and load_file(folder / "model.safetensors").keys() == {"wte.weight"}


def test_the_two_newest_stay_and_what_another_run_left_goes(like: Path, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    for name in ("v9", ".partial-x", "mine"):
        (root / name).mkdir(parents=True)
    store = WeightFolders(root, like=like)
    for version in (1, 2, 3, 3):
        store.write(weights(version, version))
    assert {p.name for p in root.iterdir()} == {"v2", "v3", "mine"}


def test_a_full_disk_leaves_the_earlier_version(like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "weights"
    store = WeightFolders(root, like=like)
    store.write(weights(1, 1.0))
    monkeypatch.setattr(folders, "write_companions", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ResourceError, match=r"no space left on the disk of .*: v2 was not written.*weights_dir"):
        store.write(weights(2, 2.0))
    assert {p.name for p in root.iterdir()} == {"v1"}


def test_untying_writes_the_input_matrix_twice_from_then_on(like: Path, tmp_path: Path) -> None:
    copy = untied(like, tmp_path / "untied")
    assert json.loads((copy / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(copy / "model.safetensors")["lm_head.weight"], EMBEDDING)
    assert untied(copy, tmp_path / "again") == copy
    found = load_file(written(WeightFolders(tmp_path / "weights", like=copy), 1, 1.0) / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], EMBEDDING + 1.0)


def test_untying_keeps_an_output_matrix_that_is_there(like: Path, tmp_path: Path) -> None:
    tensors = load_file(like / "model.safetensors")
    save_file({**tensors, "lm_head.weight": EMBEDDING.flip(0).contiguous()}, like / "model.safetensors")
    copy = untied(like, tmp_path / "untied")
    assert torch.equal(load_file(copy / "model.safetensors")["lm_head.weight"], EMBEDDING.flip(0))
    save_file({"lm_head.weight": EMBEDDING}, like / "model.safetensors")
    copy = untied(like, tmp_path / "other")
    assert torch.equal(load_file(copy / "model.safetensors")["model.embed_tokens.weight"], EMBEDDING)
