"""Whoever opens a connection and has no request is let go in time, and keeps nobody else out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from rollover.swarm.coordinator.transports import http_connections
from rollover.swarm.coordinator.transports.http_connections import MAX_WAITING, REQUEST_TIMEOUT_S, ImpatientHttp
from tests.swarm.kit import ModelWorker, request
from tests.swarm.test_gateway import joined, swarm
from tests.swarm.test_gateway import run as over_sockets
from tests.virtual_time import run

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Pipe(asyncio.Transport):
    """A transport whose other end is a test."""

    def __init__(self, protocol: ImpatientHttp) -> None:
        super().__init__()
        self.protocol, self.written, self.ended_s = protocol, b"", -1.0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.ended_s >= 0

    def abort(self) -> None:
        if not self.is_closing():
            self.ended_s = asyncio.get_running_loop().time()
            self.protocol.connection_lost(None)

    close = abort

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Server:
    """Answers every request at once."""

    def __init__(self) -> None:
        self._config = uvicorn.Config(PlainTextResponse("ok"), http=ImpatientHttp, log_config=None, lifespan="off")
        self._config.load()
        self._state = ServerState()

    def opened(self) -> Pipe:
        loop = asyncio.get_running_loop()
        protocol = ImpatientHttp(config=self._config, server_state=self._state, app_state={}, _loop=loop)
        pipe = Pipe(protocol)
        protocol.connection_made(pipe)
        return pipe


@pytest.mark.parametrize("said", [b"", REQUEST[:-2], b"GET"])
def test_a_client_without_a_whole_request_is_let_go_in_time(said: bytes) -> None:
    async def law() -> None:
        pipe = Server().opened()
        await asyncio.sleep(REQUEST_TIMEOUT_S - 1)
        if said:
            pipe.protocol.data_received(said)
        await asyncio.sleep(100)
        assert pipe.ended_s == REQUEST_TIMEOUT_S and not pipe.written

    run(law())


@pytest.mark.parametrize("then", [b"", b"GET / HT"])
def test_after_an_answer_the_next_request_has_as_long(then: bytes) -> None:
    async def law() -> None:
        pipe = Server().opened()
        for at_s in (6, 10, 14):
            await asyncio.sleep(at_s - asyncio.get_running_loop().time())
            pipe.protocol.data_received(REQUEST)
        await asyncio.sleep(1)
        assert pipe.written.count(b"200 OK") == 3
        if then:
            pipe.protocol.data_received(then)
        await asyncio.sleep(100)
        assert 15 < pipe.ended_s <= 14 + REQUEST_TIMEOUT_S

    run(law())


def test_of_too_many_that_wait_the_one_that_has_waited_longest_goes() -> None:
    async def law() -> None:
        server, pipes = Server(), list[Pipe]()
        for _ in range(MAX_WAITING):
            pipes.append(server.opened())
            await asyncio.sleep(0.001)
        pipes[0].protocol.data_received(REQUEST)  # and waits again
        await asyncio.sleep(0.001)
        for _ in range(3):
            pipes.append(server.opened())
        assert [i for i, pipe in enumerate(pipes) if pipe.is_closing()] == [1, 2, 3]

    run(law())


def test_a_worker_stays_where_others_that_say_nothing_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "REQUEST_TIMEOUT_S", 0.1)

    async def law() -> None:
        async with swarm(tmp_path) as engine, joined(engine, ModelWorker("a")) as wire:
            host, port = engine.url.removeprefix("ws://").rsplit(":", 1)
            silent, writer = await asyncio.open_connection(host, int(port))
            assert await silent.read() == b""
            writer.close()
            call = asyncio.create_task(anext(engine.generate(request("g0.0"))))
            await wire.hear()
            await wire.decode("g0.0#0.", 3)
            assert len((await call).token_ids) == 3

    over_sockets(law)
