"""Weights with low-rank adapters: what stays, what was trained beside it, and the sum of both that engines serve."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.weights.base import Manifest, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An adapter beside a matrix ``W`` of ``O`` rows and ``I`` columns: engines serve ``W + scale B A``.

    Example: of rank 16 beside a matrix of 4096 x 4096, ``A`` is 16 x 4096 and ``B`` 4096 x 16: 131,072 values.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float


class MergedWeights(Mapping[str, "Tensor"]):
    """Weights with their adapters merged, in the number formats of ``base``. A tensor is made when it is asked for.

    Example: of a model with an adapter beside ``q_proj`` alone, every other tensor is the model's own, not a copy.
    """

    def __init__(self, base: Mapping[str, Tensor], adapters: Mapping[str, LowRank]) -> None:
        self.base = base
        self.adapters = adapters

    def __getitem__(self, name: str) -> Tensor:
        weight, adapter = self.base[name], self.adapters.get(name)
        if adapter is None:
            return weight
        product = adapter.b_OR.float() @ adapter.a_RI.float()
        return product.mul_(adapter.scale).add_(weight).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


class AdapterWeights:
    """Full weights of ``version`` as a frozen base and adapters; a ``WeightSource``. Targets that know nothing of
    adapters take ``tensors``, which are merged.

    Example: ``AdapterWeights(7, MergedWeights(base, adapters))``
    """

    folder: Path | None = None

    def __init__(self, version: int, weights: MergedWeights) -> None:
        self.version = version
        self.weights = weights

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest(
            version=self.version,
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
                for name, t in self.weights.base.items()
            ),
        )

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.weights[name]) for name in (self.weights if names is None else names))
