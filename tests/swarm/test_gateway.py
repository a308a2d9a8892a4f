"""Real sockets on loopback: a model worker speaks to the swarm engine through the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import websockets
from msgspec import structs
from uvicorn.server import ServerState

from rollover.clock import SystemClock
from rollover.engine import ports
from rollover.engine.base import Chunk
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator import gateway as gateway_module
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.gateway import Gateway
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_HELD_CALLS,
    MAX_SERVED,
    PROTOCOL,
    SUBPROTOCOL,
    Abort,
    CallFailed,
    FromWorker,
    Goodbye,
    Heartbeat,
    HeldCall,
    Hello,
    ProtocolError,
    Welcome,
    decode_down,
    encode,
)
from rollover.swarm.worker.connection import Refused, open_connection
from rollover.types import FinishReason
from tests.speed import within
from tests.swarm.certificates import make_certificate
from tests.swarm.kit import ModelWorker, coordinator, head, ready, request
from tests.swarm.test_coordinator import beat
from tests.swarm.worker_kit import TOKEN
from tests.virtual_time import run as in_virtual_time

DEADLINE_S = within(60.0)
CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
HELLO = Hello(protocols=(PROTOCOL,), software="a worker")
HELD = HeldCall(call_id="a#1.", sample_key="a.", start=0, end=1, is_running=True)
IDLE = beat()


@asynccontextmanager
async def swarm(folder: Path, **changes: Any) -> AsyncIterator[SwarmEngine]:
    config = SwarmConfig(**{"listen": "127.0.0.1:0", **changes})
    hub = coordinator(ttl_s=config.lease_s)
    engine = SwarmEngine(config, hub, lambda version, source: head(version), SystemClock(), number_format="float32")
    (folder / DIGEST).write_bytes(CONTENT)
    names = {f"Bearer {name}": name for name in "abc"}
    engine.gateway = Gateway(config, engine.shell, member_of=lambda header: names.get(header or ""), blobs=folder)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def dial(engine: SwarmEngine, name: str, **changes: Any) -> Any:
    assert engine.gateway is not None
    settings: dict[str, Any] = {
        "subprotocols": [SUBPROTOCOL],
        "additional_headers": {"Authorization": f"Bearer {name}"},
        "proxy": None,
        "close_timeout": 0.5,  # it is waited for in full where messages are left unread
    }
    return websockets.connect(f"{engine.gateway.url}/v1/session", **settings | changes)


class Wire:
    """One connection of a model worker."""

    def __init__(self, socket: Any, worker: ModelWorker) -> None:
        self.socket, self.worker = socket, worker

    async def say(self, message: FromWorker) -> None:
        await self.socket.send(encode(self.worker.lease, message))

    async def hear(self) -> Any:
        """Take the next message, and answer it."""
        message = decode_down(await self.socket.recv()).message
        for answer in self.worker.got(message):
            await self.say(answer)
        return message


@asynccontextmanager
async def joined(engine: SwarmEngine, worker: ModelWorker) -> AsyncIterator[Wire]:
    async with dial(engine, worker.name) as socket:
        wire = Wire(socket, worker)
        await wire.say(worker.hello())
        assert isinstance(await wire.hear(), Welcome)
        yield wire


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def collect(engine: SwarmEngine, name: str, **changes: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request(name, **changes))]


async def test_a_worker_that_does_not_answer_an_abort_is_cut_off(tmp_path: Path) -> None:
    async with swarm(tmp_path, abort_timeout_s=0.2) as engine, joined(engine, ModelWorker("a")) as wire:
        call = asyncio.create_task(collect(engine, "g0.0"))
        await wire.hear()
        await engine.abort(["g0.0#0."])
        assert [(c.token_ids, c.finish_reason) for c in await call] == [((), FinishReason.ABORT)]


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"additional_headers": {}}, 401, "revoked"),
        ({"subprotocols": ["rollover.swarm.v0"]}, 426, "rollover.swarm.v2"),
        ({"subprotocols": None}, 426, "offers none"),
    ],
)
async def test_who_may_not_join_is_told_why(tmp_path: Path, changes: dict[str, Any], status: int, says: str) -> None:
    async with swarm(tmp_path) as engine:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with dial(engine, "a", **changes):
                pass
        assert refused.value.response.status_code == status
        assert says in (refused.value.response.body or b"").decode()
        assert engine.coordinator.counters[{401: "refused_logins", 426: "refused_protocols"}[status]] == 1


async def test_a_path_where_no_worker_joins_is_told_from_a_refused_token(tmp_path: Path) -> None:
    async with swarm(tmp_path) as engine:
        assert engine.gateway is not None
        address = CoordinatorAddress.parse(f"{engine.gateway.url}/foo")
        with pytest.raises(Refused) as caught:
            async with open_connection(address, TOKEN, None, timeout_s=10.0):
                pass
        said = str(caught.value)
        assert "accepts no workers at the path /foo/v1/session (HTTP 404): workers join this run at" in said
        assert "token" not in said


async def test_a_frame_above_the_limit_ends_the_connection_without_a_word(tmp_path: Path) -> None:
    async with swarm(tmp_path) as engine:
        async with dial(engine, "b") as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await socket.send(bytes(MAX_FRAME_BYTES + 1))
                told = await socket.recv()
                assert not told, "the connection ended with a message"
        with pytest.raises(ProtocolError, match="above the protocol's"):
            encode(1, CallFailed(call_id="a", reason="x" * MAX_FRAME_BYTES))
        async with joined(engine, ModelWorker("b")):
            pass


@pytest.mark.parametrize("has_joined", [False, True])
@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "a frame begins with nothing"),
        (b"\x07abc", "a frame begins with 07"),
        (b"\x00\xc1", "a frame of 2 bytes cannot be read"),
        (b"\x01nonsense", "cannot be read"),
        (b"\x00" + b"\x91" * 100_000, "cannot be read"),
        ("text", "it sent a text frame, but all frames are binary"),
        (encode(0, head(1)), "cannot be read"),
        (b"\x00\x81\xa5lease\xa2\xff\xfe", "cannot be read: Expected `int`"),
        (encode(0, CallFailed(call_id="a", reason="?????")).replace(b"?????", b"\xff" * 5), "cannot be read: "),
        (encode(0, structs.replace(IDLE, num_held=-1)), "Expected `int` >= 0 - at `$.message.num_held`"),
        (encode(0, structs.replace(HELLO, held=(HELD,) * (MAX_HELD_CALLS + 1))), "<= 16384 - at `$.message.held`"),
        (encode(0, structs.replace(HELLO, served=(head(1),) * (MAX_SERVED + 1))), "<= 64 - at `$.message.served`"),
        (encode(0, structs.replace(HELLO, protocols=(2,) * 65)), "of length <= 64 - at `$.message.protocols`"),
        (encode(0, structs.replace(HELLO, software="x" * 257)), "of length <= 256 - at `$.message.software`"),
        (encode(1, ready(max_running=65_537)), "Expected `int` <= 65536 - at `$.message.max_running`"),
        (encode(1, ready(number_format="x" * 257)), "of length <= 256 - at `$.message.number_format`"),
    ],
)
async def test_an_invalid_frame_ends_the_connection_with_one_message(
    tmp_path: Path, frame: bytes | str, says: str, has_joined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as engine:
        async with joined(engine, ModelWorker("b")) if has_joined else dial(engine, "b") as opened:
            socket = opened.socket if has_joined else opened
            await socket.send(frame)
            told = []
            with pytest.raises(websockets.ConnectionClosed):
                while True:
                    told.append(decode_down(await socket.recv()).message)
            (goodbye,) = told
            assert isinstance(goodbye, Goodbye) and not goodbye.is_final, "it may have been the way"
            assert goodbye.reason.startswith("this worker violates the protocol: ")
            assert says in goodbye.reason
            assert engine.coordinator.counters["refused_frames"] == 1
            assert sum("b broke the protocol and was disconnected" in line for line in caplog.messages) == 1
        async with joined(engine, ModelWorker("b")):
            pass


async def test_of_two_connections_neither_waits_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ModelWorker("a"), ModelWorker("b")
    async with swarm(tmp_path) as engine, joined(engine, first), joined(engine, second):
        leases: list[int] = []
        protocols = {
            connection.request.headers["Authorization"]: connection
            for connection in engine.gateway._server.server_state.connections
        }

        def watch(lease: int, message: FromWorker) -> None:
            if isinstance(message, Heartbeat):
                leases.append(lease)

        monkeypatch.setattr(engine.shell, "received", watch)
        for number in range(1, 41):  # all of them wait when the first is handed out
            for worker in (first, second):
                protocol = protocols[f"Bearer {worker.name}"]
                frame = encode(worker.lease, structs.replace(IDLE, number=number))
                protocol.queue.put_nowait({"type": "websocket.receive", "bytes": frame})
        await until(lambda: len(leases) == 80)
        assert abs(leases[:40].count(first.lease) - 20) <= gateway_module._FRAMES_PER_TURN


async def test_blobs_are_served_in_parts_to_members_alone(tmp_path: Path) -> None:
    async with swarm(tmp_path) as engine, httpx.AsyncClient(trust_env=False) as http:
        assert engine.gateway is not None
        base = engine.gateway.url.replace("ws:", "http:") + "/v1/blobs/"
        member = {"Authorization": "Bearer a"}
        whole = await http.get(base + DIGEST, headers=member)
        assert whole.content == CONTENT
        part = await http.get(base + DIGEST, headers={**member, "Range": "bytes=100-199"})
        assert part.status_code == 206 and part.content == CONTENT[100:200]
        assert (await http.get(base + DIGEST)).status_code == 401
        for name in ("0" * 64, "..%2f" + DIGEST, DIGEST.upper()):
            assert (await http.get(base + name, headers=member)).status_code == 404


async def test_a_connection_without_request_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "REQUEST_TIMEOUT_S", 0.2)
    whole = f"GET /v1/blobs/{DIGEST} HTTP/1.1\r\nHost: trainer\r\nAuthorization: Bearer a\r\n\r\n".encode()
    async with swarm(tmp_path) as engine, joined(engine, ModelWorker("a")):
        assert engine.gateway is not None
        port = int(engine.gateway.url.rpartition(":")[2])

        async def answered(sent: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            received = b""
            with suppress(ConnectionError):
                while part := await reader.read(2**16):
                    received += part
            writer.close()
            return received

        no_session = whole[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        sent = (b"", whole[:-2], whole + whole[:-2], no_session)
        nothing, part, then_part, refused = await asyncio.gather(*map(answered, sent))
        assert nothing == part == b"" and refused.startswith(b"HTTP/1.1 4")
        assert then_part.count(b"HTTP/1.1 200") == 1 and then_part.endswith(CONTENT)
        assert engine.coordinator.members["a"].is_connected, "a session is a request"


def test_a_request_that_comes_before_the_end_of_another_is_answered_whole() -> None:
    begun = itertools.count(1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        number = next(begun)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await asyncio.sleep(0 if number == 1 else 60)
        await send({"type": "http.response.body", "body": b"%d" % number})
        await asyncio.sleep(1)  # the next request begins meanwhile

    async def law() -> None:
        settings, transport = ports.punctual(app), Mock()
        settings.load()
        protocol: Any = settings.http_protocol_class
        protocol = protocol(config=settings, server_state=ServerState(), app_state={})
        transport.get_protocol.return_value, transport.is_closing.return_value = protocol, False
        transport.get_extra_info = {"peername": ("127.0.0.1", 40121)}.get
        protocol.connection_made(transport)
        protocol.data_received(2 * b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n")
        await asyncio.sleep(60 + ports.REQUEST_TIMEOUT_S - 1)
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        assert [answer[-1:] for answer in written.split(b"HTTP/1.1 200")] == [b"", b"1", b"2"]
        assert not transport.abort.called
        await asyncio.sleep(2)
        assert transport.abort.called

    in_virtual_time(law())


@pytest.mark.parametrize("is_over", [True, False])
async def test_only_the_end_of_the_run_lets_workers_go_for_good(tmp_path: Path, is_over: bool) -> None:
    async with swarm(tmp_path) as engine, joined(engine, ModelWorker("a")) as wire:
        if is_over:
            engine.placement.run_ended()
        closing = asyncio.create_task(engine.close())
        bye = await wire.hear()
        assert isinstance(bye, Goodbye) and (bye.is_final, bye.has_ended) == (is_over, is_over)
        await closing


PING, CLOSE = b"\x89\x80\x00\x00\x00\x00", b"\x88\x02\x03\xe8"
"""A ping of a client, and a server's end of a connection that went well."""
HANDSHAKE = (
    "GET /v1/session HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    f"Sec-WebSocket-Protocol: {SUBPROTOCOL}\r\nAuthorization: Bearer a\r\n\r\n"
)


def opened(port: int, context: ssl.SSLContext | None = None) -> socket.socket:
    """Open a WebSocket, over TLS with a context."""
    client = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    client = client if context is None else context.wrap_socket(client)
    client.sendall(HANDSHAKE.format(port=port).encode())
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(4096)
    assert received.startswith(b"HTTP/1.1 101")
    return client


def close_and_stay(port: int) -> socket.socket:
    """Open a WebSocket over TLS and close it, but not the TLS connection below it."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = opened(port, context)
    client.sendall(b"\x88\x80\x00\x00\x00\x00")
    assert client.recv(1) == b"\x88", "the close is answered"
    return client


def greeting(port: int) -> socket.socket:
    """Open a WebSocket and say hello on it; whoever closes it resets the connection."""
    client = opened(port)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    frame = encode(0, ModelWorker("a").hello())
    assert len(frame) < 126
    client.sendall(bytes([0x82, 0x80 | len(frame), 0, 0, 0, 0]) + frame)
    return client


def send_and_read_later(client: socket.socket) -> bytes:
    """Send for a while before reading anything; return what has come."""
    for _ in range(10):
        time.sleep(0.05)
        client.sendall(PING)
    received = b""
    while CLOSE not in received and (part := client.recv(4096)):
        received += part
    client.sendall(b"\x88\x80\x00\x00\x00\x00")
    client.close()
    return received


async def test_a_worker_that_is_sending_when_the_run_ends_reads_that_it_ended(tmp_path: Path) -> None:
    """Its connection is not closed under it: whatever it sends after that would be answered with a reset."""
    async with swarm(tmp_path) as engine:
        client = await asyncio.to_thread(greeting, int(engine.url.rpartition(":")[2]))
        await until(lambda: "a" in engine.coordinator.members)
        engine.placement.run_ended()
        received, _ = await asyncio.gather(asyncio.to_thread(send_and_read_later, client), engine.close())
        assert b"the run has ended" in received


async def test_nothing_is_written_to_a_lost_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with swarm(tmp_path) as engine:
        client = await asyncio.to_thread(greeting, int(engine.url.rpartition(":")[2]))
        members = engine.coordinator.members
        await until(lambda: "a" in members and members["a"].is_connected)
        lease = members["a"].lease
        client.close()  # reset: the next write fails, and the event loop hears of it when it comes round
        for _ in range(50):  # so large that each is written at once
            engine.shell.connections.send(lease, Abort(call_ids=(Random(0).randbytes(2**17).hex(),)))
        await until(lambda: not members["a"].is_connected)
    assert not [r for r in caplog.records if r.name == "asyncio"], "asyncio warns of writes that nobody can get"


async def test_a_worker_that_hangs_up_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_FAREWELL_S", 0.1)
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    async with swarm(tmp_path, tls_certificate=certificate, tls_key=key) as engine:
        client = await asyncio.to_thread(close_and_stay, int(engine.url.rpartition(":")[2]))
        try:
            await engine.close()
        finally:
            client.close()
