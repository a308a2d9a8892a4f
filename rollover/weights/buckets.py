"""Buckets: the pieces in which weights are sent, so that no process ever holds much more than one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollover.hf.weights import EMBEDDING, HEAD
from rollover.weights.base import DTYPE_BYTES, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES = 1 << 30
"""The most that is announced to servers, and held by them and by the sender, at a time."""
_CAST = ("float32", "bfloat16", "float16")
"""Number formats into which weights are cast; tensors that are served in another one are sent as they were trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Weights that are sent in one go, in this order.

    Example: ``Bucket(tensors=(TensorSpec(name="w", shape=(4, 2), dtype="bfloat16"),))`` is 16 bytes.
    """

    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def described(self, dtypes: str) -> dict[str, Any]:
        """Describe the bucket in the form that servers expect; ``dtypes`` is their name for the number formats."""
        return {
            "names": [spec.name for spec in self.tensors],
            dtypes: [spec.dtype for spec in self.tensors],
            "shapes": [list(spec.shape) for spec in self.tensors],
        }


def buckets(specs: Iterable[TensorSpec], *, limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Split tensors, in their order, into pieces of at most ``limit_bytes`` or of a single tensor. Within a piece those
    with wider numbers come first, so that each begins at a multiple of the width of its numbers.

    Example: tensors of 6, 3 and 4 bytes with a limit of 8 are two buckets, of 6 and of 7 bytes.
    """
    pieces: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if pieces[-1] and size + spec.num_bytes > limit_bytes:
            pieces.append([])
            size = 0
        pieces[-1].append(spec)
        size += spec.num_bytes
    return [Bucket(tensors=tuple(sorted(piece, key=lambda spec: -DTYPE_BYTES[spec.dtype]))) for piece in pieces]


def as_served(given: Iterable[TensorSpec], formats: Mapping[str, str]) -> list[TensorSpec]:
    """Return the tensors that a server takes from the tensors that a trainer holds.

    Args:
        formats: the number format of each served tensor, as in the model that the run began with.

    Example: given float32 weights with tied matrices and a server whose bfloat16 model has an output matrix of its own,
    all are in bfloat16 and the input matrix occurs twice.
    """
    held = {spec.name: spec for spec in given}
    if HEAD in formats and HEAD not in held and EMBEDDING in held:
        held[HEAD] = replace(held[EMBEDDING], name=HEAD)
    return [replace(spec, dtype=formats[name]) if formats.get(name) in _CAST else spec for name, spec in held.items()]


def cast(weights: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """Return the tensor in the format of ``spec``, uncopied if it has it already. A sharded one stays sharded."""
    import torch

    tensor = weights[spec.name if spec.name in weights else EMBEDDING]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return tensor.detach().to(dtype)


def flattened(tensors: Iterable[Tensor], num_bytes: int) -> Tensor:
    """Copy tensors into one of ``num_bytes`` bytes, one after the other."""
    import torch

    flat: Tensor | None = None
    start = 0
    for tensor in tensors:
        if flat is None:
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        flat[start : start + content.numel()] = content
        start += content.numel()
    assert flat is not None and start == num_bytes, f"a bucket of {num_bytes} bytes was given {start}"
    return flat
