"""Weights for engines that are scripted: a manifest, and nothing behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rollover.weights.base import Manifest, TensorSpec


class FakeWeights:
    """One number by the name of "w", or none where they should not fit."""

    folder: Path | None = None

    def __init__(self, version: int, *, fit: bool = True) -> None:
        specs = (TensorSpec(name="w", shape=(1,), dtype="float32"),) if fit else ()
        self.manifest = Manifest(version=version, tensors=specs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeWeights) and other.manifest == self.manifest

    __hash__ = None  # type: ignore[assignment]

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
        return iter([(spec.name, None) for spec in self.manifest.tensors])
