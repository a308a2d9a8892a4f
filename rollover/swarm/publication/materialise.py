"""Tensors from the blobs of a publication: decompressed, put together, applied to their base, and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.delta import Bytes, apply
from rollover.swarm.publication.manifest import PublicationError, PublicationManifest, PublishedTensor, digest_of
from rollover.swarm.publication.stream import StreamReader
from rollover.weights.base import DTYPE_BYTES

TensorBytes = Mapping[str, Bytes]
"""Contents of tensors by name, little-endian and row by row. They are never written to."""


def materialise(
    manifest: PublicationManifest, blobs: BlobFolder, base: TensorBytes, *, is_wanted: Callable[[], bool] = lambda: True
) -> dict[str, Bytes]:
    """Return all tensors of a publication; unchanged tensors are the objects in ``base``. Synchronous.

    Args:
        base: the tensors of the base version; empty for full weights.
        is_wanted: asked before each tensor; the work is given up when it says no.

    Raises:
        PublicationError: a blob is missing or damaged, or a tensor is not what the manifest says.
    """
    stream = StreamReader(manifest.blobs, blobs)
    made: dict[str, Bytes] = {}
    for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.start):
        if not is_wanted():
            raise PublicationError(f"version {manifest.version} is no longer wanted")
        made[tensor.name] = _tensor(tensor, stream, base)
        if (found := digest_of(made[tensor.name].data)) != tensor.digest:
            raise PublicationError(
                f"tensor {tensor.name!r} of version {manifest.version} came out with the digest {found} instead of"
                f" {tensor.digest}" + (f": it was not made from version {manifest.base_version}" if base else "")
            )
    return {tensor.name: made[tensor.name] for tensor in manifest.tensors}


def _tensor(tensor: PublishedTensor, stream: StreamReader, base: TensorBytes) -> Bytes:
    if tensor.encoding == "raw":
        return stream.read(tensor.start, tensor.num_bytes)
    old = base.get(tensor.name)
    if old is None or old.nbytes != tensor.spec.num_bytes:
        held = "is not among its tensors" if old is None else f"has {old.nbytes:,} bytes there"
        raise PublicationError(
            f"tensor {tensor.name!r} of {tensor.spec.num_bytes:,} bytes is a change to its base version, but {held}"
        )
    return apply(old, stream.read(tensor.start, tensor.num_bytes).data, DTYPE_BYTES[tensor.dtype])


def model_digest(files: Mapping[str, bytes]) -> str:
    """Return the digest of a model's config and tokenizer files, by name and content."""
    table = hashlib.sha256()
    for name in sorted(files):
        table.update(f"{name} {digest_of(files[name])}\n".encode())
    return table.hexdigest()
