"""What ``rollover relay`` writes is what nginx runs, with TLS on both sides; what it cannot write, it says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from rollover.cli import main
from rollover.engine.servers.launch import free_port
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.transports.base import Connection
from rollover.swarm.coordinator.transports.gateway import Gateway
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.wire.messages import SUBPROTOCOL, FromWorker, Goodbye, Hello, decode_down, encode
from tests.swarm.certificates import make_certificate
from tests.swarm.nginx_kit import Nginx, needs_nginx, running

CONTENT = bytes(range(256)) * 10_000
DEADLINE_S = 60.0


class Greeter:
    """Answers each hello with the worker's name, and that is all."""

    def connected(self, name: str, hello: Hello, connection: Connection) -> int:
        connection.send(encode(7, Goodbye(reason=f"hello {name}", is_final=False)))
        return 7

    def received(self, lease: int, message: FromWorker) -> None: ...

    def fenced(self, message: FromWorker) -> None: ...

    def disconnected(self, lease: int) -> None: ...

    def refused(self, cause: str) -> None: ...


@asynccontextmanager
async def trainer(folder: Path, certificate: tuple[str, str]) -> AsyncIterator[Gateway]:
    config = SwarmConfig(listen="127.0.0.1:0", tls_certificate=certificate[0], tls_key=certificate[1])
    names = {"Bearer rw1.a": "a", "Bearer rw1.relay": "relay"}
    gateway = Gateway(config, Greeter(), member_of=lambda header: names.get(header or ""), blobs=folder)
    gateway.bind()
    await gateway.serve()
    try:
        yield gateway
    finally:
        await gateway.close()


@needs_nginx
def test_sessions_and_blobs_go_through_a_relay_with_tls_on_both_sides(tmp_path: Path) -> None:
    digest = BlobFolder(tmp_path / "blobs").put(CONTENT)
    ours, theirs = make_certificate(tmp_path, "localhost", name="relay"), make_certificate(tmp_path, "trainer.lan")
    trusted = ssl.create_default_context(cafile=ours[0])
    port = free_port()

    async def law() -> None:
        async with asyncio.timeout(DEADLINE_S), trainer(tmp_path / "blobs", theirs) as gateway:
            argv = ["--folder", str(tmp_path / "relay"), "--trainer-name", "trainer.lan", "--ca-file", theirs[0]]
            tls = ["--tls-certificate", ours[0], "--tls-key", ours[1]]
            assert main(["relay", "--join", gateway.url, "--listen", f"127.0.0.1:{port}", *argv, *tls]) == 0
            between = Nginx(tmp_path / "relay", port, f"https://localhost:{port}/v1/blobs")
            with running(between):
                async with httpx.AsyncClient(verify=trusted, trust_env=False) as http:
                    url = f"{between.url}/{digest}"
                    assert (await http.get(url)).status_code == 401
                    found = await http.get(url, headers={"Authorization": "Bearer rw1.a"})
                    assert (found.status_code, found.content) == (200, CONTENT), between.said()
                    assert (await http.get(f"{between.url}/{'0' * 64}")).status_code == 401
                settings: dict[str, Any] = {"ssl": trusted, "subprotocols": [SUBPROTOCOL], "proxy": None}
                settings["additional_headers"] = {"Authorization": "Bearer rw1.a"}
                async with websockets.connect(f"wss://localhost:{port}/v1/session", **settings) as socket:
                    assert socket.subprotocol == SUBPROTOCOL
                    await socket.send(encode(0, Hello(protocols=(1,), software="test")))
                    assert decode_down(await socket.recv()).message == Goodbye(reason="hello a", is_final=False)

    asyncio.run(law())


@needs_nginx
def test_a_trainer_whose_certificate_is_not_trusted_gets_no_token(tmp_path: Path) -> None:
    digest = BlobFolder(tmp_path / "blobs").put(CONTENT)
    theirs, other = make_certificate(tmp_path, "trainer.lan"), make_certificate(tmp_path, "trainer.lan", name="other")
    asked: list[str | None] = []

    async def law() -> None:
        async with asyncio.timeout(DEADLINE_S), trainer(tmp_path / "blobs", theirs) as gateway:
            gateway._member_of = lambda header: asked.append(header)
            for ca_file, name in ((other[0], "trainer.lan"), (theirs[0], "another.lan")):
                port = free_port()  # one each: the first server may still be ending when the second starts
                argv = ["--folder", str(tmp_path / "relay"), "--trainer-name", name, "--ca-file", ca_file]
                assert main(["relay", "--join", gateway.url, "--listen", f"127.0.0.1:{port}", *argv]) == 0
                between = Nginx(tmp_path / "relay", port, f"http://127.0.0.1:{port}/v1/blobs")
                with running(between):
                    async with httpx.AsyncClient(trust_env=False) as http:
                        answer = await http.get(f"{between.url}/{digest}", headers={"Authorization": "Bearer rw1.a"})
                    assert answer.status_code == 502 and "certificate" in between.said()

    asyncio.run(law())
    assert not asked


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["relay", *argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--join", "wss://t:1", "--listen", "0.0.0.0:8795"],
            "(--tls-certificate, --tls-key), or give --insecure",
        ),
        (["--join", "wss://t:1", "--listen", "8795"], "an address and a port are needed, such as 0.0.0.0:8795"),
        (
            ["--join", "wss://t:1", "--tls-key", "a.key"],
            "belong together: give both (--tls-certificate, --tls-key) or neither",
        ),
        (["--join", "wss://10.0.0.1:1"], "nginx checks names in certificates, not addresses: give --trainer-name NAME"),
        (["--join", "wss://[::1]:1"], "nginx checks names in certificates"),
        (["--join", "wss://t:1", "--trainer-name", "a;b"], "'a;b' is not a host name"),
        (["--join", "wss://t:1", "--ca-file", "none.pem"], "--ca-file none.pem: there is no such file"),
        (
            ["--join", "wss://t:1", "--ca-file", __file__],
            f"--ca-file {__file__}: holds no readable certificates (PEM): no certificate or crl found",
        ),
        (
            ["--join", "wss://t:1", "--tls-certificate", __file__, "--tls-key", __file__],
            f"--tls-key {__file__}: they are not a certificate (PEM) and its key, without a password: ",
        ),
        (["--join", "wss://t:1/a;b"], "cannot be written into an nginx configuration"),
        (["--join", "wss://t:1", "--max-cache-gb", "0"], "--max-cache-gb must be positive"),
        (["--join", "wss://t:1", "--max-cache-gb", "nan"], "must be positive and at most 1,000,000, got nan"),
        (["--join", "wss://t:1", "--max-cache-gb", "inf"], "must be positive and at most 1,000,000, got inf"),
        (["--join", "wss://t:1", "--max-cache-gb", "1e300"], "must be positive and at most 1,000,000, got 1e+300"),
        (["--join", "ws://127.0.0.1"], "ws://127.0.0.1: the port is missing"),
        (["--join", "ws://t:1"], "use wss://"),
        (["--join", "ws://127.0.0.1:1", "--folder", "a$b"], "cannot be written into an nginx configuration"),
    ],
)
def test_what_no_relay_can_be_made_of_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in said(capsys, *argv)
    assert not [*tmp_path.iterdir()]


def test_a_token_is_in_the_configuration_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    token = f"rw1.relay.{'s' * 43}.{'0' * 64}"
    Path("relay.token").write_text(token)
    Path("relay.token").chmod(0o600)
    assert main(["relay", "--join", "ws://127.0.0.1:8790", "--token-file", "relay.token"]) == 0
    shown = capsys.readouterr()
    assert token not in shown.out + shown.err and "'[\"http://127.0.0.1:8795/v1/blobs\"]'" in shown.out
    argv = ["--listen", "0.0.0.0:8795", "--insecure", "--token-file", "relay.token"]
    assert main(["relay", "--join", "ws://127.0.0.1:8790", *argv]) == 0
    assert "'[\"http://HOST:8795/v1/blobs\"]'" in capsys.readouterr().out
    config = Path("relay/nginx.conf")
    assert f'"Bearer {token}"' in config.read_text() and config.stat().st_mode & 0o777 == 0o600
