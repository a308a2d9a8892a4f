"""Safetensors files are read and written without torch, and are what safetensors itself reads and writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover.errors import ModelError
from rollover.hf.raw_tensors import RawTensor, read_raw_tensors, write_raw_tensors

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
