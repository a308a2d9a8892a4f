"""The files of a model folder that stand beside its weights: its config, tokenizer, chat template, generation settings.

They are small, so whoever writes further model folders keeps them in memory: the folder they came from may be moved or
deleted while the run is at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_OWN_FILES = ("config.json", "trainer.json")
"""What a checkpoint writes for itself."""

Companions = Mapping[str, bytes]
"""Contents by file name."""


def read_companions(folder: Path) -> Companions:
    """Those of ``folder``, without the index of weights that are split over several files."""
    names = (path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and ".index." not in path.name)
    return {path.name: path.read_bytes() for path in names if path.is_file()}


def without_own_files(companions: Companions) -> Companions:
    """Those that a checkpoint takes over from the model it began with."""
    return {name: content for name, content in companions.items() if name not in _OWN_FILES}


def write_companions(companions: Companions, folder: Path) -> None:
    for name, content in companions.items():
        (folder / name).write_bytes(content)
