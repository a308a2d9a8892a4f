"""Blobs over HTTP: from several sources, continued where they broke off, each verified before it counts.

Sources are asked in the order in which they are given; the last one is the trainer. The next one is asked when a source
fails, has not got the blob, or is slow, and a source that failed or was slow is passed over for a while.

consumes:  URLs of sources, names of blobs
produces:  blobs in a folder
waits for: the sources; ``waiting_for`` says which, for the message of whoever set the deadline
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from random import Random

import httpx

from rollover.engine.background import cancel
from rollover.errors import ResourceError
from rollover.swarm.publication.blobs import BlobFolder, space_on
from rollover.swarm.publication.manifest import MAX_MANIFEST_BYTES, BlobRef, PublicationError
from rollover.swarm.wire.proxies import ProxiedTransport
from rollover.swarm.wire.tls_errors import tls_refusal

_CONNECT_S, _STALL_S = 10.0, 30.0
_MAX_BACKOFF_S = 5.0
_MISSING_ROUNDS = 3
"""Consecutive rounds in which the last source lacks the blob, after which it counts as missing."""
_AWAY_S = 300.0
"""Seconds for which a source that failed or was slow is passed over."""
_MIN_BYTES_PER_S = 2**18
"""Rate below which a source counts as slow: a gigabyte takes an hour, after which workers give up (fetch_timeout_s)."""
_MEASURED_BYTES = 4 * 2**20
"""Smallest number of bytes over whose time a rate is measured: fewer show how far away a source is."""


class BlobMissing(PublicationError):
    """No source has the blob."""


class _Failed(Exception):
    """One download did not work out."""

    def __init__(self, reason: str, *, status: int | None = None, is_damaged: bool = False) -> None:
        super().__init__(reason)
        self.is_damaged = is_damaged
        self.is_missing = status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
        self.is_of_source = status is None or status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS
        """True if the source is likely to fail for other blobs too; a store may answer 403 for a blob that it lacks."""


@dataclass(slots=True)
class _Meter:
    """Bytes that all downloads from one source brought, and the time in which at least one was under way."""

    num_bytes: int = 0
    busy_s: float = 0.0
    num_active: int = 0
    since_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if not self.num_active:
            self.since_s = now_s
        self.num_active += 1

    def end(self, now_s: float) -> None:
        self.num_active -= 1
        if not self.num_active:
            self.busy_s += now_s - self.since_s

    def is_slow(self, now_s: float) -> bool:
        """Return True if ``_MEASURED_BYTES`` or more took, or are taking, longer than the lowest rate allows."""
        elapsed_s = self.busy_s + now_s - self.since_s
        return elapsed_s * _MIN_BYTES_PER_S > max(self.num_bytes, _MEASURED_BYTES)


class BlobDownloads:
    """Downloads into one folder.

    Args:
        authorization: the header of that name for sources that want one, by base URL.
        random: shuffles the blobs, so that workers that begin together ask for different ones.
        transports: for some URLs, by what these begin with: ``"https://host:port"``.
        say: shows a line to the user: of each source that is left for the next one, until it has worked again.
        backoff_s: pause after all sources have failed, doubled each time.
    """

    def __init__(
        self,
        folder: BlobFolder,
        *,
        verify: ssl.SSLContext | bool = True,
        authorization: Mapping[str, str] | None = None,
        max_parallel: int = 4,
        backoff_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
        transports: Mapping[str, httpx.AsyncBaseTransport] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.urls: tuple[str, ...] = ()
        """The sources, in the order in which they are asked."""
        self.wire_bytes = 0
        """Received so far, including what was of no use."""
        self._folder, self._clock = folder, clock
        self._authorization = {url.rstrip("/"): value for url, value in (authorization or {}).items()}
        self._max_parallel, self._backoff_s = max_parallel, backoff_s
        self._client = httpx.AsyncClient(
            transport=ProxiedTransport(verify=verify),
            trust_env=False,
            mounts=transports,
            timeout=httpx.Timeout(_STALL_S, connect=_CONNECT_S, pool=None),
        )
        self._random, self._say = random or Random(), say
        self._has_said: set[str] = set()
        """Sources of which the user was told that they fail."""
        self._waiting: dict[str, str] = {}
        self._away_until_s: dict[str, float] = {}
        """Time before which a source is passed over."""
        self._meters: dict[str, _Meter] = {}

    async def close(self) -> None:
        await self._client.aclose()

    def use(self, urls: Sequence[str]) -> None:
        """Download from these from now on, in this order, and measure their rates anew."""
        self.urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._meters = {url: _Meter() for url in self.urls}
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
            await cancel(downloads)

    async def _get(self, digest: str, num_bytes: int | None) -> None:
        num_rounds = num_missing = 0
        while digest not in self._folder:
            is_missing = await self._ask_each(digest, num_bytes)
            num_missing = num_missing + 1 if is_missing else 0
            if num_missing == _MISSING_ROUNDS:
                asked = ", ".join(self.urls) or "there is none"
                raise BlobMissing(f"no source has blob {digest}: {asked}")
            if digest not in self._folder:
                self._away_until_s.clear()
                await asyncio.sleep(min(_MAX_BACKOFF_S, self._backoff_s * 2**num_rounds))
                num_rounds += 1
        self._waiting.pop(digest, None)

    async def _ask_each(self, digest: str, num_bytes: int | None) -> bool:
        """Ask the sources in order until one gives the blob; return whether the last one, which knows, lacks it."""
        failures: dict[str, _Failed] = {}
        for url in self.urls:
            if not self._is_last(url) and self._clock() < self._away_until_s.get(url, -math.inf):
                continue
            for past_cache in (False, True):
                self._waiting[digest] = f"from {url}" + (f" ({_said(failures)})" if failures else "")
                try:
                    await self._download(url, digest, num_bytes, past_cache=past_cache)
                    return False
                except _Failed as failure:
                    failures[url] = failure
                    self._tell(url, failure)
                    if not failure.is_damaged:
                        break
            if failures[url].is_of_source:
                self._away_until_s[url] = self._clock() + _AWAY_S
        if failures:
            self._waiting[digest] = f"from any source ({_said(failures)})"
        return not self.urls or failures[self.urls[-1]].is_missing

    def _is_last(self, url: str) -> bool:
        return url == self.urls[-1]

    def _tell(self, url: str, failure: _Failed) -> None:
        """Tell the user of a source that fails; a cache may well lack a blob."""
        if url in self._has_said or failure.is_missing:
            return
        self._has_said.add(url)
        if failure.is_damaged:
            self._say(f"{url} has sent a damaged blob, which is fetched again: {failure}")
            return
        others = "" if self._is_last(url) else ", so the next source is asked"
        self._say(f"weights cannot be fetched from {url}{others}: {failure}")

    async def _download(self, url: str, digest: str, num_bytes: int | None, *, past_cache: bool) -> None:
        """Download a blob from one source, or continue a download. Raises ``_Failed``."""
        meter = self._meters[url]
        meter.begin(self._clock())
        try:
            await self._receive(url, digest, num_bytes, meter, past_cache=past_cache)
            await asyncio.to_thread(self._folder.accept, digest)
            self._has_said.discard(url)
        except PublicationError as error:
            raise _Failed(str(error), is_damaged=True) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError, ExceptionGroup) as error:
            # All but the first: of a URL that cannot be asked.
            raise _Failed(tls_refusal(error) or str(error) or type(error).__name__) from None
        except ResourceError:
            self._folder.partial(digest).unlink(missing_ok=True)
            raise
        finally:
            meter.end(self._clock())

    async def _receive(self, url: str, digest: str, num_bytes: int | None, meter: _Meter, *, past_cache: bool) -> None:
        """Append what a source sends to the bytes that are there, until the blob is whole, as far as sizes tell."""
        partial = self._folder.partial(digest)
        have = partial.stat().st_size if num_bytes is not None and partial.exists() else 0
        if num_bytes is not None and have >= num_bytes > 0:
            return
        headers = self._headers(url, digest, have, past_cache=past_cache)
        limit = MAX_MANIFEST_BYTES if num_bytes is None else num_bytes
        async with self._client.stream("GET", f"{url}/{digest}", headers=headers) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink(missing_ok=True)
            have = _first_byte(response, have)
            _refuse_size(response, have, num_bytes)
            with (
                space_on(self._folder.root, f"blob {digest}"),
                open(partial, "r+b" if have else "wb", buffering=0) as file,
            ):
                file.seek(have)
                async for chunk in response.aiter_raw():
                    self.wire_bytes += len(chunk)
                    meter.num_bytes += len(chunk)
                    have += len(chunk)
                    if have > limit:
                        file.truncate(0)
                        raise _Failed(f"sends more than the {limit:,} bytes of the blob", is_damaged=True)
                    file.write(chunk)
                    if have != num_bytes and not self._is_last(url) and meter.is_slow(self._clock()):
                        raise _Failed(f"it gives less than {_MIN_BYTES_PER_S:,} bytes/s")
        if num_bytes is not None and have < num_bytes:
            raise _Failed(f"ended after {have:,} of {num_bytes:,} bytes")

    def _headers(self, url: str, digest: str, have: int, *, past_cache: bool) -> dict[str, str]:
        """Return the headers of a request for the bytes of a blob from ``have`` on."""
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        if past_cache:
            headers["Cache-Control"] = "no-cache"
        if (authorization := self._authorization.get(url)) is not None:
            headers["Authorization"] = authorization
        return headers


def _first_byte(response: httpx.Response, have: int) -> int:
    """Return where in the blob the body of the response begins. Raises ``_Failed``."""
    status = response.status_code
    if status == HTTPStatus.OK:
        return 0
    if status == HTTPStatus.PARTIAL_CONTENT and response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        return have
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    raise _Failed(f"{status} {phrase}".strip(), status=status)


def _refuse_size(response: httpx.Response, have: int, num_bytes: int | None) -> None:
    """Refuse a body whose declared length is not the blob's."""
    length = response.headers.get("Content-Length", "")
    if num_bytes is not None and length.isdecimal() and have + int(length) != num_bytes:
        raise _Failed(f"has {have + int(length):,} bytes, the blob {num_bytes:,}", is_damaged=True)


def _said(failures: Mapping[str, _Failed]) -> str:
    return "; ".join(f"{source}: {failure}" for source, failure in failures.items())
