"""Files that the nodes of a cluster must see at the same path as the machine of the run. Free of PyTorch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollover.errors import ConfigError

_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""Size of each of the ``_SAMPLES`` samples of a file that are compared between two machines."""
_OTHER_FORMATS = frozenset((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".tflite"))
"""File name endings of weights that neither the trainer nor a server reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFiles:
    """Files of a folder, with digests by which another machine tells whether it has the same."""

    folder: Path
    digests: Mapping[str, str]
    """Digests of the size and of samples of each file, by its name."""

    @classmethod
    def of(cls, *paths: Path) -> SharedFiles:
        """Return these files of one folder."""
        return cls(folder=paths[0].parent.resolve(), digests={path.name: sampled_digest(path) for path in paths})

    @classmethod
    def of_model(cls, folder: Path) -> SharedFiles:
        """Return the files of a model folder or a checkpoint that a rank or a server may read."""
        return cls(folder=folder.resolve(), digests={name: sampled_digest(folder / name) for name in listed(folder)})

    def are_here(self) -> bool:
        """Return whether this machine has the same files at the same path."""
        return all(sampled_digest(self.folder / name) == digest for name, digest in self.digests.items())

    def refusal(self, address: str, remedy: str) -> ConfigError:
        """Return the error for a node that does not have them."""
        names = f" ({name})" if len(self.digests) == 1 and (name := next(iter(self.digests))) else ""
        return ConfigError(f"node {address} does not see the files of {self.folder}{names}: {remedy}")


def listed(folder: Path) -> list[str]:
    """Return the names of the files in a model folder or checkpoint that a rank or a server may read."""
    top = (path for path in folder.iterdir() if path.is_file())
    state = (folder / "trainer").glob("*")
    found = sorted(path for path in (*top, *state) if path.is_file() and path.suffix not in _OTHER_FORMATS)
    return [str(path.relative_to(folder)) for path in found]


def sampled_digest(path: Path) -> str:
    """Return a digest of the size of a file and of samples of it; "" if there is none. Small files are read whole."""
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
