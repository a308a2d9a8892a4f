"""Blobs over HTTP: from several sources, continued where they broke off, each verified before it counts.

consumes:  URLs of sources, names of blobs
produces:  blobs in a folder
waits for: the sources; ``waiting_for`` says which, for the message of whoever set the deadline
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import httpx

from rollover.errors import ResourceError
from rollover.swarm.publication.blobs import BlobFolder, space_on
from rollover.swarm.publication.manifest import MAX_MANIFEST_BYTES, BlobRef, PublicationError
from rollover.swarm.publication.sources import BlobSources

_CONNECT_S, _STALL_S = 10.0, 20.0
_MAX_BACKOFF_S = 5.0
_MISSING_ROUNDS = 3
"""When so many times in a row each source has said that it has no such blob, there is none."""
_SLOW = 4
"""A download is continued elsewhere when so many times its bandwidth is to be had there."""


class BlobMissing(PublicationError):
    """No source has the blob."""


class _Failed(Exception):
    """One download did not work out."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


class BlobDownloads:
    """Downloads into one folder.

    Args:
        authorization: the header of that name for sources that want one, by base URL.
        patience_s: a download is judged slow after so much time, and not before.
        backoff_s: pause after all sources have failed, doubled each time.
    """

    def __init__(
        self,
        folder: BlobFolder,
        *,
        verify: ssl.SSLContext | bool = True,
        authorization: Mapping[str, str] | None = None,
        max_parallel: int = 4,
        patience_s: float = 2.0,
        backoff_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources = BlobSources(clock=clock)
        self.wire_bytes = 0
        """Received so far, also what was of no use."""
        self._folder, self._clock = folder, clock
        self._authorization = {url.rstrip("/"): value for url, value in (authorization or {}).items()}
        self._max_parallel, self._patience_s, self._backoff_s = max_parallel, patience_s, backoff_s
        timeout = httpx.Timeout(_STALL_S, connect=_CONNECT_S, pool=None)
        self._client = httpx.AsyncClient(verify=verify, timeout=timeout, trust_env=False)
        self._waiting: dict[str, str] = {}

    async def close(self) -> None:
        await self._client.aclose()

    def use(self, urls: Sequence[str]) -> None:
        """Download from these from now on, best guess first."""
        self.sources.use(urls)
        self._waiting.clear()

    @property
    def waiting_for(self) -> str:
        """Say which blobs are missing, and what the sources have said."""
        if not self._waiting:
            return "nothing more to download"
        digest, state = next(iter(self._waiting.items()))
        more = f", and {len(self._waiting) - 1} more" if len(self._waiting) > 1 else ""
        return f"blob {digest[:16]} {state}{more}"

    async def manifest(self, digest: str) -> bytes:
        """Return the blob of a signed manifest. Raises ``BlobMissing``."""
        await self._get(digest, None)
        return self._folder.read(digest)

    async def get(self, blobs: Iterable[BlobRef]) -> None:
        """Fetch those blobs that the folder does not have. Raises ``BlobMissing``, ``ResourceError``."""
        wanted = list({blob.digest: blob for blob in blobs}.values())
        turn = asyncio.Semaphore(self._max_parallel)

        async def one(blob: BlobRef) -> None:
            async with turn:
                await self._get(blob.digest, blob.num_bytes)

        downloads = [asyncio.create_task(one(blob)) for blob in wanted]
        try:
            await asyncio.gather(*downloads)
        finally:
            for download in downloads:
                download.cancel()
            await asyncio.gather(*downloads, return_exceptions=True)

    async def _get(self, digest: str, num_bytes: int | None) -> None:
        num_rounds = num_missing = 0
        while digest not in self._folder:
            is_missing = await self._ask_each(digest, num_bytes)
            num_missing = num_missing + 1 if is_missing else 0
            if num_missing == _MISSING_ROUNDS:
                raise BlobMissing(f"no source has blob {digest}: {', '.join(self.sources.urls) or 'there is none'}")
            if digest not in self._folder:
                await asyncio.sleep(min(_MAX_BACKOFF_S, self._backoff_s * 2**num_rounds))
                num_rounds += 1
        self._waiting.pop(digest, None)

    async def _ask_each(self, digest: str, num_bytes: int | None) -> bool:
        """Ask the sources one after the other until one gives the blob; say whether none has it."""
        failures: dict[str, _Failed] = {}
        while (url := self.sources.best(avoid=failures)) is not None:
            said = "; ".join(f"{source}: {failure}" for source, failure in failures.items())
            self._waiting[digest] = f"from {url}" + (f" ({said})" if said else "")
            try:
                await self._download(url, digest, num_bytes)
                return False
            except _Failed as failure:
                failures[url] = failure
        if failures:
            said = "; ".join(f"{source}: {failure}" for source, failure in failures.items())
            self._waiting[digest] = f"from any source ({said})"
        return all(failure.is_missing for failure in failures.values())

    async def _download(self, url: str, digest: str, num_bytes: int | None) -> None:
        """Download a blob from one source, or go on with it. Raises ``_Failed``."""
        start_s, well, progress = self._clock(), False, _Progress()
        self.sources.started(url)
        try:
            await self._receive(url, digest, num_bytes, progress)
            await asyncio.to_thread(self._folder.accept, digest)
            well = True
        except httpx.HTTPError as error:
            raise _Failed(str(error) or type(error).__name__) from None
        except PublicationError as error:
            raise _Failed(str(error)) from None
        except ResourceError:
            well = True  # no fault of the source's
            self._folder.partial(digest).unlink(missing_ok=True)
            raise
        except asyncio.CancelledError:
            well = True  # no fault of the source's
            raise
        finally:
            self.sources.ended(url, progress.num_bytes, self._clock() - start_s, well=well)

    async def _receive(self, url: str, digest: str, num_bytes: int | None, progress: _Progress) -> None:
        partial = self._folder.partial(digest)
        have = partial.stat().st_size if num_bytes is not None and partial.exists() else 0
        if num_bytes is not None and have >= num_bytes > 0:
            return
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        if (authorization := self._authorization.get(url)) is not None:
            headers["Authorization"] = authorization
        limit = MAX_MANIFEST_BYTES if num_bytes is None else num_bytes
        async with self._client.stream("GET", f"{url}/{digest}", headers=headers) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink(missing_ok=True)
            have = _first_byte(response, have)
            _refuse_size(response, have, num_bytes)
            start_s = self._clock()
            with (
                space_on(self._folder.root, f"blob {digest}"),
                open(partial, "r+b" if have else "wb", buffering=0) as file,
            ):
                file.seek(have)
                async for chunk in response.aiter_raw():
                    self.wire_bytes += len(chunk)
                    progress.num_bytes += len(chunk)
                    have += len(chunk)
                    if have > limit:
                        file.truncate(0)
                        raise _Failed(f"sends more than the {limit:,} bytes of the blob")
                    file.write(chunk)
                    if have != num_bytes:
                        self._refuse_slow(url, progress.num_bytes, self._clock() - start_s)
        if num_bytes is not None and have < num_bytes:
            raise _Failed(f"ended after {have:,} of {num_bytes:,} bytes")

    def _refuse_slow(self, url: str, num_bytes: int, elapsed_s: float) -> None:
        if elapsed_s > self._patience_s and _SLOW * num_bytes / elapsed_s < self.sources.bandwidth_elsewhere(url):
            raise _Failed(f"gives {num_bytes / elapsed_s:,.0f} bytes/s, another source far more")


@dataclass(slots=True)
class _Progress:
    """Bytes that one download has received."""

    num_bytes: int = 0


def _first_byte(response: httpx.Response, have: int) -> int:
    """Return where in the blob the body of the response begins. Raises ``_Failed``."""
    status = response.status_code
    if status == HTTPStatus.OK:
        return 0
    if status == HTTPStatus.PARTIAL_CONTENT and response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        return have
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    raise _Failed(f"{status} {phrase}".strip(), is_missing=status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE))


def _refuse_size(response: httpx.Response, have: int, num_bytes: int | None) -> None:
    """Refuse a body that says that it does not end where the blob does."""
    length = response.headers.get("Content-Length", "")
    if num_bytes is not None and length.isdecimal() and have + int(length) != num_bytes:
        raise _Failed(f"has {have + int(length):,} bytes, the blob {num_bytes:,}")
