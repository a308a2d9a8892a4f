"""Blobs come whole from caches, large and small, and from several sources at once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.swarm.publication.download import BlobMissing
from tests.swarm.http_kit import listening
from tests.swarm.weights_kit import BlobServer, answering, download, open_downloads, serving, store_blobs, whole

LARGE = random.Random(5).randbytes(6 * 2**20)


async def test_a_damaged_blob_is_asked_for_again_past_the_cache(tmp_path: Path) -> None:
    """A caching proxy that has a flipped bit on its disk would send it to every worker for ever."""
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    cache = {blob.digest: b"wejghts"}

    def cached(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if server.headers[-1].get("cache-control") == "no-cache":
            cache[digest] = content
        return whole(cache[digest], start)

    said: list[str] = []
    with serving(tmp_path / "blobs", cached) as server:
        for name in ("first", "second"):
            await download(tmp_path / name, [blob], server.url, say=said.append)
            assert (tmp_path / name / blob.digest).read_bytes() == b"weights"
    assert [h.get("cache-control") for h in server.headers] == [None, "no-cache", None]
    (line,) = said
    assert line.startswith(f"{server.url} has sent a damaged blob, which is fetched again: ")


async def test_a_source_that_goes_on_sending_something_else_is_left_for_another(tmp_path: Path) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    other = whole(b"wejghts")
    with serving(tmp_path / "blobs", lambda *asked: other) as bad, serving(tmp_path / "blobs") as good:
        await download(tmp_path / "worker", [blob], bad.url, good.url)
    assert bad.num_asked == 2 and good.num_asked == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:87955", "http://relay..lan", "http://relay:port"])
async def test_a_url_that_cannot_be_asked_is_left_for_another(tmp_path: Path, url: str) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    with serving(tmp_path / "blobs") as good:
        await download(tmp_path / "worker", [blob], url, good.url)
    assert good.num_asked == 1


@pytest.mark.parametrize("says_its_length", [True, False])
async def test_a_blob_cut_short_at_one_source_comes_from_another(tmp_path: Path, says_its_length: bool) -> None:
    """Its disk ran full while it copied, say; the beginning is good, but nobody knows that before the end is there."""
    (blob,) = store_blobs(tmp_path / "blobs", LARGE)

    def short(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        half = content[: len(content) // 2]
        return whole(half, start) if says_its_length else (200, {"Connection": "close"}, half)

    with serving(tmp_path / "blobs", short) as bad, serving(tmp_path / "blobs") as good:
        await download(tmp_path / "worker", [blob], bad.url, good.url)
        assert (tmp_path / "worker" / blob.digest).read_bytes() == LARGE


async def test_sources_are_asked_in_order_and_a_failed_one_after_a_pause(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", *(bytes([n]) for n in range(4)))
    now_s = 0.0

    def fails_first(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        return (503, {"Content-Length": "0"}, b"") if server.num_asked == 1 else None

    with (
        serving(tmp_path / "blobs", fails_first) as relay,
        serving(tmp_path / "blobs") as mirror,
        serving(tmp_path / "blobs") as home,
    ):
        urls = (relay.url, mirror.url, home.url)
        async with open_downloads(tmp_path / "worker", *urls, clock=lambda: now_s) as downloads:
            asked = []
            for blob, at_s in zip(blobs, (0.0, 299.0, 301.0, 302.0), strict=True):
                now_s = at_s
                downloads.use(urls)
                await downloads.get([blob])
                asked.append((relay.num_asked, mirror.num_asked, home.num_asked))
            assert asked == [(1, 1, 0), (1, 2, 0), (2, 2, 0), (3, 2, 0)]


async def test_a_store_that_answers_403_is_asked_for_the_next_blob(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", b"one", b"two")

    def lacks_one(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        return (403, {"Content-Length": "0"}, b"") if content == b"one" else None

    with serving(tmp_path / "blobs", lacks_one) as store, serving(tmp_path / "blobs") as home:
        async with open_downloads(tmp_path / "worker", store.url, home.url) as downloads:
            for blob in blobs:
                await downloads.get([blob])
    assert (store.num_asked, home.num_asked) == (2, 1)


@pytest.mark.parametrize(
    ("relay_says", "home_says", "is_gone"), [(403, 404, True), (404, 403, False), (503, 404, True)]
)
async def test_a_blob_is_gone_if_its_home_says(tmp_path: Path, relay_says: int, home_says: int, is_gone: bool) -> None:
    """A bucket that may be read by names alone answers 403 for a name that it does not have."""
    rounds = 5
    with serving(tmp_path, answering(relay_says)) as relay, serving(tmp_path, answering(home_says)) as home:
        async with open_downloads(tmp_path / "worker", relay.url, home.url) as downloads:
            missing = asyncio.create_task(downloads.manifest("0" * 64))
            while not missing.done() and home.num_asked < rounds:
                await asyncio.sleep(0.001)
            assert missing.done() is is_gone
            if is_gone:
                with pytest.raises(BlobMissing, match="no source has blob"):
                    await missing
            missing.cancel()
    assert home.num_asked == (3 if is_gone else rounds)


async def test_workers_that_begin_together_ask_for_different_blobs(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", *(bytes([n]) for n in range(30)))
    with serving(tmp_path / "blobs") as server:
        for seed in (1, 2, 1):
            options: dict[str, Any] = {"random": random.Random(seed), "max_parallel": 1}
            await download(tmp_path / f"worker{server.num_asked}", blobs, server.url, **options)
    first, second, third = (server.asked[30 * n : 30 * (n + 1)] for n in range(3))
    assert first == third and {*first} == {*second} and first[:4] != second[:4]


async def test_a_source_that_fails_is_named_once_until_it_has_worked_again(tmp_path: Path) -> None:
    blobs = store_blobs(tmp_path / "blobs", *(bytes([i]) * 10 for i in range(8)))
    said: list[str] = []
    with serving(tmp_path / "blobs") as relay, serving(tmp_path / "blobs") as home:
        async with open_downloads(tmp_path / "worker", relay.url, home.url, say=said.append) as downloads:
            for fault in (answering(503), None, answering(503)):
                relay.fault = fault
                downloads._away_until_s.clear()
                for blob in (blobs.pop(), blobs.pop()):
                    await downloads.get([blob])
    assert said == 2 * [said[0]] and said[0].startswith(f"weights cannot be fetched from {relay.url}, so the next")


async def test_a_cache_that_lacks_a_blob_is_not_said_to_fail(tmp_path: Path) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    (tmp_path / "empty").mkdir()
    said: list[str] = []
    with serving(tmp_path / "empty") as cache, serving(tmp_path / "blobs") as home:
        await download(tmp_path / "worker", [blob], cache.url, home.url, say=said.append)
    assert cache.num_asked == 1 and not said


async def test_a_silent_relay_is_waited_for_once_and_then_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.swarm.publication.download._STALL_S", 0.2)
    blobs = store_blobs(tmp_path / "blobs", b"one", b"two", b"three")
    num_asked, said = 0, list[str]()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        await reader.read()
        writer.close()

    with serving(tmp_path / "blobs") as home:
        options: dict[str, Any] = {"max_parallel": 1, "say": said.append}
        async with listening(nothing) as port:
            relay = f"http://127.0.0.1:{port}"
            await download(tmp_path / "worker", blobs, relay, home.url, **options)
            assert said == [f"weights cannot be fetched from {relay}, so the next source is asked: ReadTimeout"]
    assert (num_asked, home.num_asked) == (1, 3)


MIB = 2**20


@pytest.mark.parametrize(
    ("bytes_per_s", "num_bytes", "is_left"),
    [(2**17, 6 * MIB, True), (2**18 + 2**10, 6 * MIB, False), (2**10, 5 * MIB, True), (2**17, MIB, False)],
    ids=["half the lowest rate", "just above the lowest rate", "a trickle", "too little to measure"],
)
async def test_a_relay_that_is_slow_is_left(tmp_path: Path, bytes_per_s: float, num_bytes: int, is_left: bool) -> None:
    """By a clock on which each byte takes as long as the rate says; what has come is not fetched again."""
    (blob,) = store_blobs(tmp_path / "blobs", LARGE[:num_bytes])
    said: list[str] = []
    downloads: Any = SimpleNamespace(wire_bytes=0)
    with serving(tmp_path / "blobs") as relay, serving(tmp_path / "blobs") as home:
        options: dict[str, Any] = {"say": said.append, "clock": lambda: downloads.wire_bytes / bytes_per_s}
        async with open_downloads(tmp_path / "worker", relay.url, home.url, **options) as opened:
            downloads = opened
            await downloads.get([blob])
    line = (
        f"weights cannot be fetched from {relay.url}, so the next source is asked: it gives less than 262,144 bytes/s"
    )
    assert said == ([line] if is_left else [])
    assert [0 < start < num_bytes for _, start in home.asked] == ([True] if is_left else [])


async def test_a_slow_trainer_is_not_left_for_anything(tmp_path: Path) -> None:
    (blob,) = store_blobs(tmp_path / "blobs", LARGE)
    (tmp_path / "empty").mkdir()
    downloads: Any = SimpleNamespace(wire_bytes=0)
    with serving(tmp_path / "empty") as relay, serving(tmp_path / "blobs") as home:
        async with open_downloads(tmp_path / "w", relay.url, home.url, clock=lambda: downloads.wire_bytes) as opened:
            downloads = opened
            await downloads.get([blob])
    assert (relay.num_asked, home.num_asked) == (1, 1)
