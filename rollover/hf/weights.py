"""The weights of a Hugging Face folder as their files describe them: names, shapes, number formats, files.

Only headers are read, no tensors, and torch is not needed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rollover.errors import ModelError, parse_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the input and the output matrix, which are one tensor where a model ties them."""
COMPUTED = "rotary_emb.inv_freq"
"""End of the names of tensors in old checkpoints that every program computes itself."""

_UNUSED = re.compile(r"rotary_emb\.inv_freq$|\batt(entio)?n\.(masked_)?bias$|(^|\.)mtp")
_LAYER = re.compile(r"\blayers\.(\d+)\.")

INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Number formats in torch's words by safetensors' words."""

_MAX_HEADER_BYTES = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Shape, number format and place of one tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str
    """The number format by torch's name, or by safetensors' name if ``DTYPES`` has none."""
    start: int
    """Offset of its bytes in the file; they are little-endian, row by row."""
    num_bytes: int
    file: Path


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder: the files that its index names, or all if it has none.

    Raises ``ModelError`` when there is none, or when the index is damaged.
    """
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
            raise ModelError(f"{index} is not a safetensors index: {e}") from e
        return [folder / name for name in names]
    if paths := sorted(folder.glob("*.safetensors")):
        return paths
    raise ModelError(f"{folder} holds no *.safetensors files")


def read_weight_infos(folder: Path) -> dict[str, TensorInfo]:
    """Read shape, number format and file of every tensor, by name.

    Raises ``ModelError`` when there are no weights or they cannot be read.
    """
    infos: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        try:
            infos |= read_header(file)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            raise ModelError(f"{file} is not a safetensors file: {e}") from None
    return infos


def number_format(folder: Path) -> str:
    """Return the number format of most tensors of a model folder, by torch's name. Raises ``ModelError`` when there are
    no weights or they cannot be read."""
    formats = Counter(info.dtype for info in read_weight_infos(folder).values())
    if not formats:
        raise ModelError(f"model folder {str(folder)!r} has no weights")
    return formats.most_common(1)[0][0]


def frozen_format(dtype: str) -> str:
    """Return the number format in which frozen weights are held whose folder has ``dtype``: gradients that pass through
    them would underflow in float16."""
    return "float32" if dtype == "float16" else dtype


def is_unused(name: str, num_layers: float) -> bool:
    """Return whether a tensor of a checkpoint is no weight of the model, and transformers leaves it out: it is computed
    anyway, or predicts further tokens (MTP) in layers behind those of the model.

    Example: ``is_unused("model.layers.46.eh_proj.weight", 46)`` is true.
    """
    layer = _LAYER.search(name)
    return _UNUSED.search(name) is not None or (layer is not None and int(layer[1]) >= num_layers)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read what one safetensors file holds, by name. Raises ``ValueError``, ``KeyError`` or the like when it is not
    one."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {size} bytes")
        header = parse_json(stream.read(size))
    return {
        name: TensorInfo(
            shape=tuple(entry["shape"]),
            dtype=DTYPES.get(entry["dtype"], entry["dtype"]),
            start=8 + size + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            file=file,
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
