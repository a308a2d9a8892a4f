"""A publication: one version of the weights as a signed manifest and immutable blobs, each named by its content.

::

    manifest (signed, a blob itself) ──▶ tensors: name, dtype, shape, digest of the result, where its bytes begin
             │                           files: config.json, tokenizer files
             └──▶ blobs: the encoded tensors one after another, cut into pieces, each compressed by zstd

A full publication holds every tensor's bytes. A delta holds, for each tensor, the elements that differ from
``base_version`` and by how much; applied to other weights it is found out by the digest of the result.

Invariants: a version names one manifest digest for ever; whoever has the publisher's public key can tell that
every byte is the publisher's, wherever it was fetched from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rollover.errors import EngineError
from rollover.weights.base import DTYPE_BYTES, Manifest, TensorSpec

DIGEST = re.compile(r"[0-9a-f]{64}")
"""A blob's name: the SHA-256 of its bytes in hexadecimal."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.(json|txt|model|jinja)")
"""Names of the files of a model folder that are sent."""
MAX_TENSORS = 100_000
MAX_BLOBS = 100_000
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_BLOB_BYTES = 256 * 2**20
MAX_TENSOR_BYTES = 64 * 2**30


class PublicationError(EngineError):
    """A publication, or a part of it, that cannot be used; nothing of it has taken effect."""


class PublicationRefused(PublicationError):
    """A publication that this worker does not take, and would not take if it were fetched again."""


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A blob by name, with its size as it is stored and after decompression."""

    digest: str
    num_bytes: int
    raw_bytes: int


class FileRef(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the model folder beside its weights."""

    name: str
    blob: BlobRef


class PublishedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a publication."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """SHA-256 of the resulting tensor's bytes, little-endian and row by row."""
    start: int
    """Offset of its encoding in the stream of decompressed blobs."""
    num_bytes: int
    """Length of its encoding; 0 for a tensor of a delta that has not changed."""
    encoding: Literal["raw", "difference"]
    """``raw``: the bytes of the tensor. ``difference``: see ``rollover.swarm.publication.delta``."""

    @property
    def spec(self) -> TensorSpec:
        """Describe the resulting tensor, as an engine is given it."""
        return TensorSpec(name=self.name, shape=self.shape, dtype=self.dtype)


class PublicationManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The table of contents of one publication: which blobs make which tensors. ``weights`` says what they make."""

    run_id: str
    run_epoch: int
    version: int
    base_version: int | None
    kind: Literal["full", "delta"]
    model: str
    """Digest of the model's config and tokenizer files: the same for all versions of a run."""
    files: tuple[FileRef, ...]
    tensors: tuple[PublishedTensor, ...]
    blobs: tuple[BlobRef, ...]
    base_manifest: str | None = None
    """Digest of the manifest of the base version, by which whoever does not hold it finds it; ``None`` for full
    weights."""

    @property
    def order(self) -> tuple[int, int]:
        """Return epoch and version, by which the publications of a run are ordered."""
        return self.run_epoch, self.version

    @property
    def weights(self) -> Manifest:
        """Return the table of contents for an engine: full weights, in whatever form they were sent."""
        return Manifest(version=self.version, tensors=tuple(tensor.spec for tensor in self.tensors))

    @property
    def wire_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs)


class _Signed(msgspec.Struct, frozen=True, kw_only=True):
    manifest: bytes
    signature: bytes


_CONTEXT = b"rollover.swarm.manifest.v1\x00"
"""Signed before the manifest, so that a signature means nothing elsewhere."""


def digest_of(content: bytes | memoryview) -> str:
    """Return the name of a blob."""
    return hashlib.sha256(content).hexdigest()


def sign(manifest: PublicationManifest, key: Ed25519PrivateKey) -> bytes:
    """Return the blob of a signed manifest; the same manifest always makes the same blob."""
    body = msgspec.msgpack.encode(manifest)
    return msgspec.msgpack.encode(_Signed(manifest=body, signature=key.sign(_CONTEXT + body)))


def open_manifest(blob: bytes, key: Ed25519PublicKey) -> PublicationManifest:
    """Return the manifest in a blob that was signed by the owner of ``key``.

    Raises:
        PublicationRefused: the signature is not the publisher's, or it is no manifest.
        PublicationError: the manifest contradicts itself or a limit.
    """
    if len(blob) > MAX_MANIFEST_BYTES:
        raise PublicationError(f"a manifest of {len(blob):,} bytes is above the limit of {MAX_MANIFEST_BYTES:,}")
    try:
        signed = msgspec.msgpack.decode(blob, type=_Signed)
        key.verify(signed.signature, _CONTEXT + signed.manifest)
        manifest = msgspec.msgpack.decode(signed.manifest, type=PublicationManifest)
    except InvalidSignature:
        raise PublicationRefused(
            "the manifest is not signed by the publisher whose key this worker was given with its token: ask the run's"
            " owner for a new one"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise PublicationRefused(
            f"the manifest cannot be read: {e}; install the same version of Rollover on both sides"
        ) from None
    if mistake := _mistake(manifest):
        raise PublicationError(f"the manifest of version {manifest.version} is wrong: {mistake}")
    return manifest


def _mistake(manifest: PublicationManifest) -> str | None:
    """Return what a manifest contradicts, if anything."""
    if (manifest.kind == "full") != (manifest.base_version is None):
        return f"it is {manifest.kind} with base version {manifest.base_version}"
    if len(manifest.tensors) > MAX_TENSORS or len(manifest.blobs) > MAX_BLOBS:
        return f"{len(manifest.tensors):,} tensors in {len(manifest.blobs):,} blobs are too many"
    if (manifest.base_version is None) != (manifest.base_manifest is None):
        return f"its base version is {manifest.base_version}, with the manifest {manifest.base_manifest}"
    if manifest.base_manifest is not None and not DIGEST.fullmatch(manifest.base_manifest):
        return f"the manifest of its base version, {manifest.base_manifest[:80]!r}, is no digest"
    blobs = [*manifest.blobs, *(file.blob for file in manifest.files)]
    for blob in blobs:
        if not DIGEST.fullmatch(blob.digest):
            return f"{blob.digest[:80]!r} is no digest"
        if not (0 <= blob.num_bytes <= MAX_BLOB_BYTES and 0 <= blob.raw_bytes <= MAX_BLOB_BYTES):
            return f"blob {blob.digest} has {blob.num_bytes:,} bytes, {blob.raw_bytes:,} decompressed"
    for file in manifest.files:
        if not FILE_NAME.fullmatch(file.name):
            return f"{file.name[:120]!r} is no file of a model folder that may be sent"
    num_stream_bytes = sum(blob.raw_bytes for blob in manifest.blobs)
    for tensor in manifest.tensors:
        if tensor.dtype not in DTYPE_BYTES or not DIGEST.fullmatch(tensor.digest):
            return f"tensor {tensor.name!r} has the number format {tensor.dtype!r} and the digest {tensor.digest!r}"
        if min(tensor.shape, default=0) < 0 or tensor.spec.num_bytes > MAX_TENSOR_BYTES:
            return f"tensor {tensor.name!r} has the shape {tensor.shape}"
        if tensor.start < 0 or tensor.num_bytes < 0 or tensor.start + tensor.num_bytes > num_stream_bytes:
            return f"tensor {tensor.name!r} lies outside of the {num_stream_bytes:,} bytes that the blobs hold"
        if tensor.encoding == "difference" and manifest.kind == "full":
            return f"tensor {tensor.name!r} of full weights says what has changed"
        if tensor.encoding == "raw" and tensor.num_bytes != tensor.spec.num_bytes:
            return f"tensor {tensor.name!r} has {tensor.num_bytes:,} bytes instead of {tensor.spec.num_bytes:,}"
    if len({tensor.name for tensor in manifest.tensors}) < len(manifest.tensors):
        return "a tensor is listed twice"
    return None


def needed_blobs(digest: str, manifest: PublicationManifest) -> Iterator[str]:
    """Yield the names of all blobs of a publication, beginning with its manifest."""
    yield digest
    yield from (blob.digest for blob in manifest.blobs)
    yield from (file.blob.digest for file in manifest.files)
