"""Tensors of safetensors files as bytes, read and written without torch; and models with untied matrices.

Bytes are little-endian and row by row. Files are mapped into memory, so only the parts that are used are read from the
disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollover.errors import ModelError
from rollover.hf.config import read_config
from rollover.hf.folder import write_folder
from rollover.hf.weights import DTYPES, EMBEDDING, HEAD, read_weight_infos

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """The bytes of a tensor, which are never written to."""

    shape: tuple[int, ...]
    dtype: str
    """The number format by torch's name, or by safetensors' name if ``DTYPES`` has none."""
    content: NDArray[np.uint8]


def read_raw_tensors(folder: Path) -> dict[str, RawTensor]:
    """Map every tensor of a folder's safetensors files, by name. Raises ``ModelError`` when they cannot be read."""
    tensors, files = {}, dict[Path, NDArray[np.uint8]]()
    for name, info in read_weight_infos(folder).items():
        try:
            if info.file not in files:
                files[info.file] = np.memmap(info.file, dtype=np.uint8, mode="r")
            content = files[info.file][info.start : info.start + info.num_bytes]
        except (OSError, ValueError) as e:
            raise ModelError(f"{info.file} cannot be read: {e}") from e
        if content.nbytes != info.num_bytes:
            raise ModelError(f"{info.file} ends before its tensor {name!r} does")
        tensors[name] = RawTensor(shape=info.shape, dtype=info.dtype, content=content)
    return tensors


def write_raw_tensors(file: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write a safetensors file, which transformers reads as one of torch's."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # The widest numbers come first, so that each tensor begins at a multiple of the width of its numbers.
    ordered = sorted(tensors.items(), key=lambda named: (-_width(named[1]), named[0]))
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.content.nbytes
        dtype = _WORDS.get(tensor.dtype, tensor.dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            stream.write(tensor.content.data)


def _width(tensor: RawTensor) -> int:
    """Return the size of one number in bytes."""
    num_elements = int(np.prod(tensor.shape, dtype=np.int64))
    return tensor.content.nbytes // num_elements if num_elements else 1


def untied(model: Path, target: Path) -> Path:
    """Return a folder with the model of ``model`` and an output matrix of its own.

    It is ``model`` itself when its config says so, else a copy in ``target``, in which the files' only matrix is
    written twice. Needs no torch.
    """
    config = read_config(model)
    if not config.get("tie_word_embeddings"):
        return model

    def write(partial: Path) -> None:
        shutil.copytree(
            model, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"), dirs_exist_ok=True
        )
        (partial / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))
        tensors = read_raw_tensors(model)
        for name, twin in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
            if name not in tensors:
                tensors[name] = tensors[twin]
        write_raw_tensors(partial / "model.safetensors", tensors)

    write_folder(target, write, remedy="make room, or set engine.weights_dir to a place on another disk")
    return target
