"""Checksums that servers compute of their weights, compared: those given the same weights must hold the same.

A label says what a server was told, a checksum what it has. Servers of one kind with the same number formats and the
same division over workers must agree to the last bit; where the divisions differ there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollover.errors import EngineError

MAX_BYTES = 1 << 30
"""Models up to this size are confirmed at every load, larger ones at the first alone: a server hashes a gigabyte in
about a second, in which it decodes nothing."""


class ChecksumRecord:
    """The checksums of the first server to load a folder, to compare the others with. One for all servers of a
    pool."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._server = ""
        self._expected: Mapping[str, str] = {}

    def compare(self, folder: Path, server: str, checksums: Mapping[str, str]) -> None:
        """Raises ``EngineError`` naming a tensor in which ``server`` differs from the first one."""
        if folder != self._folder:
            self._folder, self._server, self._expected = folder, server, checksums
            return
        if checksums.keys() != self._expected.keys():
            return
        different = [name for name, digest in checksums.items() if digest != self._expected[name]]
        if different:
            raise EngineError(
                f"{server} holds other weights than {self._server}, though both have loaded {folder}:"
                f" {len(different)} of {len(checksums)} tensors differ, the first is {different[0][:120]!r}; do the two"
                " run with the same --dtype and --quantization?"
            )
