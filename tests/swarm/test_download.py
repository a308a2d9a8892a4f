"""Blobs come whole from caches, large and small, and from several sources at once."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads, BlobMissing
from rollover.swarm.publication.manifest import BlobRef
from tests.swarm.weights_kit import BlobServer, serving, whole

LARGE = random.Random(5).randbytes(6 * 2**20)


@asynccontextmanager
async def open_downloads(folder: Path, *urls: str, **options: Any) -> AsyncIterator[BlobDownloads]:
    downloads = BlobDownloads(BlobFolder(folder), backoff_s=0.001, **options)
    downloads.use(urls)
    try:
        yield downloads
    finally:
        await downloads.close()


def store_blobs(folder: Path, *contents: bytes) -> list[BlobRef]:
    blobs = BlobFolder(folder)
    return [BlobRef(digest=blobs.put(c), num_bytes=len(c), raw_bytes=len(c)) for c in contents]


def test_a_damaged_answer_is_asked_for_again_past_the_cache_that_may_hold_it(tmp_path: Path) -> None:
    """A caching proxy that has a flipped bit on its disk would send it to every worker for ever."""
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    cache = {blob.digest: b"wejghts"}

    def cached(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if server.headers[-1].get("cache-control") == "no-cache":
            cache[digest] = content
        return whole(cache[digest], start)

    said: list[str] = []

    async def scenario() -> None:
        for name in ("first", "second"):
            async with open_downloads(tmp_path / name, server.url, say=said.append) as downloads:
                await downloads.get([blob])
                assert (tmp_path / name / blob.digest).read_bytes() == b"weights"
                expected = {"first": 0.5, "second": 1.0}[name]
                assert downloads.sources.estimate(server.url).success == pytest.approx(expected, abs=0.01)

    with serving(tmp_path / "blobs", cached) as server:
        asyncio.run(scenario())
    assert [h.get("cache-control") for h in server.headers] == [None, "no-cache", None]
    (line,) = said
    assert line.startswith(f"{server.url} has sent a damaged blob, which is fetched again: ")


def test_a_source_that_goes_on_sending_something_else_is_left_for_another(tmp_path: Path) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")

    def other(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        return whole(b"wejghts", start)

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", bad.url, good.url) as downloads:
            await downloads.get([blob])
            assert downloads.sources.estimate(bad.url).success == pytest.approx(0.25, abs=0.01)

    with serving(tmp_path / "blobs", other) as bad, serving(tmp_path / "blobs") as good:
        asyncio.run(scenario())
    assert bad.num_asked == 2 and good.num_asked == 1


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_blob_that_was_cut_short_at_one_source_comes_from_another(tmp_path: Path, says_its_length: bool) -> None:
    """Its disk ran full while it copied, say; the beginning is good, but nobody knows that before the end is there."""
    (blob,) = store_blobs(tmp_path / "blobs", LARGE)

    def short(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        half = content[: len(content) // 2]
        return whole(half, start) if says_its_length else (200, {"Connection": "close"}, half)

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", bad.url, good.url) as downloads:
            await downloads.get([blob])
            assert (tmp_path / "worker" / blob.digest).read_bytes() == LARGE
            assert downloads.sources.estimate(bad.url).success <= 0.51

    with serving(tmp_path / "blobs", short) as bad, serving(tmp_path / "blobs") as good:
        asyncio.run(scenario())


def test_a_file_that_was_replaced_while_it_was_fetched_comes_whole(tmp_path: Path) -> None:
    """The server had half of another file under this name, and has the blob by now."""
    (blob,) = store_blobs(tmp_path / "blobs", LARGE)

    def replaced(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if server.num_asked == 1:
            return 200, {"Content-Length": str(len(content)), "ETag": '"old"'}, b"x" * 1000
        assert (start, server.headers[-1].get("if-range")) == (1000, '"old"')
        return 200, {"Content-Length": str(len(content)), "ETag": '"new"'}, content

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", server.url) as downloads:
            await downloads.get([blob])
            assert (tmp_path / "worker" / blob.digest).read_bytes() == LARGE

    with serving(tmp_path / "blobs", replaced) as server:
        asyncio.run(scenario())
    assert server.num_asked == 2


def test_what_one_source_began_another_goes_on_with_whatever_it_calls_the_file(tmp_path: Path) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", LARGE)

    def breaks_off(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        return 200, {"Content-Length": str(len(content)), "ETag": '"a"'}, content[:1000]

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", first.url, second.url) as downloads:
            downloads.sources.started(second.url)  # so that it is not tried
            await downloads.get([blob])

    with serving(tmp_path / "blobs", breaks_off) as first, serving(tmp_path / "blobs") as second:
        asyncio.run(scenario())
    assert [start for _, start in second.asked] == [1000] and "if-range" not in second.headers[0]


def test_the_home_of_the_blobs_gives_a_little_of_a_large_one_and_the_relay_the_rest(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", LARGE, LARGE[::-1], LARGE[1:])

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", relay.url, home.url, max_parallel=1) as downloads:
            await downloads.get(blobs)
            assert {*downloads.sources._known} == {relay.url, home.url}
            assert downloads.sources.estimate(home.url).bytes_per_s

    with serving(tmp_path / "blobs") as relay, serving(tmp_path / "blobs") as home:
        asyncio.run(scenario())
    assert [h["range"] for h in home.headers] == ["bytes=0-1048575"]
    assert sorted(start for _, start in relay.asked) == [0, 0, 2**20]
    for blob in blobs:
        assert hashlib.sha256((tmp_path / "worker" / blob.digest).read_bytes()).hexdigest() == blob.digest


@pytest.mark.parametrize(
    ("relay_says", "home_says", "is_gone"), [(403, 404, True), (404, 403, False), (503, 404, True)]
)
def test_a_blob_is_gone_when_its_home_says_so(tmp_path: Path, relay_says: int, home_says: int, is_gone: bool) -> None:
    """A bucket that may be read by names alone answers 403 for a name that it does not have."""
    rounds = 5

    def says(status: int) -> Any:
        return lambda server, digest, content, start: (status, {"Content-Length": "0"}, b"")

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", relay.url, home.url) as downloads:
            missing = asyncio.create_task(downloads.manifest("0" * 64))
            while not missing.done() and home.num_asked < rounds:
                await asyncio.sleep(0.001)
            assert missing.done() is is_gone
            if is_gone:
                with pytest.raises(BlobMissing, match="no source has blob"):
                    await missing
            missing.cancel()

    with serving(tmp_path, says(relay_says)) as relay, serving(tmp_path, says(home_says)) as home:
        asyncio.run(scenario())
    assert home.num_asked == (3 if is_gone else rounds)


def test_workers_that_begin_together_ask_for_different_blobs(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", *(bytes([n]) for n in range(30)))

    async def scenario() -> None:
        for seed in (1, 2, 1):
            options: dict[str, Any] = {"random": random.Random(seed), "max_parallel": 1}
            async with open_downloads(tmp_path / f"worker{server.num_asked}", server.url, **options) as downloads:
                await downloads.get(blobs)

    with serving(tmp_path / "blobs") as server:
        asyncio.run(scenario())
    first, second, third = (server.asked[30 * n : 30 * (n + 1)] for n in range(3))
    assert first == third and {*first} == {*second} and first[:4] != second[:4]


def test_a_source_that_fails_is_named_once_until_it_has_worked_again(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", *(bytes([i]) * 10 for i in range(8)))
    is_well, said = True, list[str]()

    def failing(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        return None if is_well else (503, {"Content-Length": "0"}, b"")

    async def scenario() -> None:
        nonlocal is_well
        async with open_downloads(tmp_path / "worker", relay.url, home.url, say=said.append) as downloads:
            for well in (False, True, False):
                is_well = well
                downloads.use((relay.url, home.url))  # whatever was thought of the relay before
                for blob in (blobs.pop(), blobs.pop()):
                    await downloads.get([blob])

    with serving(tmp_path / "blobs", failing) as relay, serving(tmp_path / "blobs") as home:
        asyncio.run(scenario())
    assert said == 2 * [f"weights cannot be fetched from {relay.url}, so others are asked: 503 Service Unavailable"]


def test_a_cache_that_lacks_a_blob_is_not_said_to_fail(tmp_path: Path) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    (tmp_path / "empty").mkdir()
    said: list[str] = []

    async def scenario() -> None:
        async with open_downloads(tmp_path / "worker", cache.url, home.url, say=said.append) as downloads:
            await downloads.get([blob])

    with serving(tmp_path / "empty") as cache, serving(tmp_path / "blobs") as home:
        asyncio.run(scenario())
    assert cache.num_asked == 1 and not said


@asynccontextmanager
async def listening(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A relay that answers as told, by URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def test_a_relay_that_says_nothing_is_waited_for_once_and_then_left_alone(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", b"one", b"two", b"three")
    num_asked, said = 0, list[str]()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        await reader.read()

    async def scenario() -> None:
        options: dict[str, Any] = {"silent_s": 0.2, "max_parallel": 1, "say": said.append}
        async with listening(nothing) as relay, open_downloads(tmp_path / "worker", relay, home.url, **options) as down:
            await down.get(blobs)
            assert said == [f"weights cannot be fetched from {relay}, so others are asked: ReadTimeout"]

    with serving(tmp_path / "blobs") as home:
        asyncio.run(scenario())
    assert (num_asked, home.num_asked) == (1, 3)


def test_a_slow_relay_is_left_for_a_home_that_nobody_has_measured(tmp_path: Path) -> None:
    """A blob too small for a try of the home is no reason to wait for a relay of a few kilobytes per second."""
    content = LARGE[: 2**20]
    (blob,) = store_blobs(tmp_path / "blobs", content)

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content))
        for start in range(0, len(content), 100):
            writer.write(content[start : start + 100])
            await writer.drain()
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        said: list[str] = []
        options: dict[str, Any] = {"patience_s": 0.05, "say": said.append}
        async with listening(drips) as relay, open_downloads(tmp_path / "worker", relay, home.url, **options) as down:
            await down.get([blob])
            (line,) = said
            assert line.startswith(f"weights cannot be fetched from {relay}, so others are asked: gives ")

    with serving(tmp_path / "blobs") as home:
        asyncio.run(scenario())
    ((_, start),) = home.asked
    assert 0 < start < len(content), "what the relay has sent is not fetched again"


def test_a_slow_home_is_not_left_for_a_fast_relay_that_lacks_the_blob(tmp_path: Path) -> None:
    content = LARGE[: 2**20]
    (blob,) = store_blobs(tmp_path / "blobs", content)
    (other,) = store_blobs(tmp_path / "cached", content[::-1])
    num_asked = 0

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content))
        for start in range(0, len(content), 2**16):
            writer.write(content[start : start + 2**16])
            await writer.drain()
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with listening(slowly) as home, open_downloads(tmp_path / "w", relay.url, home, patience_s=0.05) as down:
            await down.get([other])
            download_s = 2**20 / 1e9  # whatever the relay's bandwidth on this machine
            down.sources.started(relay.url)
            down.sources.ended(relay.url, 2**20, download_s, well=True)
            await down.get([blob])

    with serving(tmp_path / "cached") as relay:
        asyncio.run(scenario())
    assert num_asked == 1
