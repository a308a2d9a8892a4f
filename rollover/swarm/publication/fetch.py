"""The worker's side of a publication: fetch, verify and materialise, while the engine continues with what it has.

consumes:  the head that the coordinator names, blobs from any source
produces:  ``FetchedWeights``; the newest stay in memory, as what the next delta is applied to
waits for: sources of blobs, until a deadline that names them

A delta rests on its base version, and this one perhaps on another. The chain is walked back by the digests in the
manifests, to the version that is held or to full weights, whichever comes first.

Invariants: nothing that was not signed by the publisher for this run takes effect; versions go up, even over
restarts of the worker; a fetch that fails or is cancelled changes nothing but the folder of blobs, with which the next
one continues.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollover.errors import EngineTimeout
from rollover.swarm.publication.blobs import BlobFolder, replace_file
from rollover.swarm.publication.download import BlobDownloads, BlobMissing
from rollover.swarm.publication.fetched import FetchedWeights
from rollover.swarm.publication.manifest import (
    PublicationError,
    PublicationManifest,
    PublicationRefused,
    needed_blobs,
    open_manifest,
)
from rollover.swarm.publication.materialise import TensorBytes, materialise, model_digest
from rollover.swarm.publication.stream import restore
from rollover.swarm.wire.messages import Head


@dataclass(frozen=True, slots=True)
class _Link:
    """A publication of a chain, and the name of its manifest."""

    digest: str
    manifest: PublicationManifest


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The newest publication that this worker has fetched."""

    run_id: str
    run_epoch: int
    version: int
    manifest: str
    model: str


class WeightFetcher:
    """Fetches publications of one run into ``root``, a folder of this worker's own.

    Args:
        key: the publisher's, from the worker's token.
        downloads: makes the downloads into the folder of blobs it is given; the default asks without authorization.
        max_model_bytes: weights that take more are refused; the default is this machine's memory.
    """

    def __init__(
        self,
        root: Path,
        key: Ed25519PublicKey,
        *,
        run_id: str,
        downloads: Callable[[BlobFolder], BlobDownloads] = BlobDownloads,
        max_model_bytes: int | None = None,
    ) -> None:
        self._root, self._key, self._run_id = root, key, run_id
        self._blobs = BlobFolder(root / "blobs")
        self._downloads = downloads(self._blobs)
        self._max_model_bytes = max_model_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._seen = self._read_seen()
        self._chain: tuple[_Link, ...] = ()
        self._turn = asyncio.Lock()
        self.held: FetchedWeights | None = None
        """The newest weights that were fetched; ``None`` before the first."""

    async def close(self) -> None:
        await self._downloads.close()

    async def fetch(self, head: Head, urls: Sequence[str], *, run_epoch: int, deadline_s: float) -> FetchedWeights:
        """Return the weights of a publication. A second call waits for the first; cancel what is no longer wanted.

        Args:
            urls: where blobs are, ``{url}/{digest}``, best guess first.
            run_epoch: the epoch of the coordinator that has published ``head``.

        Raises:
            PublicationRefused: the publication is not the publisher's, not of this run, older than what this worker has
                had, of another model or tokenizer, or larger than this machine's memory.
            PublicationError: it cannot be put together.
            EngineTimeout: it took too long; the message says who was waited for.
            ResourceError: the disk is full.
        """
        try:
            async with asyncio.timeout(deadline_s) as deadline, self._turn:
                if self.held is not None and self.held.digest == head.manifest:
                    return self.held
                self._downloads.use(urls)
                return await self._fetch(head, run_epoch)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineTimeout(
                f"version {head.version} of the weights did not arrive within {deadline_s:g} s; still"
                f" waiting for {self._downloads.waiting_for}"
            ) from None

    async def _fetch(self, head: Head, run_epoch: int) -> FetchedWeights:
        started_s, received = time.perf_counter(), self._downloads.wire_bytes
        newest = _Link(head.manifest, await self._manifest(head.manifest))
        self._admit(newest, head, run_epoch)
        chain, contents = await self._contents(newest)
        files = await asyncio.to_thread(self._files, newest.manifest)
        fetched = FetchedWeights(
            newest.digest,
            newest.manifest,
            contents,
            files,
            wire_bytes=self._downloads.wire_bytes - received,
            prepare_s=time.perf_counter() - started_s,
        )
        await asyncio.to_thread(self._remember, newest)
        self.held, self._chain = fetched, chain
        return fetched

    def _files(self, manifest: PublicationManifest) -> dict[str, bytes]:
        files = {file.name: restore(file.blob, self._blobs) for file in manifest.files}
        if model_digest(files) != manifest.model:
            raise PublicationError(f"the config and tokenizer of version {manifest.version} do not belong to its model")
        return files

    async def _contents(self, newest: _Link) -> tuple[tuple[_Link, ...], TensorBytes]:
        """Fetch and put together all tensors: from the version that is held, and from full weights if that fails."""
        for start in (self.held, self.held, None):  # twice, since a damaged blob was deleted and is fetched again
            links = await self._walk(newest, start)
            chain = (*self._chain, *links) if links[0].manifest.kind == "delta" else tuple(links)
            needed = {name for link in (*self._chain, *chain) for name in needed_blobs(link.digest, link.manifest)}
            await asyncio.to_thread(self._blobs.keep, needed)
            await self._downloads.get(
                blob for link in links for blob in (*link.manifest.blobs, *(f.blob for f in link.manifest.files))
            )
            try:
                return chain, await self._made(links, start.contents if start is not None else {})
            except PublicationError as error:
                failure = error
        raise failure

    async def _walk(self, newest: _Link, start: FetchedWeights | None) -> list[_Link]:
        """Return what is to be applied one after the other, the last being ``newest``."""
        links = [newest]
        while (base := links[0].manifest.base_manifest) is not None and (start is None or base != start.digest):
            above = links[0].manifest
            try:
                link = _Link(base, await self._manifest(base))
            except BlobMissing as error:
                raise PublicationError(
                    f"version {above.version} is a delta to version {above.base_version}, which this worker does not"
                    f" hold and cannot get: {error}"
                ) from None
            self._check_base(link, above)
            links.insert(0, link)
        return links

    async def _made(self, links: Sequence[_Link], base: TensorBytes) -> TensorBytes:
        """Apply publications one after the other, in a thread that ends soon when it is no longer waited for."""
        is_over = threading.Event()

        def make() -> TensorBytes:
            contents: TensorBytes = base if links[0].manifest.kind == "delta" else {}
            for link in links:
                contents = materialise(link.manifest, self._blobs, contents, is_wanted=lambda: not is_over.is_set())
            return contents

        try:
            return await asyncio.to_thread(make)
        finally:
            is_over.set()

    async def _manifest(self, digest: str) -> PublicationManifest:
        blob = await self._downloads.manifest(digest)
        manifest = await asyncio.to_thread(open_manifest, blob, self._key)
        if manifest.run_id != self._run_id:
            raise PublicationRefused(
                f"these are weights of the run {manifest.run_id!r}, not of {self._run_id!r}: is the address right?"
            )
        return manifest

    # -- what is refused ----------------------------------------------------------------------------------------------

    def _admit(self, link: _Link, head: Head, run_epoch: int) -> None:
        """Refuse a publication that was not announced, or is not news."""
        manifest = link.manifest
        if (manifest.version, manifest.run_epoch) != (head.version, run_epoch):
            raise PublicationError(
                f"version {head.version} of epoch {run_epoch} was announced, but its manifest is of version"
                f" {manifest.version} of epoch {manifest.run_epoch}"
            )
        seen = self._seen
        if seen is not None and link.digest != seen.manifest:
            if manifest.order <= (seen.run_epoch, seen.version):
                raise PublicationRefused(
                    f"version {manifest.version} of epoch {manifest.run_epoch} is outdated: this worker"
                    f" has already had version {seen.version} of epoch {seen.run_epoch}; if the run was"
                    " set back on purpose, start the worker with another folder (--cache)"
                )
            if manifest.model != seen.model:
                raise PublicationRefused(
                    f"version {manifest.version} has a config or tokenizer other than version"
                    f" {seen.version}, which this worker has had; if that is intended, start the worker"
                    " with another folder (--cache)"
                )
        self._check_size(manifest)

    def _check_base(self, link: _Link, above: PublicationManifest) -> None:
        base = link.manifest
        if base.version != above.base_version or base.order >= above.order or base.model != above.model:
            raise PublicationError(
                f"version {above.version} of epoch {above.run_epoch} cannot rest on version {base.version} of epoch"
                f" {base.run_epoch}; it names version {above.base_version} of the same model"
            )
        self._check_size(base)

    def _check_size(self, manifest: PublicationManifest) -> None:
        num_bytes = manifest.weights.num_bytes
        if num_bytes > self._max_model_bytes:
            raise PublicationRefused(
                f"the weights of version {manifest.version} take {num_bytes:,} bytes, but this worker"
                f" has memory for {self._max_model_bytes:,}: use a machine with more memory"
            )

    # -- what a restart of the worker remembers -----------------------------------------------------------------------

    def _read_seen(self) -> _Seen | None:
        with suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            seen = msgspec.json.decode((self._root / "seen.json").read_bytes(), type=_Seen)
            return seen if seen.run_id == self._run_id else None
        return None

    def _remember(self, link: _Link) -> None:
        manifest = link.manifest
        seen = _Seen(
            run_id=manifest.run_id,
            run_epoch=manifest.run_epoch,
            version=manifest.version,
            manifest=link.digest,
            model=manifest.model,
        )
        replace_file(self._root / "seen.json", msgspec.json.encode(seen))
        self._seen = seen
