"""Tensors that stay as they are while adapters beside them are trained: written once, named by every publication."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.low_rank import Floats, merged
from rollover.swarm.publication.manifest import BlobRef, PublishedAdapter, PublishedTensor, digest_of
from rollover.swarm.publication.materialise import TensorBytes
from rollover.swarm.publication.stream import StreamWriter
from rollover.weights.adapters import LowRank

if TYPE_CHECKING:
    from torch import Tensor

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTensors:
    """The base of adapters as it is served, and where it stands in the blobs.

    Example: of a model of 8 GB, ``blobs`` are some 240 of 32 MiB before compression, and every version names them.
    """

    tensors: tuple[PublishedTensor, ...]
    """The tensors without adapters."""
    blobs: tuple[BlobRef, ...]
    contents: TensorBytes

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors, uncompressed."""
        return sum(blob.raw_bytes for blob in self.blobs)

    def are_first_in(self, blobs: Sequence[BlobRef]) -> bool:
        """Return whether a publication of ``blobs`` holds these tensors already."""
        return self.blobs == tuple(blobs[: len(self.blobs)])

    def merged_with(self, adapters: Mapping[str, LowRank]) -> TensorBytes:
        """Return what engines serve: each matrix with its adapter added."""
        assert adapters.keys() <= self.contents.keys(), "an adapter stands beside a tensor"
        new = dict(self.contents)
        with ThreadPoolExecutor(_THREADS) as pool:
            for tensor in self.tensors:
                if (adapter := adapters.get(tensor.name)) is not None:
                    a_RI, b_OR = _floats(adapter.a_RI), _floats(adapter.b_OR)
                    new[tensor.name] = merged(new[tensor.name], tensor.dtype, a_RI, b_OR, adapter.scale, pool=pool)
        return new

    def with_adapters(
        self, adapters: Mapping[str, LowRank], new: TensorBytes, folder: BlobFolder
    ) -> tuple[tuple[PublishedTensor, ...], tuple[BlobRef, ...]]:
        """Write adapters into blobs after the base's. Returns all tensors, whose sums are ``new``, and the blobs."""
        stream = StreamWriter(folder, start=self.num_bytes)

        def placed(tensor: PublishedTensor) -> PublishedTensor:
            if (adapter := adapters.get(tensor.name)) is None:
                return tensor
            published = PublishedAdapter(rank=len(adapter.a_RI), scale=adapter.scale, start=stream.num_bytes)
            for part in (_floats(adapter.a_RI), _floats(adapter.b_OR)):
                stream.append(part.astype("<f4", copy=False).reshape(-1).view(np.uint8).data)
            return msgspec.structs.replace(tensor, digest=digest_of(new[tensor.name].data), adapter=published)

        return tuple(map(placed, self.tensors)), stream.finish()


def _floats(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())
