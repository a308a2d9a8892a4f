"""Weights with low-rank adapters: the frozen base, the trained adapters, and their sum.

``MergedWeights`` are full weights, merged as they are read. ``AdapterSource`` has only the adapters, which an engine
that has the base applies itself; ``AppliedAdapters`` merges them for an engine that reads full weights.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.errors import ModelError, parse_json
from rollover.types import AdapterShape
from rollover.weights.base import Manifest, WeightSource, specs_of

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of adapters, by peft's names."""
PREFIX = "base_model.model."
"""Prefix of the names in peft's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An adapter beside a matrix ``W`` of ``O`` rows and ``I`` columns: engines serve ``W + scale B A``.

    Example: of rank 16 beside a matrix of 4096 x 4096, ``A`` is 16 x 4096 and ``B`` 4096 x 16: 131,072 values.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def merged_with(self, weight_OI: Tensor) -> Tensor:
        """Return ``W + scale B A`` in the number format of ``W``, computed in float32 on the adapter's device."""
        weight_OI = weight_OI.to(self.a_RI.device)
        product = self.b_OR.float() @ self.a_RI.float()
        return product.mul_(self.scale).add_(weight_OI).to(weight_OI.dtype)


class MergedWeights(Mapping[str, "Tensor"]):
    """Weights with their adapters merged, in the number formats of ``base``. A tensor is made when it is asked for."""

    def __init__(self, base: Mapping[str, Tensor], adapters: Mapping[str, LowRank]) -> None:
        self.base = base
        self.adapters = adapters

    def __getitem__(self, name: str) -> Tensor:
        weight, adapter = self.base[name], self.adapters.get(name)
        return weight if adapter is None else adapter.merged_with(weight)

    def __contains__(self, name: object) -> bool:
        return name in self.base  # the mixin's makes the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


class AdapterSource:
    """Only the adapters of ``version``, to be put beside the full weights of ``base_version``; a ``WeightSource``.

    Example: adapters of rank 16 beside all matrices of a model of 0.6 B parameters take 40 MB in float32; the full
    weights take 1.2 GB in bfloat16.

    Args:
        adapters: by the name of the weight that each is beside, all of one rank and one scale.
        folder: holds them in peft's format, for targets that need one.
    """

    def __init__(
        self, version: int, adapters: Mapping[str, LowRank], *, base_version: int = 0, folder: Path | None = None
    ) -> None:
        self.adapters = adapters
        self.folder = folder
        self._tensors = {
            name_in_file(name, part): tensor
            for name, adapter in adapters.items()
            for part, tensor in (("A", adapter.a_RI), ("B", adapter.b_OR))
        }
        self.manifest = Manifest(version=version, base_version=base_version, tensors=specs_of(self._tensors))

    @classmethod
    def read(cls, version: int, folder: Path) -> AdapterSource:
        """Read what ``write`` wrote. Raises ``ModelError`` when it cannot be read."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            settings = parse_json((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            tensors = load_file(folder / ADAPTER_WEIGHTS)
            scale = settings["lora_alpha"] / settings["r"]
            ends = ".lora_A.weight"
            weights = [f"{n.removeprefix(PREFIX).removesuffix(ends)}.weight" for n in tensors if n.endswith(ends)]
            adapters = {
                weight: LowRank(
                    a_RI=tensors[name_in_file(weight, "A")], b_OR=tensors[name_in_file(weight, "B")], scale=scale
                )
                for weight in weights
            }
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
            raise ModelError(f"the adapters in {folder} cannot be read: {type(e).__name__}: {e}") from e
        return cls(version, adapters)

    def write(self, folder: Path, gathered: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapters in peft's format. Raises ``OSError``.

        Args:
            gathered: all tensors, if this source's own are sharded over ranks.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self._settings(), indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (gathered or self._tensors).items()}
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def _settings(self) -> dict[str, Any]:
        shape, first = self.shape, next(iter(self.adapters.values()))
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "r": shape.rank,
            "lora_alpha": first.scale * shape.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": list(shape.targets),
        }

    @property
    def shape(self) -> AdapterShape:
        """Return the rank, and the matrices that have an adapter."""
        targets = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in self.adapters)
        first = next(iter(self.adapters.values()))
        return AdapterShape(rank=first.a_RI.shape[0], targets=tuple(targets))

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``ModelError`` naming the first adapter that has no place beside weights of these shapes."""
        for name, adapter in self.adapters.items():
            product = (adapter.b_OR.shape[0], adapter.a_RI.shape[1])
            if shapes.get(name) != product or adapter.a_RI.shape[0] != adapter.b_OR.shape[1]:
                found = list(shapes[name]) if name in shapes else "absent"
                raise ModelError(
                    f"an adapter of {list(adapter.b_OR.shape)} times {list(adapter.a_RI.shape)} is meant for weight"
                    f" {name!r}, which is {found} in the model"
                )

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._tensors[name]) for name in (self._tensors if names is None else names))


class AppliedAdapters:
    """Full weights, a ``WeightSource``: ``base`` with adapters merged as they are read.

    Raises ``ModelError`` for adapters that do not fit.
    """

    folder: Path | None = None

    def __init__(self, base: WeightSource, source: AdapterSource) -> None:
        source.check_fits({spec.name: spec.shape for spec in base.manifest.tensors})
        self.manifest = replace(base.manifest, version=source.manifest.version)
        self._base, self._adapters = base, source.adapters

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._base.tensors(names):
            adapter = self._adapters.get(name)
            yield name, weight if adapter is None else adapter.merged_with(weight)


def name_in_file(weight: str, part: str) -> str:
    """Return the name that a part, ``"A"`` or ``"B"``, of the adapter beside a weight has in peft's files.

    Example: ``name_in_file("model.layers.0.mlp.up_proj.weight", "A")`` is
    ``"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"``.
    """
    return f"{PREFIX}{weight.removesuffix('.weight')}.lora_{part}.weight"


def holds_adapters(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()
