"""The nginx.conf that docs/how-to/ shows, in a real nginx: the trainer sends each blob once, and workers get it whole."""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.manifest import BlobRef
from rollover.swarm.wire.messages import PROTOCOL, SUBPROTOCOL, Goodbye, Hello, decode_down, encode
from tests.speed import within
from tests.swarm.certificates import make_certificate
from tests.swarm.http_kit import greeting
from tests.swarm.nginx_kit import Nginx, needs_nginx, relay
from tests.swarm.weights_kit import BlobServer, download, open_downloads, serving, store_blobs, whole

pytestmark = needs_nginx

MB = 2**20
CONTENTS = [random.Random(seed).randbytes(3 * MB + 1000 * (seed + 1)) for seed in range(4)]
DEADLINE_S = within(60.0)


@pytest.fixture
def blobs(tmp_path: Path) -> list[BlobRef]:
    return store_blobs(tmp_path / "home", *CONTENTS)


def home_of(server: BlobServer) -> str:
    return server.url.replace("/blobs", "/v1/blobs")


async def fetch(folder: Path, blobs: list[BlobRef], *urls: str, **options: Any) -> list[str]:
    """Have a worker fetch blobs, which come whole. Returns what it says."""
    said: list[str] = []
    await download(folder, blobs, *urls, say=said.append, **options)
    assert_whole(folder, blobs)
    return said


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


async def test_any_number_of_workers_cost_the_trainer_each_byte_once(tmp_path: Path, blobs: list[BlobRef]) -> None:
    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        await asyncio.gather(*(fetch(tmp_path / name, blobs, between.url) for name in "abc"))
        await fetch(tmp_path / "late", blobs, between.url)
        assert {*Counter(home.asked).values()} == {1}
        assert {start for _, start in home.asked} == {0, 2 * MB}


async def test_nobody_can_have_the_relay_fetch_a_blob_again_and_again(tmp_path: Path, blobs: list[BlobRef]) -> None:
    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        async with httpx.AsyncClient(trust_env=False) as http:
            url, headers = f"{between.url}/{blobs[0].digest}", {"Range": "bytes=0-9"}
            past = [await http.get(url, headers={**headers, "Cache-Control": "no-cache"}) for _ in range(60)]
            answers = Counter(answer.status_code for answer in past)
            assert answers.keys() == {206, 429} and 33 <= answers[206] <= 36, "the burst, and what time allows"
            assert len(home.asked) == answers[206]
            kept = [await http.get(url, headers=headers) for _ in range(60)]
            assert {answer.content for answer in kept} == {CONTENTS[0][:10]} and len(home.asked) == answers[206]


async def test_a_range_brings_its_own_pieces_alone(tmp_path: Path, blobs: list[BlobRef]) -> None:
    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        async with httpx.AsyncClient(trust_env=False) as http:
            url = f"{between.url}/{blobs[0].digest}"
            part = await http.get(url, headers={"Range": f"bytes={2 * MB + 5}-{3 * MB + 4}"})
            assert (part.status_code, part.content) == (206, CONTENTS[0][2 * MB + 5 : 3 * MB + 5])
            assert part.headers["Content-Range"] == f"bytes {2 * MB + 5}-{3 * MB + 4}/{len(CONTENTS[0])}"
            tail = await http.get(url, headers={"Range": f"bytes={3 * MB}-"})
            assert tail.status_code == 206 and tail.content == CONTENTS[0][3 * MB :]
            beyond = await http.get(url, headers={"Range": f"bytes={9 * MB}-"})
            assert beyond.status_code == 416
            for name in ("../swarm/publisher.key", "0" * 63, blobs[0].digest.upper(), ""):
                assert (await http.get(f"{between.url}/{name}")).status_code == 404
            assert (await http.post(url)).status_code == 403
        assert [start for _, start in home.asked if start < 4 * MB] == [2 * MB]


async def test_a_killed_relay_is_left_and_used_again_when_it_is_back(tmp_path: Path, blobs: list[BlobRef]) -> None:
    arrived, killed = threading.Event(), threading.Event()

    def stops(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if digest != blobs[0].digest or start < 2 * MB or killed.is_set():
            return None
        status, headers, part = whole(content, start)
        arrived.set()
        return status, headers, [part[:1000], lambda: killed.wait(DEADLINE_S), part[1000:]]

    with serving(tmp_path / "home", stops) as trainer, serving(tmp_path / "home") as home:
        with relay(tmp_path / "relay", home_of(trainer)) as between:
            async with open_downloads(tmp_path / "a", between.url, home.url) as downloads:
                fetching = asyncio.create_task(downloads.get(blobs[:1]))
                partial = tmp_path / "a" / f".partial-{blobs[0].digest}"
                await asyncio.to_thread(arrived.wait, DEADLINE_S)
                while not partial.exists() or partial.stat().st_size < 2 * MB:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(between.kill)
                killed.set()
                await fetching
                await asyncio.to_thread(between.start)
                downloads._away_until_s.clear()
                await downloads.get(blobs)
                assert_whole(tmp_path / "a", blobs)
            await fetch(tmp_path / "b", blobs, between.url)
        assert home.asked[0][1] >= 2 * MB, "it went on where the relay had stopped"


async def test_a_flipped_bit_in_the_cache_is_found_out_and_mended(tmp_path: Path, blobs: list[BlobRef]) -> None:
    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        assert not await fetch(tmp_path / "first", blobs, between.url)
        flip_a_bit(between, CONTENTS[0][MB + 7 : MB + 39])
        (line,) = await fetch(tmp_path / "second", blobs, between.url)
        assert "has sent a damaged blob" in line
        assert not await fetch(tmp_path / "third", blobs, between.url)


async def test_what_is_not_there_yet_is_asked_for_again(tmp_path: Path) -> None:
    """The relay was asked too early, by a worker that heard of the new head before the blob had come."""
    (blob,) = store_blobs(tmp_path / "elsewhere", CONTENTS[0])
    (tmp_path / "home").mkdir()
    with serving(tmp_path / "home") as home, relay(tmp_path / "relay", home_of(home)) as between:
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{between.url}/{blob.digest}")).status_code == 404
        store_blobs(tmp_path / "home", CONTENTS[0])
        await download(tmp_path / "a", [blob], between.url)


async def test_what_a_relay_has_it_gives_while_the_trainer_is_away(tmp_path: Path, blobs: list[BlobRef]) -> None:
    with serving(tmp_path / "home") as home:
        folder, trainer = tmp_path / "relay", home_of(home)
        with relay(folder, trainer) as between:
            await fetch(tmp_path / "a", blobs, between.url)
    with relay(folder, trainer) as between:  # a relay that was restarted still has its cache
        await fetch(tmp_path / "b", blobs, between.url)
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{between.url}/{'0' * 64}")).status_code == 502


@pytest.mark.parametrize("token", [None, "rw1.relay.secret"])
async def test_a_relay_shows_its_token_or_the_workers(tmp_path: Path, blobs: list[BlobRef], token: str | None) -> None:
    def wants_token(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if server.authorized[-1] != f"Bearer {token or 'rw1.worker.secret'}":
            return 401, {"Content-Length": "0"}, b""
        return None

    with (
        serving(tmp_path / "home", wants_token) as home,
        relay(tmp_path / "relay", home_of(home), token=token or "") as between,
    ):
        async with httpx.AsyncClient(trust_env=False) as http:
            nobody = await http.get(f"{between.url}/{blobs[0].digest}")
            assert nobody.status_code == (401 if token is None else 200)
        headers = {between.url: "Bearer rw1.worker.secret"}
        await fetch(tmp_path / "a", blobs, between.url, authorization=headers)


async def test_sessions_and_blobs_pass_a_relay_with_tls_on_both_sides(tmp_path: Path, blobs: list[BlobRef]) -> None:
    """A trainer whose certificate the relay does not trust gets no token."""
    folder = tmp_path / "relay"
    folder.mkdir()
    make_certificate(folder, "127.0.0.1", name="relay")
    trainers = make_certificate(folder, "trainer.example", name="trainer-ca")
    (tmp_path / "impostor").mkdir()
    impostors = make_certificate(tmp_path / "impostor", "trainer.example", name="trainer")
    trusted = ssl.create_default_context(cafile=folder / "relay.pem")
    mine, member_of = {"Authorization": "Bearer rw1.a"}, {"Bearer rw1.a": "a"}.get
    async with greeting(tmp_path / "home", member_of, trainers) as gateway:
        with relay(folder, gateway.url.replace("wss", "https")) as between:
            async with httpx.AsyncClient(verify=trusted, trust_env=False) as http:
                url = f"{between.url}/{blobs[0].digest}"
                assert (await http.get(url)).status_code == 401
                found = await http.get(url, headers=mine)
                assert (found.status_code, found.content) == (200, CONTENTS[0]), between.said()
            settings: dict[str, Any] = {"ssl": trusted, "subprotocols": [SUBPROTOCOL], "proxy": None}
            address = f"wss://127.0.0.1:{between.port}/v1/session"
            async with websockets.connect(address, additional_headers=mine, **settings) as socket:
                await socket.send(encode(0, Hello(protocols=(PROTOCOL,), software="test")))
                assert decode_down(await socket.recv()).message == Goodbye(reason="hello a", is_final=False)
    async with greeting(tmp_path / "home", member_of, impostors) as gateway:
        with relay(folder, gateway.url.replace("wss", "https")) as between:
            async with httpx.AsyncClient(verify=trusted, trust_env=False) as http:
                answer = await http.get(f"{between.url}/{blobs[1].digest}", headers=mine)
            assert answer.status_code == 502 and "certificate verify" in between.said()
