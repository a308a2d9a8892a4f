"""The trainer's side of a publication: blobs first, then the signed manifest, then the head, then the base of the next.

::

    root/publisher.key        the Ed25519 key, readable by its owner alone
    root/publications.json    the kept publications, the newest last: it is the head
    root/blobs/<digest>       what workers fetch, from here or from wherever it is copied

Invariants: a version is visible when everything that it needs is on disk, and not before; a crash between any
two steps leaves the head and all it rests on readable; versions go up, within an epoch of the run and from each to the
next; one publisher writes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollover.hf.companions import read_companions
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.delta import Bytes, encode
from rollover.swarm.publication.keys import open_key, secret_of
from rollover.swarm.publication.manifest import (
    FILE_NAME,
    BlobRef,
    FileRef,
    PublicationError,
    PublicationManifest,
    PublishedTensor,
    digest_of,
    needed_blobs,
    open_manifest,
    sign,
)
from rollover.swarm.publication.materialise import TensorBytes, materialise, model_digest
from rollover.swarm.publication.publications import KeptPublication, PublicationLog, PublishedWeights
from rollover.swarm.publication.stream import LEVEL, StreamWriter, store
from rollover.swarm.wire.messages import Head
from rollover.weights.base import DTYPE_BYTES, TensorSpec, WeightSource
from rollover.weights.folders import ServedFormats

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_Body = tuple[tuple[PublishedTensor, ...], tuple[BlobRef, ...]]
"""Tensors of a publication and the blobs that hold them."""
_MAX_THREADS = min(8, os.cpu_count() or 1)


class SwarmPublisher:
    """Publishes weights as files. It blocks while it works; call it in a thread. It keeps one copy of the weights, as
    they are served, in memory, and while it works a second one.

    Args:
        root: its folder, the same in each epoch of a run. No other publisher uses it at the same time.
        run_epoch: rises with each start of the run.
        model: the model folder that the run began with: its number formats, config and tokenizer.
        anchor_every: the number of publications from one with full weights to the next.
        keep_versions: the number of publications that can be fetched, with all that they rest on.
    """

    def __init__(
        self, root: Path, *, run_id: str, run_epoch: int, model: Path, anchor_every: int = 20, keep_versions: int = 4
    ) -> None:
        if anchor_every < 1 or keep_versions < 1:
            raise ValueError(f"anchor_every={anchor_every} and keep_versions={keep_versions} must be at least 1")
        self.blobs = BlobFolder(root / "blobs")
        self._root, self._run_id, self._run_epoch = root, run_id, run_epoch
        self._anchor_every = anchor_every
        self._key = open_key(root / "publisher.key")
        self._formats = ServedFormats(model)
        companions = read_companions(model).items()
        self._files = {name: content for name, content in companions if FILE_NAME.fullmatch(name)}
        self._log = PublicationLog(root / "publications.json", run_id=run_id, keep_versions=keep_versions)
        self._log.refuse_regress(run_epoch)
        self._base: TensorBytes | None = None

    @property
    def public_key(self) -> Ed25519PublicKey:
        """Return the key with which workers tell this publisher's manifests from others."""
        return self._key.public_key()

    def secret_for(self, purpose: str) -> bytes:
        """Return a secret that is the same in each start of the run, and known to nobody else: see ``secret_of``."""
        return secret_of(self._key, purpose)

    @property
    def head(self) -> Head | None:
        """Return the newest publication, which may be of an earlier epoch; ``None`` before the first."""
        return self._log.head

    @property
    def kept(self) -> tuple[KeptPublication, ...]:
        """Return the publications that can be fetched, oldest first; this includes publications of earlier epochs."""
        return self._log.kept

    def publish(self, source: WeightSource) -> PublishedWeights:
        """Publish full weights of a new version. When it raises, the head is what it was, or the new version is whole.

        Raises:
            PublicationError: the version does not go up, or weights cannot be published as they are.
            EngineError: ``source`` does not hold full weights.
            ResourceError: the disk is full.
        """
        started_s = time.perf_counter()
        version = source.manifest.version
        source.manifest.require_full(version, self)
        self._log.refuse_regress(self._run_epoch, version)
        try:
            published, tensors = self._commit(source, started_s)
        except BaseException:
            self._base = None
            self._log.read()  # what has been committed counts, not what was meant
            self._prune()
            raise
        self._base = tensors
        self._prune()
        return published

    def __repr__(self) -> str:
        return f"the publisher in {self._root}"

    def _commit(self, source: WeightSource, started_s: float) -> tuple[PublishedWeights, TensorBytes]:
        """Publish a delta, or all tensors where that makes no sense or is smaller."""
        specs, new = self._served(source)
        base, reason = self._find_base(new)
        body = None if base is None else self._write(specs, new, base, below=self._log.chain[0].wire_bytes)
        if base is not None and body is None:
            reason = "a delta would not have been smaller"
        newest = None if body is None else self._log.kept[-1]
        if body is None:
            body = self._write(specs, new)
            assert body is not None
        manifest, head = self._commit_manifest(source.manifest.version, *body, base=newest)
        published = PublishedWeights(
            version=head.version,
            manifest=head.manifest,
            kind=manifest.kind,
            reason=reason,
            wire_bytes=manifest.wire_bytes,
            full_bytes=sum(content.nbytes for content in new.values()),
            elapsed_s=time.perf_counter() - started_s,
        )
        return published, new

    def _served(self, source: WeightSource) -> tuple[list[TensorSpec], dict[str, Bytes]]:
        """Return the tensors in the number formats in which they are served."""
        import torch

        specs, contents = [], {}
        for name, tensor in self._formats.cast(source):
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype))
            contents[name] = np.array(tensor.reshape(-1).view(torch.uint8).numpy(), copy=True)
        if unknown := {spec.dtype for spec in specs} - DTYPE_BYTES.keys():
            raise PublicationError(f"weights of the number formats {sorted(unknown)} cannot be published")
        return specs, contents

    def _commit_manifest(
        self,
        version: int,
        tensors: tuple[PublishedTensor, ...],
        blobs: tuple[BlobRef, ...],
        *,
        base: KeptPublication | None = None,
    ) -> tuple[PublicationManifest, Head]:
        """Sign the manifest of weights whose blobs are written, and move the head to it."""
        manifest = PublicationManifest(
            run_id=self._run_id,
            run_epoch=self._run_epoch,
            version=version,
            base_version=base.version if base else None,
            base_manifest=base.manifest if base else None,
            kind="delta" if base else "full",
            model=model_digest(self._files),
            files=tuple(FileRef(name=name, blob=store(self._files[name], self.blobs)) for name in sorted(self._files)),
            tensors=tensors,
            blobs=blobs,
        )
        signed = sign(manifest, self._key)
        open_manifest(signed, self.public_key)  # what no worker would take is not published
        digest = self.blobs.put(signed)
        return manifest, self._log.move_head(manifest, digest)

    def _write(
        self,
        specs: Sequence[TensorSpec],
        new: TensorBytes,
        base: TensorBytes | None = None,
        *,
        below: int | None = None,
    ) -> _Body | None:
        """Write all tensors into blobs; ``None`` when they take as many bytes as ``below``, or more."""

        def prepared(spec: TensorSpec) -> tuple[str, bytes | None]:
            content = new[spec.name]
            encoded = None if base is None else smaller_encoding(base[spec.name], content, DTYPE_BYTES[spec.dtype])
            return digest_of(content.data), encoded

        stream, tensors = StreamWriter(self.blobs), []
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            for spec, (digest, encoded) in zip(specs, _ahead(pool, prepared, specs), strict=True):
                start = stream.num_bytes
                stream.append(new[spec.name].data if encoded is None else memoryview(encoded))
                tensors.append(
                    PublishedTensor(
                        name=spec.name,
                        dtype=spec.dtype,
                        shape=spec.shape,
                        digest=digest,
                        start=start,
                        num_bytes=stream.num_bytes - start,
                        encoding="raw" if encoded is None else "difference",
                    )
                )
                if below is not None and stream.wire_bytes >= below:
                    return None
        blobs = stream.finish()
        return None if below is not None and stream.wire_bytes >= below else (tuple(tensors), blobs)

    # -- what the next publication is made from ---------------------------------------------------------------------

    def _find_base(self, new: TensorBytes) -> tuple[TensorBytes | None, str]:
        """Return the tensors of the head, if a delta to them makes sense, and the reason for the kind."""
        if not self._log.kept:
            return None, "it is the first"
        if len(self._log.chain) >= self._anchor_every:
            return None, f"every {self._anchor_every}th publication is full"
        if self._base is None:
            tensors: TensorBytes = {}  # of the head, read from the disk
            try:
                for kept in self._log.chain:
                    tensors = materialise(self._manifest(kept), self.blobs, tensors)
            except PublicationError as error:
                return None, f"the publication before cannot be read: {error}"
            self._base = tensors
        if {name: content.nbytes for name, content in self._base.items()} != {n: c.nbytes for n, c in new.items()}:
            return None, "names or sizes of tensors have changed"
        return self._base, f"it is made from version {self._log.kept[-1].version}"

    def _manifest(self, kept: KeptPublication) -> PublicationManifest:
        return open_manifest(self.blobs.read(kept.manifest), self.public_key)

    def _prune(self) -> None:
        """Delete the blobs that no kept publication needs, or leave them to the next time."""
        with suppress(OSError, PublicationError):
            needed: set[str] = set()
            for kept in self._log.kept:
                needed.update(needed_blobs(kept.manifest, self._manifest(kept)))
            self.blobs.keep(needed)


def _ahead(pool: Executor, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results in order, while the next few are worked on: a map that does not hold all results at once."""
    under_way: deque[Future[R]] = deque()
    for item in items:
        under_way.append(pool.submit(work, item))
        if len(under_way) > _MAX_THREADS:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def smaller_encoding(old: Bytes, new: Bytes, item_bytes: int) -> bytes | None:
    """Return the encoding of ``new`` over ``old``, or ``None`` if the compressed tensor itself is no larger."""
    encoded = encode(old, new, item_bytes)
    if len(encoded) < new.nbytes // 2:
        return encoded
    return encoded if len(encoded) < len(zstandard.ZstdCompressor(level=LEVEL).compress(new.data)) else None
