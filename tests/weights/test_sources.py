"""Both sources describe their tensors without reading them, and yield them in the order asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollover.errors import ModelError
from rollover.weights.base import TensorSpec, WeightSource
from rollover.weights.sources import FolderWeights, MemoryWeights

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def in_two_files(folder: Path) -> Path:
    save_file({"a": TENSORS["a"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "model-00002-of-00002.safetensors")
    save_file({"stray": TENSORS["b"]}, folder / "consolidated.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture(params=["memory", "folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> WeightSource:
    return MemoryWeights(5, TENSORS) if request.param == "memory" else FolderWeights(5, in_two_files(tmp_path))


def test_the_manifest_has_name_shape_and_number_format_of_every_tensor(source: WeightSource) -> None:
    assert source.manifest.version == 5
    assert set(source.manifest.tensors) == {
        TensorSpec(name="a", shape=(2, 3), dtype="float32"),
        TensorSpec(name="b", shape=(4,), dtype="bfloat16"),
    }


def test_tensors_come_in_manifest_order_or_in_the_order_asked_for(source: WeightSource) -> None:
    found = list(source.tensors())
    assert [name for name, _ in found] == [spec.name for spec in source.manifest.tensors]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in found)
    assert [name for name, _ in source.tensors(["b", "a"])] == ["b", "a"]


def test_tensors_in_memory_are_passed_on_and_not_copied() -> None:
    assert next(MemoryWeights(0, TENSORS).tensors())[1] is TENSORS["a"]


def test_a_damaged_file_is_found_before_the_first_tensor(tmp_path: Path) -> None:
    folder = in_two_files(tmp_path)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    tensors = FolderWeights(0, folder).tensors()
    with pytest.raises(ModelError, match="cannot be read"):
        next(tensors)


def test_a_folder_without_weights_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no"):
        _ = FolderWeights(0, tmp_path).manifest
