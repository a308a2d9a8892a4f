"""Sessions and blobs go by the same proxy, which the environment names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollover.engine.servers.start.launch import free_port
from rollover.errors import ConfigError
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.manifest import BlobRef
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import PROTOCOL, Hello
from rollover.swarm.wire.proxies import proxy_for, shown_proxy
from rollover.swarm.worker.connection import Disconnected, open_connection, tls_context
from tests.speed import within
from tests.swarm.certificates import make_certificate
from tests.swarm.http_kit import greeting
from tests.swarm.worker_kit import TOKEN

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "WS_PROXY", "WSS_PROXY", "SOCKS_PROXY")
TRAINER = "trainer.invalid"
"""A host that the proxy alone knows."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


class Proxy:
    """Tunnels, and passes requests on, to this machine's port, whatever host they are for. As every proxy it leaves the
    host out of the address that it asks for: the server may not know it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.asked: list[str] = []
        """The first line of each connection."""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as group:
            server = await asyncio.start_server(
                lambda reader, writer: group.create_task(self._serve(reader, writer)) and None, "127.0.0.1", 0
            )
            async with server:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        line = asked.partition(b"\r\n")[0].decode()
        self.asked.append(line)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        if line.startswith("CONNECT "):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            method, url, protocol = line.split(" ")
            rest = asked.partition(b"\r\n")[2]
            back.write(f"{method} {urlsplit(url).path} {protocol}\r\n".encode() + rest)
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(2**16):
            writer.write(part)
            await writer.drain()
    finally:
        writer.close()


@pytest.mark.parametrize("scheme", ["ws", "wss"])
async def test_workers_join_and_fetch_by_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    certificate, key = make_certificate(tmp_path, TRAINER)
    blobs = BlobFolder(tmp_path / "blobs")
    blob = BlobRef(digest=blobs.put(b"weights"), num_bytes=7, raw_bytes=7)
    files = (certificate, key) if scheme == "wss" else None
    tls = tls_context(Path(certificate)) if scheme == "wss" else None
    async with (
        asyncio.timeout(within(30)),
        greeting(tmp_path / "blobs", lambda header: "laptop", files) as gateway,
        (proxy := Proxy(port := int(gateway.url.rpartition(":")[2]))).listening() as url,
    ):
        monkeypatch.setenv("HTTPS_PROXY" if scheme == "wss" else "HTTP_PROXY", url)
        address = CoordinatorAddress.parse(f"{scheme}://{TRAINER}:{port}", insecure=True)
        async with open_connection(address, TOKEN, tls, timeout_s=10.0) as connection:
            await connection.send(Hello(protocols=(PROTOCOL,), software="test"))
            with pytest.raises(Disconnected, match="hello laptop"):
                await connection.receive()
        downloads = BlobDownloads(BlobFolder(tmp_path / "cache"), verify=tls or True)
        downloads.use([address.blob_url])
        await downloads.get([blob])
        await downloads.close()
    tunnel = f"CONNECT {TRAINER}:{port} HTTP/1.1"
    plain = f"GET http://{TRAINER}:{port}/v1/blobs/{blob.digest} HTTP/1.1"
    assert proxy.asked == [tunnel, tunnel if scheme == "wss" else plain]
    assert (tmp_path / "cache" / blob.digest).read_bytes() == b"weights"


@pytest.mark.real_time
async def test_a_proxy_that_is_not_there_is_named_without_its_login(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("HTTPS_PROXY", f"http://anna:hunter2@127.0.0.1:{port}")
    address = CoordinatorAddress.parse(f"wss://{TRAINER}:8790")
    with pytest.raises(Disconnected) as caught:
        async with open_connection(address, TOKEN, tls_context(None), timeout_s=10.0):
            pass
    said, proxy = str(caught.value), f"http://127.0.0.1:{port}"
    assert f"wss://{TRAINER}:8790, through the proxy {proxy}, cannot be reached: nothing listens" in said
    assert "hunter2" not in said and "anna" not in said


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "wss://a.example:8790", None),
        ({"HTTPS_PROXY": "http://p:3128"}, "wss://a.example:8790", "http://p:3128"),
        ({"HTTPS_PROXY": "http://p:3128"}, "https://a.example/blobs", "http://p:3128"),
        ({"HTTPS_PROXY": "http://p:3128"}, "ws://a.example:8790", None),
        ({"http_proxy": "p:3128"}, "ws://a.example:8790", "http://p:3128"),
        ({"ALL_PROXY": "http://p:3128"}, "ws://a.example:8790", "http://p:3128"),
        ({"ALL_PROXY": "http://p:1", "HTTPS_PROXY": "http://p:2"}, "wss://a.example", "http://p:2"),
        ({"ALL_PROXY": "http://p:3128", "NO_PROXY": "b.example,.example"}, "wss://a.example:8790", None),
        ({"ALL_PROXY": "http://p:3128", "NO_PROXY": "b.example"}, "wss://a.example:8790", "http://p:3128"),
        ({"ALL_PROXY": "http://p:3128"}, "ws://127.0.0.1:8790", None),
        ({"ALL_PROXY": "http://p:3128"}, "ws://[::1]:8790", None),
        ({"ALL_PROXY": "http://anna:secret@p:3128/"}, "wss://a.example", "http://anna:secret@p:3128/"),
    ],
)
def test_the_environment_names_the_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, proxy: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ftp://p:3128", "HTTPS_PROXY = 'ftp://p:3128' is not a proxy: it must look like 'http://proxy.example:3128'"),
        ("http://anna:hunter2@p:1/path", "HTTPS_PROXY = 'http://p:1/path' is not a proxy"),
        ("http://anna@p:3128", "HTTPS_PROXY = 'http://p:3128' has a user without a password"),
        ("http://p:99999", "HTTPS_PROXY does not name a proxy"),
    ],
)
def test_a_wrong_proxy_is_refused_with_its_variable(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    with pytest.raises(ConfigError) as caught:
        proxy_for("wss://a.example:8790")
    assert message in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_proxy_over_socks_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5h://p:1080")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"SOCKS needs more packages: pip install 'python-socks\[asyncio\]' socksio"):
        proxy_for("wss://a.example:8790")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert proxy_for("wss://a.example:8790") == "socks5h://p:1080"


def test_a_login_is_not_shown() -> None:
    assert shown_proxy("http://anna:hunter2@p:3128") == "http://p:3128"
