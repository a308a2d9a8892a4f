"""Files that travel between machines in parts: which of a folder do, how two machines compare theirs, and how a part is
written. Free of PyTorch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 16 * 2**20
"""Size of a part; small, so that a small object store holds the parts in transit."""
AHEAD = 4
"""Maximum number of parts in transit."""
_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""Size of each of the ``_SAMPLES`` samples of a file that are compared between two machines."""
_OTHER_FORMATS = frozenset((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".tflite"))
"""File name endings of weights that neither the trainer nor a server reads."""


def listed(folder: Path) -> list[str]:
    """Return the names of the files in a model folder or checkpoint that a rank or a server may read."""
    top = (path for path in folder.iterdir() if path.is_file())
    state = (folder / "trainer").glob("*")
    found = sorted(path for path in (*top, *state) if path.is_file() and path.suffix not in _OTHER_FORMATS)
    return [str(path.relative_to(folder)) for path in found]


def num_bytes(folder: Path) -> int:
    """Return the size of the files that a rank or a server may read."""
    return sum((folder / name).stat().st_size for name in listed(folder))


def digests_of(folder: Path) -> dict[str, str]:
    """Return a digest of each file that a rank or a server may read, by its name."""
    return {name: sampled_digest(folder / name) for name in listed(folder)}


def are_there(folder: Path, digests: Mapping[str, str]) -> bool:
    """Say whether this machine has files with these digests in a folder."""
    return all(sampled_digest(folder / name) == digest for name, digest in digests.items())


def sampled_digest(path: Path) -> str:
    """Return a digest of the size of a file and of samples of it; "" if there is none. Small files are read whole.

    Example: two checkpoints of one model differ in it, as their weights differ nearly everywhere.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            for offset in sorted({size * i // _SAMPLES for i in range(_SAMPLES)} | {max(0, size - _SAMPLE_BYTES)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return ""
    return digest.hexdigest()


def write_part(path: Path, size: int, offset: int, part: NDArray[np.uint8]) -> None:
    """Write a part of a file of ``size`` bytes; parts may come in any order. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.truncate(size)  # a longer file that was there before leaves no tail
        file.seek(offset)
        file.write(part.data)
