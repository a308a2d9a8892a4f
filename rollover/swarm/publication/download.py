"""Blobs over HTTP: from several sources, continued where they broke off, each verified before it counts.

consumes:  URLs of sources, names of blobs
produces:  blobs in a folder
waits for: the sources; ``waiting_for`` says which, for the message of whoever set the deadline
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from random import Random

import httpx

from rollover.errors import ResourceError
from rollover.swarm.publication.blobs import BlobFolder, space_on
from rollover.swarm.publication.manifest import MAX_MANIFEST_BYTES, BlobRef, PublicationError
from rollover.swarm.publication.proxied import ProxiedTransport
from rollover.swarm.publication.sources import BlobSources

_CONNECT_S, _STALL_S = 10.0, 30.0
_SILENT_S = 15.0
"""Seconds for which a source may say nothing while the home of the blobs can still be asked: more than a relay takes
to fetch a piece that others wait for too."""
_MAX_BACKOFF_S = 5.0
_MISSING_ROUNDS = 3
"""Consecutive rounds without a source for the blob, its home last, after which it counts as missing."""
_SLOW = 4
"""A download is continued elsewhere when this multiple of its bandwidth is available there."""
_REMEDY = "; if it is right, add it, or its authority's, to the file of --ca-file"
_TRY_BYTES = 2**20
_TRY_IN_BYTES = 4 * 2**20
"""Bytes that a source whose bandwidth is not known is tried with, and the size of the smallest blob for that."""


class BlobMissing(PublicationError):
    """No source has the blob."""


class _Failed(Exception):
    """One download did not work out."""

    def __init__(self, reason: str, *, is_missing: bool = False, is_damaged: bool = False) -> None:
        super().__init__(reason)
        self.is_missing, self.is_damaged = is_missing, is_damaged


class BlobDownloads:
    """Downloads into one folder.

    Args:
        authorization: the header of that name for sources that want one, by base URL.
        random: shuffles the blobs, so that workers that begin together ask for different ones.
        transports: for some URLs, by what these begin with: ``"scheme://"`` or ``"https://host:port"``.
        say: shows a line to the user: of each source that fails, the first time in a row.
        patience_s: seconds after which a download may be judged slow.
        silent_s: seconds for which a source may say nothing while the last one, the home, can still be asked.
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
        silent_s: float = _SILENT_S,
        backoff_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
        transports: Mapping[str, httpx.AsyncBaseTransport] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.sources = BlobSources(clock=clock)
        self.wire_bytes = 0
        """Received so far, including what was of no use."""
        self._folder, self._clock = folder, clock
        self._authorization = {url.rstrip("/"): value for url, value in (authorization or {}).items()}
        self._max_parallel, self._backoff_s = max_parallel, backoff_s
        self._patience_s, self._silent_s = patience_s, silent_s
        self._client = httpx.AsyncClient(transport=ProxiedTransport(verify=verify), trust_env=False, mounts=transports)
        self._random, self._say = random or Random(), say
        self._has_said: set[str] = set()
        """Sources of which the user was told that they fail."""
        self._waiting: dict[str, str] = {}
        self._tags: dict[tuple[str, str], str] = {}
        """Tag that a source gives to the content of a partly fetched blob."""
        self._damaged: set[tuple[str, str]] = set()
        """Blobs that a source has sent with another content, perhaps from its cache."""

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
        """Fetch those blobs that the folder does not have, in any order. Raises ``BlobMissing``, ``ResourceError``."""
        wanted = list({blob.digest: blob for blob in blobs}.values())
        self._random.shuffle(wanted)
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
                asked = ", ".join(map(shown, self.sources.urls)) or "there is none"
                raise BlobMissing(f"no source has blob {digest}: {asked}")
            if digest not in self._folder:
                await asyncio.sleep(min(_MAX_BACKOFF_S, self._backoff_s * 2**num_rounds))
                num_rounds += 1
        self._waiting.pop(digest, None)

    async def _ask_each(self, digest: str, num_bytes: int | None) -> bool:
        """Ask the sources one after the other until one gives the blob; say whether none has it. Its home knows: a
        store may answer 403 for what it does not hold."""
        failures: dict[str, _Failed] = {}
        await self._try(digest, num_bytes, failures)
        while (url := self.sources.best(avoid=failures)) is not None:
            self._waiting[digest] = f"from {shown(url)}" + (f" ({_said(failures)})" if failures else "")
            try:
                await self._download(url, digest, num_bytes, failures)
                return False
            except _Failed as failure:
                self._tell(url, failure)
                if not failure.is_damaged or (url, digest) in self._damaged:
                    failures[url] = failure
                else:  # where it is still the best one, it is asked once more, past its cache
                    self._damaged.add((url, digest))
        if failures:
            self._waiting[digest] = f"from any source ({_said(failures)})"
        home = failures.get(self.sources.home or "")
        return home is None or home.is_missing

    async def _try(self, digest: str, num_bytes: int | None, failures: dict[str, _Failed]) -> None:
        """Take the beginning of a large blob from a source whose bandwidth is not known."""
        if num_bytes is None or num_bytes < _TRY_IN_BYTES or self._folder.partial(digest).exists():
            return
        if (url := self.sources.untried()) is None:
            return
        self._waiting[digest] = f"from {shown(url)}"
        try:
            await self._download(url, digest, num_bytes, failures, most=_TRY_BYTES)
        except _Failed as failure:
            failures[url] = failure
            self._tell(url, failure)

    def _tell(self, url: str, failure: _Failed) -> None:
        """Tell the user of a source that fails; a cache may well lack a blob."""
        if url not in self._has_said and not failure.is_missing:
            self._has_said.add(url)
            if failure.is_damaged:
                self._say(f"{shown(url)} has sent a damaged blob, which is fetched again: {failure}")
                return
            others = ", so others are asked" if len(self.sources.urls) > 1 else ""
            self._say(f"weights cannot be fetched from {shown(url)}{others}: {failure}")

    async def _download(
        self, url: str, digest: str, num_bytes: int | None, failed: Collection[str], *, most: int | None = None
    ) -> None:
        """Download a blob from one source, or continue a download; ``most`` bytes of it, at most.

        Args:
            failed: sources that have not given the blob, so that this one cannot be left for them.

        Raises ``_Failed``.
        """
        start_s, well, is_silent, progress = self._clock(), False, False, _Progress()
        self.sources.started(url)
        try:
            if await self._receive(url, digest, num_bytes, failed, progress, most):
                await asyncio.to_thread(self._folder.accept, digest)
                self._tags.pop((url, digest), None)
                self._damaged.discard((url, digest))
                self._has_said.discard(url)
            well = True
        except httpx.HTTPError as error:
            remedy = _REMEDY if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""
            is_silent = isinstance(error, httpx.TimeoutException)
            raise _Failed(f"{str(error) or type(error).__name__}{remedy}") from None
        except PublicationError as error:
            raise _Failed(str(error), is_damaged=True) from None
        except ResourceError:
            well = True  # no fault of the source's
            self._folder.partial(digest).unlink(missing_ok=True)
            raise
        except asyncio.CancelledError:
            well = True  # no fault of the source's
            raise
        finally:
            self.sources.ended(url, progress.num_bytes, self._clock() - start_s, well=well, is_silent=is_silent)

    async def _receive(
        self,
        url: str,
        digest: str,
        num_bytes: int | None,
        failed: Collection[str],
        progress: _Progress,
        most: int | None,
    ) -> bool:
        """Append what a source sends to the bytes that are there; return whether the blob is whole, as far as sizes
        tell."""
        partial = self._folder.partial(digest)
        have = partial.stat().st_size if num_bytes is not None and partial.exists() else 0
        if num_bytes is not None and have >= num_bytes > 0:
            return True
        headers = self._headers(url, digest, have, None if most is None else have + most)
        limit = MAX_MANIFEST_BYTES if num_bytes is None else num_bytes
        timeout = self._timeout(url, failed)
        async with self._client.stream("GET", blob_url(url, digest), headers=headers, timeout=timeout) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink(missing_ok=True)
            have = _first_byte(response, have)
            if response.status_code == HTTPStatus.OK:
                most = None
            _refuse_size(response, have, num_bytes if most is None else have + most)
            self._note_tag(url, digest, response)
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
                        raise _Failed(f"sends more than the {limit:,} bytes of the blob", is_damaged=True)
                    file.write(chunk)
                    if have != num_bytes:
                        self._refuse_slow(url, failed, progress.num_bytes, self._clock() - start_s)
        if num_bytes is not None and have < num_bytes and most is None:
            raise _Failed(f"ended after {have:,} of {num_bytes:,} bytes")
        return most is None or have == num_bytes

    def _headers(self, url: str, digest: str, have: int, end: int | None) -> dict[str, str]:
        """Return the headers of a request for the bytes of a blob from ``have`` on, up to ``end`` if there is one."""
        headers = {"Accept-Encoding": "identity"}
        if have or end is not None:
            headers["Range"] = f"bytes={have}-{'' if end is None else end - 1}"
        if have and (tag := self._tags.get((url, digest))) is not None:
            headers["If-Range"] = tag  # a file that was replaced meanwhile comes whole
        if (url, digest) in self._damaged:
            headers["Cache-Control"] = "no-cache"
        if (authorization := self._authorization.get(url)) is not None:
            headers["Authorization"] = authorization
        return headers

    def _note_tag(self, url: str, digest: str, response: httpx.Response) -> None:
        self._tags.pop((url, digest), None)
        if (tag := response.headers.get("ETag", "")).startswith('"'):  # a weak one promises no equal bytes
            self._tags[url, digest] = tag

    def _timeout(self, url: str, failed: Collection[str]) -> httpx.Timeout:
        home = self.sources.home
        silent_s = _STALL_S if url == home or home in failed else self._silent_s
        return httpx.Timeout(silent_s, connect=_CONNECT_S, pool=None)

    def _refuse_slow(self, url: str, failed: Collection[str], num_bytes: int, elapsed_s: float) -> None:
        if elapsed_s <= self._patience_s:
            return
        if _SLOW * num_bytes / elapsed_s < self.sources.bandwidth_elsewhere(url, avoid=failed):
            raise _Failed(f"gives {num_bytes / elapsed_s:,.0f} bytes/s, another source is likely to give far more")


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
        raise _Failed(f"has {have + int(length):,} bytes, the blob {num_bytes:,}", is_damaged=True)


def blob_url(url: str, digest: str) -> str:
    """Return where a source has a blob; a query, such as a signature, follows it.

    Example: ``blob_url("https://a/b?sig=x", "9c1e...")`` is ``"https://a/b/9c1e...?sig=x"``.
    """
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{digest}{mark}{query}"


def shown(url: str) -> str:
    """Return a source's URL as it may be shown: a query is a secret."""
    return url.partition("?")[0]


def _said(failures: Mapping[str, _Failed]) -> str:
    return "; ".join(f"{shown(source)}: {failure}" for source, failure in failures.items())
