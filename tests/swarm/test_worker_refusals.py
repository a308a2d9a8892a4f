"""What a worker's user gets wrong about an address, a certificate or a token is one message with the remedy."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.servers.start.launch import free_port
from rollover.errors import ConfigError
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker.connection import Disconnected, Refused, open_connection, tls_context
from tests.swarm.certificates import make_certificate
from tests.swarm.http_kit import listening
from tests.swarm.worker_kit import TOKEN

DAY = timedelta(days=1)


async def unauthorized(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(4096)
    writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 10\r\nConnection: close\r\n\r\nnot yours\n")
    await writer.drain()
    writer.close()


def serving(folder: Path, *hosts: str, **options: Any) -> tuple[ssl.SSLContext, Path]:
    """TLS settings of a server, and the certificate to trust."""
    now = datetime.now(UTC)
    certificate, key = make_certificate(folder, *hosts, **{"starts": now - DAY, "ends": now + DAY, **options})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, Path(certificate)


async def failure(kind: type[Exception], url: str, ca_file: Path | None = None) -> str:
    """Return what a worker says that dials a server for the first time."""
    with pytest.raises(kind) as caught:
        async with open_connection(CoordinatorAddress.parse(url), TOKEN, tls_context(ca_file), timeout_s=10.0):
            pass
    return str(caught.value)


async def refusal(context: ssl.SSLContext | None, url: str, ca_file: Path | None = None) -> str:
    """Return what a worker says to a server with these TLS settings, on PORT of ``url``."""
    async with listening(unauthorized, context) as port:
        said = await failure(Refused, url.replace("PORT", str(port)), ca_file)
    assert "\n" not in said and TOKEN.secret not in said
    return said


async def test_a_certificate_of_an_unknown_authority_asks_for_its_file(tmp_path: Path) -> None:
    context, _ = serving(tmp_path, "127.0.0.1")
    said = await refusal(context, "wss://127.0.0.1:PORT")
    assert "not signed by an authority that this worker trusts (self-signed certificate): name the file" in said
    assert "--ca-file" in said


async def test_a_certificate_of_another_host_says_so(tmp_path: Path) -> None:
    context, certificate = serving(tmp_path, "trainer.example")
    said = await refusal(context, "wss://127.0.0.1:PORT", certificate)
    assert "its certificate is for another host (IP address mismatch, certificate is not valid for '127.0.0.1')" in said
    said = await refusal(context, "wss://localhost:PORT", certificate)
    assert "its certificate is for another host (Hostname mismatch" in said and "use a name or address" in said


async def test_a_certificate_of_the_past_or_the_future_says_what_the_clock_is(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    clock = f"this machine's clock says {now:%Y-%m-%d}"
    context, certificate = serving(tmp_path, "127.0.0.1", starts=now + DAY, ends=now + 2 * DAY)
    said = await refusal(context, "wss://127.0.0.1:PORT", certificate)
    assert "its certificate is not valid yet" in said and clock in said and "set the clock if it is wrong" in said
    context, certificate = serving(tmp_path, "127.0.0.1", starts=now - 3 * DAY, ends=now - 2 * DAY)
    said = await refusal(context, "wss://127.0.0.1:PORT", certificate)
    assert "its certificate has expired" in said and clock in said and "have it renewed" in said


async def test_a_plain_address_of_an_encrypted_port_hints_at_the_right_one(tmp_path: Path) -> None:
    context, _ = serving(tmp_path, "127.0.0.1")
    said = await refusal(context, "ws://127.0.0.1:PORT")
    assert "speaks TLS: join wss://127.0.0.1:" in said


async def test_an_encrypted_address_of_a_plain_port_hints_at_the_right_one() -> None:
    said = await refusal(None, "wss://127.0.0.1:PORT")
    assert "it does not speak TLS there" in said and "with ws://" in said


def test_a_file_of_authorities_without_a_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "authority.pem"
    file.write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match=r"authority\.pem: holds no readable certificates: it contains no cert"):
        tls_context(file)


async def test_a_refused_token_is_said_once() -> None:
    said = await refusal(None, "ws://127.0.0.1:PORT")
    assert "refuses the token of 'laptop' (HTTP 401): not yours" in said
    assert said.count("revoked") == 0, "what the coordinator says is not said again in other words"


async def test_who_cannot_be_reached_is_asked_again() -> None:
    """Time may mend these, so they are no refusals: the worker goes on trying."""
    nobody = await failure(Disconnected, f"ws://127.0.0.1:{free_port()}")
    assert "nothing listens there (connection refused); is the port right, and is the trainer running?" in nobody
    assert "its name cannot be resolved" in await failure(Disconnected, "wss://no-such-host.invalid:8790")


async def test_a_server_that_hangs_up_is_asked_again() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.close()

    async with listening(hang_up) as port:
        assert "did not open a connection" in await failure(Disconnected, f"ws://127.0.0.1:{port}")
        said = await failure(Disconnected, f"wss://127.0.0.1:{port}")
        assert said.endswith("reached: the connection ended at once")
