"""Safetensors files are read and written without torch, and damage to them is reported with the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover.errors import ModelError
from rollover.hf.raw_tensors import RawTensor, read_raw_tensors, write_raw_tensors
from rollover.hf.weights import INDEX_FILE, TensorInfo, read_weight_infos, weight_files


def test_a_header_gives_shape_number_format_size_and_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(3, 2, dtype=torch.bfloat16), "i": torch.zeros(2, dtype=torch.int64)}, file)
    data = file.stat().st_size - 28  # where the header ends; the wider numbers come first
    assert read_weight_infos(tmp_path) == {
        "w": TensorInfo(shape=(3, 2), dtype="bfloat16", start=data + 16, num_bytes=12, file=file),
        "i": TensorInfo(shape=(2,), dtype="I64", start=data, num_bytes=16, file=file),
    }


def test_an_index_decides_which_files_hold_the_weights(tmp_path: Path) -> None:
    for name in ("one", "two", "stray"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    assert len(weight_files(tmp_path)) == 3
    index = {"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert sorted(read_weight_infos(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 8, b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_damaged_header_is_reported_with_its_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"):
        read_weight_infos(tmp_path)


def test_a_damaged_index_is_reported_with_its_file(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text("[]")
    with pytest.raises(ModelError, match="is not a safetensors index"):
        weight_files(tmp_path)


TENSORS = {
    "norm": torch.arange(3, dtype=torch.bfloat16),
    "matrix": torch.linspace(-1, 1, 12, dtype=torch.float32).reshape(4, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 7, dtype=torch.float16),
    "odd": torch.arange(5, dtype=torch.int8),
}


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    raw = read_raw_tensors(tmp_path)
    assert {name: (t.shape, t.dtype) for name, t in raw.items()} == {
        "norm": ((3,), "bfloat16"),
        "matrix": ((4, 3), "float32"),
        "scalar": ((), "float64"),
        "none": ((0, 7), "float16"),
        "odd": ((5,), "I8"),
    }
    write_raw_tensors(tmp_path / "copy.safetensors", raw)
    copy = load_file(tmp_path / "copy.safetensors")
    assert copy.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert copy[name].dtype == tensor.dtype and torch.equal(copy[name], tensor)


def test_a_truncated_file_is_reported_with_the_tensor_that_it_cuts(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_raw_tensors(file, {"w": RawTensor(shape=(8,), dtype="float32", content=np.zeros(32, np.uint8))})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors ends before its tensor 'w' does"):
        read_raw_tensors(tmp_path)
