"""Records and protocols for weight transfer: a manifest, a source that yields tensors, and a target that loads them.

A ``WeightTarget`` keeps these laws (``tests/engine/contract.py`` proves them for every engine):

* After ``pause`` returns, no token is sampled until ``resume``.
* After ``load(version, source)`` returns, every sampled token is labelled ``version``. A load that fails leaves the
  old weights in force.
* ``resume`` is called after every ``pause``, even when the load has failed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rollover.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, shape and number format of one tensor.

    Example: ``TensorSpec(name="model.norm.weight", shape=(896,), dtype="bfloat16")`` takes 1792 bytes.
    """

    name: str
    """The parameter's name in the Hugging Face checkpoint."""
    shape: tuple[int, ...]
    dtype: str
    """The number format by torch's name."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor. Raises ``KeyError`` for a number format that weights do not have."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def unmade(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors of the same names, shapes and number formats, without making tensors that are made on demand."""
    while (base := getattr(weights, "base", None)) is not None:
        weights = base
    return weights


def specs_of(weights: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specs of these tensors without making any of them."""
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in unmade(weights).items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The table of contents of one version of the weights.

    Example: ``Manifest(version=7, tensors=(TensorSpec(name="w", shape=(4, 2), dtype="float32"),))`` announces all
    weights of version 7. With ``base_version=6`` it would announce adapters beside the weights of version 6.
    """

    version: int
    base_version: int | None = None
    """The version whose full weights these adapters belong beside; ``None`` for full weights."""
    tensors: tuple[TensorSpec, ...]

    @property
    def kind(self) -> Literal["full", "adapter"]:
        return "full" if self.base_version is None else "adapter"

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors. Raises ``KeyError`` for a number format that weights do not have."""
        return sum(spec.num_bytes for spec in self.tensors)

    def require_full(self, version: int, target: object) -> None:
        """Raise ``EngineError`` unless these are the full weights of ``version``.

        Every target that cannot apply adapters calls this before it loads anything.
        """
        self._require_version(version, target)
        if self.kind != "full":
            raise EngineError(
                f"{target} loads full weights only, but version {version} is given as {self}; publish the full weights"
            )

    def require_adapter(self, version: int, target: object, *, base_version: int) -> None:
        """Raise ``EngineError`` unless these are adapters of ``version`` for full weights of ``base_version``."""
        self._require_version(version, target)
        if self.kind != "adapter" or self.base_version != base_version:
            raise EngineError(
                f"{target} has weights version {base_version} to apply adapters to, but version {version} is given as"
                f" {self}; publish the full weights"
            )

    def __str__(self) -> str:
        return "full weights" if self.base_version is None else f"adapters for version {self.base_version}"

    def _require_version(self, version: int, target: object) -> None:
        if self.version != version:
            raise EngineError(f"{target} was asked to load weights version {version}, but was given {self.version}")


class WeightSource(Protocol):
    """One version of the weights, ready to be read by a target. It is valid until the load returns.

    Example: ``MemoryWeights(7, trainer_weights)`` for an engine in this process, ``FolderWeights(7, path)`` for
    servers that read a Hugging Face folder from disk.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def folder(self) -> Path | None:
        """Return the Hugging Face folder that holds these weights, if there is one."""
        ...

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, one at a time: all in the order of the manifest, or ``names`` in their order.

        Raises ``ModelError`` before the first tensor when the weights cannot be read.
        """
        ...


WeightPath = Literal["memory", "folder", "group"]
"""The paths by which an engine gets weights: as tensors of the source, from the source's folder, or through a process
group from the process that holds them."""


class WeightTarget(Protocol):
    """An engine that takes new weights: ``pause``, ``load``, ``resume``; ``resume`` even after a failed load.

    Example: an engine at version 6 that is paused, given ``load(7, MemoryWeights(7, tensors))`` and resumed samples
    every later token from version 7.
    """

    @property
    def takes(self) -> WeightPath:
        """Return by which path ``load`` gets the weights."""
        ...

    async def pause(self) -> None: ...

    async def load(self, version: int, source: WeightSource) -> None:
        """Load the weights of ``version``, which label every token sampled afterwards.

        Raises ``EngineError`` when the version would go back, or the weights do not fit or are of a kind that this
        target cannot apply; the old weights then stay in force.
        """
        ...

    async def resume(self) -> None: ...
