"""A real nginx between trainer and workers: whatever happens to it, workers have the blobs, and each only once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.manifest import BlobRef
from tests.swarm.nginx_kit import Nginx, needs_nginx, relay
from tests.swarm.weights_kit import BlobServer, serving

pytestmark = needs_nginx

MB = 2**20
CONTENTS = [random.Random(seed).randbytes(3 * MB + 1000 * (seed + 1)) for seed in range(4)]
DEADLINE_S = 60.0


def store(folder: Path, *contents: bytes) -> list[BlobRef]:
    blobs = BlobFolder(folder)
    return [BlobRef(digest=blobs.put(c), num_bytes=len(c), raw_bytes=len(c)) for c in contents]


@pytest.fixture
def blobs(tmp_path: Path) -> list[BlobRef]:
    return store(tmp_path / "home", *CONTENTS)


def run(law: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await law()

    asyncio.run(main())


def home_of(server: BlobServer) -> str:
    return server.url.replace("/blobs", "/v1/blobs")


@asynccontextmanager
async def worker(folder: Path, *urls: str, **options: Any) -> AsyncIterator[BlobDownloads]:
    downloads = BlobDownloads(BlobFolder(folder), **{"backoff_s": 0.01, **options})
    downloads.use(urls)
    try:
        yield downloads
    finally:
        await downloads.close()


def success(downloads: BlobDownloads, url: str) -> float:
    return downloads.sources.estimate(url).success


def assert_whole(folder: Path, blobs: list[BlobRef]) -> None:
    found = BlobFolder(folder)
    for blob, content in zip(blobs, CONTENTS, strict=False):
        assert found.read(blob.digest) == content


def flip_a_bit(nginx: Nginx, inside: bytes) -> None:
    """In the file of the cache that holds ``inside``."""
    for path in nginx.cached():
        content = path.read_bytes()
        if (place := content.find(inside)) >= 0:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            return
    raise AssertionError("the relay does not keep it")


def test_workers_that_come_together_or_later_cost_the_trainer_each_byte_once(
    tmp_path: Path, blobs: list[BlobRef]
) -> None:
    async def fetch(name: str) -> None:
        async with worker(tmp_path / name, between.url) as downloads:
            await downloads.get(blobs)
        assert_whole(tmp_path / name, blobs)

    async def law() -> None:
        await asyncio.gather(*(fetch(name) for name in "abc"))
        await fetch("late")

    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        run(law)
        assert {*Counter(home.asked).values()} == {1}
        assert {start for _, start in home.asked} == {0, MB, 2 * MB, 3 * MB}


def test_whoever_knows_a_name_cannot_have_the_relay_fetch_it_from_the_trainer_again_and_again(
    tmp_path: Path, blobs: list[BlobRef]
) -> None:
    async def law() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            url, headers = f"{between.url}/{blobs[0].digest}", {"Range": "bytes=0-9"}
            past = [await http.get(url, headers={**headers, "Cache-Control": "no-cache"}) for _ in range(60)]
            answers = Counter(answer.status_code for answer in past)
            assert answers.keys() == {206, 429} and 33 <= answers[206] <= 36, "the burst, and what time allows"
            assert len(home.asked) == answers[206]
            kept = [await http.get(url, headers=headers) for _ in range(60)]
            assert {answer.content for answer in kept} == {CONTENTS[0][:10]} and len(home.asked) == answers[206]

    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        run(law)


def test_a_range_brings_its_own_pieces_alone(tmp_path: Path, blobs: list[BlobRef]) -> None:
    async def law() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            url = f"{between.url}/{blobs[0].digest}"
            part = await http.get(url, headers={"Range": f"bytes={MB + 5}-{2 * MB + 4}"})
            assert (part.status_code, part.content) == (206, CONTENTS[0][MB + 5 : 2 * MB + 5])
            assert part.headers["Content-Range"] == f"bytes {MB + 5}-{2 * MB + 4}/{len(CONTENTS[0])}"
            tail = await http.get(url, headers={"Range": f"bytes={3 * MB}-"})
            assert tail.status_code == 206 and tail.content == CONTENTS[0][3 * MB :]
            beyond = await http.get(url, headers={"Range": f"bytes={9 * MB}-"})
            assert beyond.status_code == 416
            for name in ("../swarm/publisher.key", "0" * 63, blobs[0].digest.upper(), ""):
                assert (await http.get(f"{between.url}/{name}")).status_code == 404
            assert (await http.post(url)).status_code == 403

    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        run(law)
        assert sorted(start for _, start in home.asked if 0 < start < 4 * MB) == [MB, 2 * MB, 3 * MB]


def test_a_relay_that_is_killed_in_the_middle_is_left_and_used_again_when_it_is_back(
    tmp_path: Path, blobs: list[BlobRef]
) -> None:
    arrived, killed = threading.Event(), threading.Event()

    def stops(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if digest != blobs[0].digest or start < MB or killed.is_set():
            return None
        part = content[start : start + MB]
        headers = {"Content-Length": str(len(part)), "Content-Range": f"bytes {start}-{start + MB - 1}/{len(content)}"}
        arrived.set()
        return 206, headers, [part[:1000], lambda: killed.wait(DEADLINE_S), part[1000:]]

    async def law() -> None:
        async with worker(tmp_path / "a", between.url, home.url) as downloads:
            fetching = asyncio.create_task(downloads.get(blobs[:1]))
            partial = tmp_path / "a" / f".partial-{blobs[0].digest}"
            await asyncio.to_thread(arrived.wait, DEADLINE_S)
            while not partial.exists() or partial.stat().st_size < MB:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(between.kill)
            killed.set()
            await fetching
            assert success(downloads, between.url) < 0.51
            await asyncio.to_thread(between.start)
            await downloads.get(blobs)
            assert_whole(tmp_path / "a", blobs)
        async with worker(tmp_path / "b", between.url) as downloads:
            await downloads.get(blobs)
        assert_whole(tmp_path / "b", blobs)

    with serving(tmp_path / "home", stops) as trainer, serving(tmp_path / "home") as home:
        with relay(tmp_path / "relay", home_of(trainer)) as between:
            run(law)
        assert home.asked[0][1] >= MB, "it went on where the relay had stopped"


def test_a_relay_that_hangs_is_left_at_the_deadline_of_a_read(
    tmp_path: Path, blobs: list[BlobRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollover.swarm.publication.download._STALL_S", 0.5)

    async def law() -> None:
        async with worker(tmp_path / "a", between.url, home.url) as downloads:
            between.kill(signal.SIGSTOP)
            await downloads.get(blobs)
            assert success(downloads, between.url) < 0.51
        assert_whole(tmp_path / "a", blobs)

    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        run(law)


def test_a_flipped_bit_in_the_cache_is_found_out_and_mended(tmp_path: Path, blobs: list[BlobRef]) -> None:
    async def fetch(name: str) -> float:
        async with worker(tmp_path / name, between.url) as downloads:
            await downloads.get(blobs)
            assert_whole(tmp_path / name, blobs)
            return success(downloads, between.url)

    async def law() -> None:
        assert await fetch("first") == 1
        flip_a_bit(between, CONTENTS[0][MB + 7 : MB + 39])
        assert await fetch("second") < 0.51
        assert await fetch("third") == 1

    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        run(law)


def test_a_cache_that_is_cut_short_costs_the_rest_from_elsewhere(
    tmp_path: Path, blobs: list[BlobRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollover.swarm.publication.download._STALL_S", 1.0)  # nginx waits for the rest of its file

    async def law() -> None:
        async with worker(tmp_path / "first", between.url) as downloads:
            await downloads.get(blobs)
        for path in between.cached():
            os.truncate(path, path.stat().st_size - min(500_000, path.stat().st_size // 2))
        async with worker(tmp_path / "second", between.url, home.url) as downloads:
            await downloads.get(blobs)
            assert success(downloads, between.url) < 0.51
        assert_whole(tmp_path / "second", blobs)

    with (
        serving(tmp_path / "home") as trainer,
        serving(tmp_path / "home") as home,
        relay(tmp_path / "relay", home_of(trainer)) as between,
    ):
        run(law)


def test_what_is_not_there_yet_is_asked_for_again(tmp_path: Path) -> None:
    """The relay was asked too early, by a worker that heard of the new head before the blob had come."""
    (blob,) = store(tmp_path / "elsewhere", CONTENTS[0])
    (tmp_path / "home").mkdir()

    async def law() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{between.url}/{blob.digest}")).status_code == 404
        store(tmp_path / "home", CONTENTS[0])
        async with worker(tmp_path / "a", between.url) as downloads:
            await downloads.get([blob])
            assert success(downloads, between.url) == 1

    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        run(law)


def test_a_relay_without_a_blob_is_passed_over(tmp_path: Path, blobs: list[BlobRef]) -> None:
    """It stands in front of a trainer that is another run's, or has lost its disk."""
    (tmp_path / "empty").mkdir()

    async def law() -> None:
        async with worker(tmp_path / "a", between.url, home.url) as downloads:
            await downloads.get(blobs)
            assert success(downloads, between.url) < 0.51
            assert downloads.sources.best() == home.url
        assert_whole(tmp_path / "a", blobs)

    with (
        serving(tmp_path / "empty") as other,
        serving(tmp_path / "home") as home,
        relay(tmp_path / "relay", home_of(other)) as between,
    ):
        run(law)


def test_a_relay_at_a_hundredth_of_the_speed_is_left(tmp_path: Path) -> None:
    """Its speed shows while the first blob comes; what the trainer gives is known from a short try before."""
    blobs = store(tmp_path / "home", *(content * 2 for content in CONTENTS))

    async def law() -> None:
        options = {"patience_s": 0.3, "max_parallel": 1}
        async with worker(tmp_path / "a", between.url, home.url, **options) as downloads:
            start_s = time.monotonic()
            await downloads.get(blobs)
            assert time.monotonic() - start_s < DEADLINE_S / 2, "at the relay's speed it would take two minutes"
            assert downloads.sources.best() == home.url
        for blob in blobs:
            BlobFolder(tmp_path / "a").read(blob.digest)

    with (
        serving(tmp_path / "home") as home,
        relay(tmp_path / "relay", home_of(home), more="limit_rate 200k;") as between,
    ):
        run(law)


def test_what_a_relay_has_it_gives_while_the_trainer_is_away(tmp_path: Path, blobs: list[BlobRef]) -> None:
    async def fetch(name: str, wanted: list[BlobRef]) -> None:
        async with worker(tmp_path / name, between.url) as downloads:
            await downloads.get(wanted)
        assert_whole(tmp_path / name, wanted)

    with serving(tmp_path / "home") as home:
        folder, trainer = tmp_path / "relay", home_of(home)
        with relay(folder, trainer) as between:
            run(lambda: fetch("a", blobs))
    with relay(folder, trainer) as between:  # a relay that was restarted still has its cache
        run(lambda: fetch("b", blobs))

        async def law() -> None:
            async with httpx.AsyncClient(trust_env=False) as http:
                assert (await http.get(f"{between.url}/{'0' * 64}")).status_code == 502

        run(law)


@pytest.mark.parametrize("token", [None, "rw1.relay.secret"])
def test_a_relay_shows_the_trainer_its_own_token_or_the_workers(
    tmp_path: Path, blobs: list[BlobRef], token: str | None
) -> None:
    def wants_token(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if server.authorized[-1] != f"Bearer {token or 'rw1.worker.secret'}":
            return 401, {"Content-Length": "0"}, b""
        return None

    async def law() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            nobody = await http.get(f"{between.url}/{blobs[0].digest}")
            assert nobody.status_code == (401 if token is None else 200)
        headers = {between.url: "Bearer rw1.worker.secret"}
        async with worker(tmp_path / "a", between.url, authorization=headers) as downloads:
            await downloads.get(blobs)
        assert_whole(tmp_path / "a", blobs)

    with (
        serving(tmp_path / "home", wants_token) as home,
        relay(tmp_path / "relay", home_of(home), token=token) as between,
    ):
        run(law)
    text = (tmp_path / "relay" / "nginx.conf").read_text()
    assert ("rw1.relay.secret" in text) is (token is not None)
    assert (tmp_path / "relay" / "nginx.conf").stat().st_mode & 0o777 == 0o600
