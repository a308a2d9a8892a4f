"""The files of a model folder that stand beside its weights: its config, tokenizer, chat template, generation settings.

They are small, so code that writes more model folders keeps them in memory: the folder they came from may be moved or
deleted during the run. A fingerprint tells whether a resumed run finds the folder that it began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_OWN_FILES = ("config.json", "trainer.json", "adapter_config.json")
"""Files that a checkpoint writes itself."""

_READS_AND_ENDS = (
    *("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece"),
    *("chat_template", "generation_config"),
)
"""Prefixes of the names of files that decide how text is read and where a response ends."""
_SAMPLE_BYTES = 2**20

Companions = Mapping[str, bytes]
"""Contents by file name."""


def read_companions(folder: Path) -> Companions:
    """Return the companion files of ``folder``, without the index of weights that are split over several files."""
    names = (path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and ".index." not in path.name)
    return {path.name: path.read_bytes() for path in names if path.is_file()}


def without_own_files(companions: Companions) -> Companions:
    """Return the files that a checkpoint takes over from the model it started from."""
    return {name: content for name, content in companions.items() if name not in _OWN_FILES}


def write_companions(companions: Companions, folder: Path) -> None:
    for name, content in companions.items():
        (folder / name).write_bytes(content)


def fingerprint(folder: Path) -> dict[str, str]:
    """Return what decides whether another folder can stand for this one: a hash of each file that determines how text
    is read, and as ``weights`` a hash of the sizes, the heads and some of the values of all weights."""
    files = {
        name: hashlib.sha256(content).hexdigest()[:32]
        for name, content in read_companions(folder).items()
        if name.startswith(_READS_AND_ENDS)
    }
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        weights.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(8):
                file.seek(part * max(0, size - _SAMPLE_BYTES) // 7)
                weights.update(file.read(_SAMPLE_BYTES))
    return {**files, "weights": weights.hexdigest()[:32]}
