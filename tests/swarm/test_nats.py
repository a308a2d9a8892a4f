"""A swarm over real NATS servers: killed, stopped, cut off, in clusters, with logins and TLS, and overheard."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats as nats_library
import nkeys
import pytest
from nats.aio.msg import Msg

from rollover.errors import ConfigError
from rollover.swarm.coordinator.transports.nats.cluster import NatsCluster
from rollover.swarm.coordinator.transports.nats.gateway import NatsGateway
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.nats import client as nats_client
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.credentials import NatsCredentials
from rollover.swarm.wire.messages import Abort
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.connection import CoordinatorConnection, Disconnected, Refused, tls_context
from rollover.swarm.worker.dialing import dial
from tests.swarm.nats_kit import NatsServer, cluster, leaf, needs_server, running
from tests.swarm.test_worker_command import make_certificate
from tests.swarm.transport_contract import KEY, NEWS, RecordedSessions, greeted

pytestmark = needs_server

DEADLINE_S = 60.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed soon."""
    monkeypatch.setattr(nats_client, "PING_S", 0.3)


def run(law: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await law()

    asyncio.run(main())


@asynccontextmanager
async def gateway(
    url: str, credentials: Credentials, sessions: RecordedSessions, **settings: Any
) -> AsyncIterator[NatsGateway]:
    address = NatsAddress.parse(url).having(settings.pop("login", None))
    place = NatsCluster(address, **settings)
    await place.open()
    made = NatsGateway(place, sessions, hashes=credentials.hashes)
    await made.serve()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(tmp_path / "workers.json")


@pytest.fixture
def token(credentials: Credentials) -> WorkerToken:
    return credentials.add("laptop", KEY)


async def greeted_again(url: str, token: WorkerToken, sessions: RecordedSessions) -> None:
    """Dial as a worker does, until it is welcome."""
    while True:
        try:
            async with dial(NatsAddress.parse(url), token, None, timeout_s=2.0) as connection:
                await greeted(connection)
                await exchanged(connection, sessions)
                return
        except Disconnected:
            await asyncio.sleep(0.05)


async def exchanged(connection: CoordinatorConnection, sessions: RecordedSessions) -> None:
    """Have one message go each way."""
    lease = len(sessions.names)
    before = len(sessions.messages[lease])
    await connection.send(NEWS)
    await sessions.until(lambda: len(sessions.messages[lease]) > before)
    sessions.say(lease, Abort(call_ids=("a",)))
    assert await connection.receive() == Abort(call_ids=("a",))


async def is_lost(connection: CoordinatorConnection, says: str = "") -> None:
    with pytest.raises(Disconnected, match=says):
        await connection.receive()


async def is_lost_when_it_speaks(connection: CoordinatorConnection, says: str) -> None:
    """Speak until somebody answers that nobody listens: the server may not know at once."""
    lost = asyncio.create_task(is_lost(connection, says))
    with suppress(Disconnected):
        while not lost.done():
            await connection.send(NEWS)
            await asyncio.sleep(0.01)
    await lost


# -- servers that die ---------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_ends_sessions_and_is_found_again(
    tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    server, sessions = NatsServer(tmp_path), RecordedSessions()

    async def law() -> None:
        async with gateway(server.url, credentials, sessions):
            async with dial(NatsAddress.parse(server.url), token, None, timeout_s=5.0) as connection:
                await greeted(connection)
                await exchanged(connection, sessions)
                server.kill()
                await is_lost(connection, "the connection to nats://.* ended")
                await sessions.until(lambda: sessions.gone == [1])
            with pytest.raises(Disconnected, match="cannot be reached: "):
                async with dial(NatsAddress.parse(server.url), token, None, timeout_s=5.0):
                    pass
            server.start()
            await greeted_again(server.url, token, sessions)

    with running(server):
        run(law)


def test_a_server_that_stands_still_is_noticed_and_used_again_when_it_wakes(
    tmp_path: Path, credentials: Credentials, token: WorkerToken, quick: None
) -> None:
    server, sessions = NatsServer(tmp_path), RecordedSessions()

    async def law() -> None:
        async with gateway(server.url, credentials, sessions):
            async with dial(NatsAddress.parse(server.url), token, None, timeout_s=5.0) as connection:
                await greeted(connection)
                server.signal(signal.SIGSTOP)
                start_s = time.monotonic()
                await is_lost(connection, r"has not answered for 0\.3 s")
                await sessions.until(lambda: sessions.gone == [1])
                assert time.monotonic() - start_s < 5.0
            server.signal(signal.SIGCONT)
            await greeted_again(server.url, token, sessions)

    with running(server):
        run(law)


class Cable:
    """A way to a server that can be cut without anybody being told."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.is_cut = asyncio.Event()
        self.port = 0

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[Cable]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if self.is_cut.is_set():
                    continue
                sink.write(data)
        finally:
            sink.close()


def test_a_cable_that_is_cut_silently_ends_the_session_on_its_side(
    tmp_path: Path, credentials: Credentials, token: WorkerToken, quick: None
) -> None:
    server, sessions = NatsServer(tmp_path), RecordedSessions()

    async def law() -> None:
        async with Cable(server.port).laid() as cable, gateway(server.url, credentials, sessions):
            address = NatsAddress.parse(f"nats://127.0.0.1:{cable.port}")
            async with dial(address, token, None, timeout_s=5.0) as connection:
                await greeted(connection)
                await exchanged(connection, sessions)
                cable.is_cut.set()
                await is_lost(connection, "has not answered")
                assert sessions.gone == [], "nobody could tell the coordinator: the lease ends in time"
            await greeted_again(server.url, token, sessions)
            assert sessions.names == ["laptop", "laptop"]

    with running(server):
        run(law)


def test_a_coordinator_that_died_is_noticed_by_the_next_message_and_its_successor_says_so(
    tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    server, before, after = NatsServer(tmp_path), RecordedSessions(), RecordedSessions()

    async def law() -> None:
        first = NatsCluster(NatsAddress.parse(server.url))
        await first.open()
        dead = NatsGateway(first, before, hashes=credentials.hashes)
        await dead.serve()
        assert dead._keeping is not None
        async with (
            dial(NatsAddress.parse(server.url), token, None, timeout_s=5.0) as one,
            dial(NatsAddress.parse(server.url), credentials.add("attic", KEY), None, timeout_s=5.0) as two,
        ):
            await greeted(one)
            await greeted(two)
            dead._keeping.cancel()
            await first.close()  # its sessions are not told
            await is_lost_when_it_speaks(one, "no coordinator answers on nats://.*is the trainer running")
            async with gateway(server.url, credentials, after):
                await is_lost_when_it_speaks(two, "has ended the session: the coordinator does not know this session")
                await greeted_again(server.url, token, after)

    with running(server):
        run(law)


def test_one_run_is_under_a_subject(tmp_path: Path, credentials: Credentials) -> None:
    server = NatsServer(tmp_path)

    async def law() -> None:
        async with gateway(f"{server.url}/one", credentials, RecordedSessions()):
            with pytest.raises(ConfigError, match=r"engine\.nats_url = .*another run already uses the subject 'one'"):
                await NatsCluster(NatsAddress.parse(f"{server.url}/one")).open()
            async with gateway(f"{server.url}/two", credentials, RecordedSessions()):
                pass
        async with gateway(f"{server.url}/one", credentials, RecordedSessions()):
            pass

    with running(server):
        run(law)


@pytest.mark.parametrize("at_the_same_time", [True, False])
def test_of_two_runs_that_find_a_subject_free_one_has_it(
    tmp_path: Path, credentials: Credentials, at_the_same_time: bool
) -> None:
    """Both have asked before either listens, as runs do that warm their models up in between."""
    server = NatsServer(tmp_path)

    async def law() -> None:
        address = NatsAddress.parse(server.url)
        gateways = []
        for _ in range(2):
            place = NatsCluster(address)
            await place.open()
            gateways.append(NatsGateway(place, RecordedSessions(), hashes=credentials.hashes))
        if at_the_same_time:
            found = await asyncio.gather(*(each.serve() for each in gateways), return_exceptions=True)
        else:
            await gateways[0].serve()
            (found,) = [[None, *await asyncio.gather(gateways[1].serve(), return_exceptions=True)]]
        refused = [error for error in found if error is not None]
        assert len(refused) == 1 and "another run already uses the subject 'rollover'" in str(refused[0])
        for each in gateways:
            await each.close()

    with running(server):
        run(law)


# -- more servers than one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [cluster, leaf])
def test_worker_and_coordinator_meet_across_servers(
    made: Callable[[Path], tuple[NatsServer, NatsServer]], tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    hub, other = made(tmp_path)
    sessions = RecordedSessions()

    async def law() -> None:
        async with gateway(hub.url, credentials, sessions):
            await greeted_again(other.url, token, sessions)

    with running(hub, other):
        run(law)


def test_a_coordinator_goes_on_at_another_server_and_tells_the_workers_there(
    tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    one, two = cluster(tmp_path)
    sessions = RecordedSessions()
    both = f"{one.url},{two.url.removeprefix('nats://')}"

    async def law() -> None:
        async with gateway(both, credentials, sessions):
            await greeted_again(two.url, token, sessions)
            async with dial(NatsAddress.parse(two.url), token, None, timeout_s=5.0) as connection:
                await greeted(connection)
                one.kill()
                await is_lost(
                    connection, "has ended the session: the coordinator lost its connection to the NATS cluster"
                )
            await greeted_again(both, token, sessions)

    with running(one, two):
        run(law)


# -- who listens ----------------------------------------------------------------------------------------------------


def test_who_hears_everything_learns_no_token_and_can_say_nothing(
    tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    server, sessions = NatsServer(tmp_path), RecordedSessions()
    heard: list[Msg] = []

    async def listen(message: Msg) -> None:
        heard.append(message)

    async def law() -> None:
        spy = await nats_library.connect(server.url)
        await spy.subscribe(">", cb=listen)
        async with (
            gateway(server.url, credentials, sessions),
            dial(NatsAddress.parse(server.url), token, None, timeout_s=5.0) as connection,
        ):
            await greeted(connection)
            await exchanged(connection, sessions)
            await spy.flush()
            said = [*heard]
            assert {m.subject.split(".")[1] for m in said} == {"coordinator", "hello", "session", "worker"}
            for message in said:
                assert token.secret.encode() not in message.data and token.hash.encode() not in message.data
            messages = len(sessions.messages[1])
            for message in said:
                if message.subject.split(".")[1] in ("session", "worker") and message.data[:1] != b"\x00":
                    await spy.publish(message.subject, message.data)
                    await spy.publish(message.subject, message.data[:-1] + b"?")
                    await spy.publish(message.subject, b"\x02" + bytes(7) + b"\x63" + bytes(30))
            await spy.flush()
            await exchanged(connection, sessions)
            assert len(sessions.messages[1]) == messages + 1 and sessions.names == ["laptop"]
        await spy.close()

    with running(server):
        run(law)


def test_an_inbox_that_is_not_the_workers_own_gets_no_answer(tmp_path: Path, credentials: Credentials) -> None:
    server = NatsServer(tmp_path)

    async def law() -> None:
        other = await nats_library.connect(server.url)
        heard: list[Msg] = []

        async def listen(message: Msg) -> None:
            heard.append(message)

        await other.subscribe("payroll.>", cb=listen)
        async with gateway(server.url, credentials, RecordedSessions()):
            for reply in ("payroll.orders", "rollover.worker.laptop.>", "rollover.worker.a.b.c", ""):
                await other.publish("rollover.hello", b"\x81\xa9protocols\x90", reply=reply)
            await other.flush()
            await greeted_refused(server, "stranger")
        assert heard == []
        await other.close()

    async def greeted_refused(server: NatsServer, name: str) -> None:
        with pytest.raises(Refused, match="refuses the token"):
            async with dial(NatsAddress.parse(server.url), WorkerToken.make(name, KEY), None, timeout_s=5.0):
                pass

    with running(server):
        run(law)


# -- logins, TLS and limits -----------------------------------------------------------------------------------------


def login(folder: Path, text: str) -> NatsCredentials:
    file = folder / "login"
    file.touch(0o600)
    file.write_text(text)
    return NatsCredentials.read(file)


SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
PUBLIC = nkeys.from_seed(bytearray(SEED)).public_key.decode()


@pytest.mark.parametrize(
    ("authorization", "text"),
    [
        ("user: trainer, password: secret", "trainer:secret"),
        ("token: aToken", "aToken"),
        (f"users: [{{nkey: {PUBLIC}}}]", SEED.decode()),
    ],
    ids=["password", "token", "nkey"],
)
def test_a_login_lets_in_and_none_or_a_wrong_one_does_not(
    authorization: str, text: str, tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    server, sessions = NatsServer(tmp_path, lines=[f"authorization {{{authorization}}}"]), RecordedSessions()
    right, address = login(tmp_path, text), NatsAddress.parse(server.url)
    assert text not in repr(right) and text not in repr(address.having(right))

    async def law() -> None:
        wrong = login(tmp_path, "nobody:wrong")
        for bad in (address, address.having(wrong)):
            with pytest.raises(
                Refused, match=r"refuses the login .*--nats-credentials \(of a worker\) or engine\.nats_credentials"
            ):
                async with dial(bad, token, None, timeout_s=5.0):
                    pass
            with pytest.raises(ConfigError, match=r"engine\.nats_url = .*refuses the login"):
                await NatsCluster(bad).open()
        async with (
            gateway(server.url, credentials, sessions, login=right),
            dial(address.having(right), token, None, timeout_s=5.0) as connection,
        ):
            await greeted(connection)

    with running(server):
        run(law)


def test_what_a_nats_user_may_not_do_is_said(tmp_path: Path, credentials: Credentials, token: WorkerToken) -> None:
    users = (
        'authorization {users: [{user: t, password: t}, {user: w, password: w, permissions: {publish: ["other.>"]}},'
        ' {user: v, password: v, permissions: {subscribe: ["other.>"]}}]}'
    )
    server = NatsServer(tmp_path, lines=[users])
    address = NatsAddress.parse(server.url)

    async def law() -> None:
        async with gateway(server.url, credentials, RecordedSessions(), login=login(tmp_path, "t:t")):
            for user, what in (("w", "Publish"), ("v", "Subscription")):
                with pytest.raises(Refused, match=f"(?i)permissions violation for {what}.*grant it to the NATS user"):
                    async with dial(address.having(login(tmp_path, f"{user}:{user}")), token, None, timeout_s=5.0):
                        pass
        with pytest.raises(ConfigError, match=r"(?i)permissions violation for subscription"):
            async with gateway(server.url, credentials, RecordedSessions(), login=login(tmp_path, "v:v")):
                pass

    with running(server):
        run(law)


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    yield make_certificate(tmp_path)


def test_tls_is_checked_and_insisted_on(
    tmp_path: Path, credentials: Credentials, token: WorkerToken, certificate: tuple[Path, Path]
) -> None:
    files = f'cert_file: "{certificate[0]}", key_file: "{certificate[1]}", ca_file: "{certificate[0]}"'
    server = NatsServer(tmp_path, name="s", lines=[f"tls: {{{files}}}"])
    mutual = NatsServer(tmp_path, name="m", lines=[f"tls: {{{files}, verify: true}}"])
    plain = NatsServer(tmp_path, name="p")
    both = login(tmp_path, certificate[0].read_text() + certificate[1].read_text())
    sessions = RecordedSessions()

    async def refused(server: NatsServer, ca: Path | None, says: str) -> None:
        address = NatsAddress.parse(server.url.replace("nats://", "tls://"))
        with pytest.raises(Refused, match=says):
            async with dial(address, token, tls_context(ca), timeout_s=5.0):
                pass

    async def law() -> None:
        tls = server.url.replace("nats://", "tls://")
        async with (
            gateway(tls, credentials, sessions, tls=tls_context(certificate[0])),
            dial(NatsAddress.parse(tls), token, tls_context(certificate[0]), timeout_s=5.0) as connection,
        ):
            await greeted(connection)
        await refused(server, None, "its certificate cannot be trusted: .*--ca-file")
        await refused(plain, certificate[0], "the server does not offer TLS")
        address = NatsAddress.parse(mutual.url.replace("nats://", "tls://"))
        async with gateway(str(address), credentials, sessions, tls=tls_context(certificate[0]), login=both):
            with pytest.raises((Refused, Disconnected), match="if it requires a client certificate, name"):
                async with dial(address, token, tls_context(certificate[0]), timeout_s=5.0):
                    pass
            async with dial(address.having(both), token, tls_context(certificate[0]), timeout_s=5.0) as connection:
                await greeted(connection)

    with running(server, mutual, plain):
        run(law)


def test_a_server_of_small_messages_carries_large_frames_and_one_of_tiny_ones_is_refused(
    tmp_path: Path, credentials: Credentials, token: WorkerToken
) -> None:
    small = NatsServer(tmp_path, name="s", lines=["max_payload: 8192"])
    tiny = NatsServer(tmp_path, name="t", lines=["max_payload: 1024"])
    sessions = RecordedSessions()

    async def law() -> None:
        async with (
            gateway(small.url, credentials, sessions),
            dial(NatsAddress.parse(small.url), token, None, timeout_s=5.0) as connection,
        ):
            await greeted(connection)
            message = Abort(call_ids=tuple(str(i) for i in range(200_000)))
            sessions.say(1, message)
            assert await connection.receive() == message
        with pytest.raises(ConfigError, match="set its max_payload to at least 4,096"):
            await NatsCluster(NatsAddress.parse(tiny.url)).open()

    with running(small, tiny):
        run(law)


def test_what_is_no_nats_server_is_named(token: WorkerToken) -> None:
    async def law() -> None:
        async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        for answer, error, says in (
            (http, Refused, "does not answer like a NATS server; is the address right"),
            (silent, Disconnected, r"did not open a connection within 0\.5 s"),
        ):
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(error, match=says):
                async with dial(NatsAddress.parse(f"nats://127.0.0.1:{port}"), token, None, timeout_s=0.5):
                    pass
            server.close()

    run(law)


def test_a_subject_where_nobody_is_is_named(tmp_path: Path, token: WorkerToken) -> None:
    server = NatsServer(tmp_path)

    async def law() -> None:
        with pytest.raises(Disconnected, match=r"no coordinator answers on nats://.*is 'typo' the subject in its"):
            async with dial(NatsAddress.parse(f"{server.url}/typo"), token, None, timeout_s=5.0):
                pass

    with running(server):
        run(law)
