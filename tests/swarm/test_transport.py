"""The gateway, seen by a worker's connection on one side and the coordinator's shell on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover.clock import SystemClock
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.gateway import Gateway
from rollover.swarm.coordinator.shell import Connection, Refusal
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Abort,
    CallFailed,
    FromCoordinator,
    FromWorker,
    Goodbye,
    Hello,
    Leaving,
    NotServing,
    Welcome,
    encode,
)
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.connection import CoordinatorConnection, Disconnected, Refused, open_connection
from tests.swarm.kit import coordinator, head, ready

HELLO = Hello(protocols=(PROTOCOL,), software="test")
NEWS = NotServing(version=1, reason="the disk is full")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key()


class RecordedSessions:
    """Welcomes everybody, and keeps what is said."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.messages: dict[int, list[FromWorker]] = {}
        self.connections: dict[int, Connection] = {}
        self.gone: list[int] = []
        self.refusals: list[Refusal] = []
        self._changed = asyncio.Event()

    def connected(self, name: str, hello: Hello, connection: Connection) -> int:
        lease = len(self.names) + 1
        self.names.append(name)
        self.messages[lease] = [hello]
        self.connections[lease] = connection
        connection.send(encode(lease, welcome(name, lease)))
        self._wake()
        return lease

    def received(self, lease: int, message: FromWorker) -> None:
        self.messages[lease].append(message)
        self._wake()

    def fenced(self, message: FromWorker) -> None:
        raise AssertionError(f"no worker here names another's lease, but one sent {message}")

    def disconnected(self, lease: int) -> None:
        self.gone.append(lease)
        self._wake()

    def refused(self, cause: Refusal) -> None:
        self.refusals.append(cause)
        self._wake()

    def say(self, lease: int, message: FromCoordinator) -> None:
        self.connections[lease].send(encode(lease, message))

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def welcome(name: str, lease: int) -> Welcome:
    return Welcome(protocol=PROTOCOL, member=name, lease=lease, ttl_s=15.0, run_id="run", run_epoch=1, head=head(0))


@dataclass
class Place:
    """A gateway that serves, and how a worker gets there."""

    gateway: Gateway
    address: CoordinatorAddress
    credentials: Credentials

    def token(self, name: str = "laptop") -> WorkerToken:
        return self.credentials.add(name, KEY)

    def dial(self, token: WorkerToken, **settings: Any) -> AbstractAsyncContextManager[CoordinatorConnection]:
        return open_connection(self.address, token, None, **{"timeout_s": 10.0, **settings})


async def greeted(connection: CoordinatorConnection) -> Welcome:
    await connection.send(HELLO)
    answer = await connection.receive()
    assert isinstance(answer, Welcome)
    return answer


def payload(random: Random, size: int) -> str:
    """Text that does not compress to nothing."""
    return random.randbytes(size // 2).hex()


@asynccontextmanager
async def at_a_gateway(folder: Path, sessions: Any = None) -> AsyncIterator[tuple[Place, Any]]:
    """A gateway that serves, and what is said on it."""
    sessions = sessions or RecordedSessions()
    credentials = Credentials(folder / "workers.json")
    gateway = Gateway(SwarmConfig(listen="127.0.0.1:0"), sessions, member_of=credentials.member_of, blobs=folder)
    gateway.serve()
    try:
        yield Place(gateway, CoordinatorAddress.parse(gateway.url), credentials), sessions
    finally:
        await gateway.close()


async def test_who_has_no_valid_token_is_refused_for_good(tmp_path: Path) -> None:
    async with at_a_gateway(tmp_path) as (place, sessions):
        revoked = place.token("laptop")
        place.credentials.revoke("laptop")
        for token in (WorkerToken.make("stranger", KEY), revoked):
            with pytest.raises(Refused, match=rf"refuses the token of '{token.name}'") as refused:
                async with place.dial(token) as connection:
                    await greeted(connection)
            assert token.secret not in str(refused.value)
        again = place.token("laptop")
        with pytest.raises(Refused, match="token"):  # the name is right, the secret is not
            async with place.dial(revoked) as connection:
                await greeted(connection)
        async with place.dial(again) as connection:
            await greeted(connection)
        assert sessions.names == ["laptop"] and sessions.refusals == ["login"] * 3


async def test_messages_come_once_and_in_order_both_ways(tmp_path: Path) -> None:
    random = Random(3)
    sizes = [random.choice((0, 10, 1000, 70_000)) for _ in range(300)] + [3 * 2**20] * 2
    ups = [CallFailed(call_id=str(i), reason=payload(random, size)) for i, size in enumerate(sizes)]
    downs = [Abort(call_ids=(str(i), payload(random, size))) for i, size in enumerate(sizes)]
    async with at_a_gateway(tmp_path) as (place, sessions), place.dial(place.token()) as connection:
        await greeted(connection)

        async def down() -> None:
            for message in downs:
                sessions.say(1, message)
            assert [await connection.receive() for _ in downs] == downs

        async def up() -> None:
            for message in ups:
                await connection.send(message)
            await sessions.until(lambda: len(sessions.messages[1]) == 1 + len(ups))
            assert sessions.messages[1][1:] == ups

        await asyncio.gather(down(), up())


async def test_a_goodbye_comes_last_and_says_whether_to_come_back(tmp_path: Path) -> None:
    async with at_a_gateway(tmp_path) as (place, sessions):
        for is_final, error in ((True, Refused), (False, Disconnected)):
            async with place.dial(place.token(f"w{is_final}")) as connection:
                lease = (await greeted(connection)).lease
                sessions.say(lease, Abort(call_ids=("a",)))
                sessions.say(lease, Goodbye(reason="that is all", is_final=is_final))
                sessions.connections[lease].close()
                assert await connection.receive() == Abort(call_ids=("a",))
                with pytest.raises(error, match="that is all"):
                    await connection.receive()
                await sessions.until(lambda lease=lease: lease in sessions.gone)


async def test_a_transport_that_closes_ends_its_connections_and_takes_no_more(tmp_path: Path) -> None:
    async with at_a_gateway(tmp_path) as (place, sessions):
        async with place.dial(place.token()) as connection:
            await greeted(connection)
            sessions.say(1, Abort(call_ids=("a",)))
            closing = asyncio.create_task(place.gateway.close())
            assert await connection.receive() == Abort(call_ids=("a",))
            await closing
            assert sessions.gone == [1]
            with pytest.raises(Disconnected):
                await connection.send(HELLO)
                await connection.receive()
        with pytest.raises(Disconnected):
            async with place.dial(place.token("late"), timeout_s=5.0) as connection:
                await greeted(connection)


async def test_who_says_nothing_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.swarm.coordinator.gateway.HELLO_TIMEOUT_S", 0.2)
    async with at_a_gateway(tmp_path) as (place, sessions):
        async with place.dial(place.token()) as connection:
            await asyncio.to_thread(time.sleep, 0.5)  # twice as long as one may be silent
            with pytest.raises(Disconnected):
                await connection.receive()
        assert sessions.names == []


async def test_a_worker_that_does_not_read_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.swarm.coordinator.gateway.MAX_UNSENT_BYTES", 2**20)
    async with at_a_gateway(tmp_path) as (place, sessions), place.dial(place.token()) as connection:
        await greeted(connection)
        for _ in range(64):  # more than all buffers on the way hold
            sessions.say(1, Abort(call_ids=(payload(Random(1), 2**20),)))
        await sessions.until(lambda: sessions.gone == [1])


async def test_a_worker_cannot_speak_for_another(tmp_path: Path) -> None:
    hub, ready_ = coordinator(), ready()
    engine = SwarmEngine(SwarmConfig(), hub, lambda version, _: head(version), SystemClock(), number_format="float32")
    async with at_a_gateway(tmp_path, engine.shell) as (place, _):
        tokens = [place.token(name) for name in ("victim", "liar")]
        async with place.dial(tokens[0]) as victim, place.dial(tokens[1]) as liar:
            leases = [(await greeted(connection)).lease for connection in (victim, liar)]
            for lie in (ready(max_running=0), Leaving(reason="gone"), NEWS, HELLO):
                await liar._socket.send(encode(leases[0], lie))
            await liar._socket.send(encode(leases[1] + 1, ready_))
            await liar.send(ready_)
            await victim.send(ready_)
            while not all(hub.members[name].ready == ready_ for name in ("victim", "liar")):
                await asyncio.sleep(0.01)
            assert (hub.members["victim"].lease, hub.members["victim"].last_error) == (leases[0], "")
            assert not hub.members["victim"].distrust and hub.counters["fenced"] == 5
        await engine.close()
