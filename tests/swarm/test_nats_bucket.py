"""Weights by an object-store bucket of a real JetStream, and a whole worker over NATS."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import nats as nats_library
import pytest
import torch
from nats.aio.msg import Msg

from rollover.clock import SystemClock
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.open import open_swarm
from rollover.swarm.coordinator.transports.nats.cluster import NatsCluster
from rollover.swarm.coordinator.transports.nats.gateway import NatsGateway
from rollover.swarm.coordinator.transports.nats.open import check_nats, open_nats_side
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.client import NatsConnection, connect
from rollover.swarm.nats.objects import JetStreamTransport, NatsBucket
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads, BlobMissing
from rollover.swarm.publication.keys import open_key
from rollover.swarm.publication.manifest import BlobRef
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.connection import Refused
from rollover.swarm.worker.dialing import blob_transports, dial
from rollover.swarm.worker.joining import work_for
from tests.engine.models import saved, tiny_model
from tests.swarm.nats_kit import NatsServer, needs_server, running
from tests.swarm.test_nats import exchanged, login
from tests.swarm.test_worker_real import ENGINE, collected, expected, flat, weights
from tests.swarm.transport_contract import KEY, RecordedSessions, greeted

pytestmark = needs_server

DEADLINE_S = 90.0
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "swarm.md").read_text()


def run(law: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await law()

    asyncio.run(main())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path, jetstream=True)
    with running(made):
        yield made


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[NatsConnection]:
    connection = await connect(NatsAddress.parse(server.url), tls=None, name="test", timeout_s=10)
    try:
        yield connection
    finally:
        await connection.close()


def downloads(folder: Path, server: NatsServer, bucket: NatsBucket) -> BlobDownloads:
    address = NatsAddress.parse(server.url)
    transport = JetStreamTransport(lambda: connect(address, tls=None, name="test", timeout_s=5.0))
    made = BlobDownloads(BlobFolder(folder), transports={"jetstream://": transport}, backoff_s=0.05)
    made.use([bucket.url])
    return made


def ref(content: bytes) -> BlobRef:
    return BlobRef(digest=hashlib.sha256(content).hexdigest(), num_bytes=len(content), raw_bytes=len(content))


CONTENTS = [Random(seed).randbytes(size) for seed, size in enumerate((1, 1000, 128 * 1024, 5_000_001))]


def test_what_the_folder_holds_is_in_the_bucket_and_nothing_else_of_the_run(tmp_path: Path, server: NatsServer) -> None:
    async def law() -> None:
        here, bucket = BlobFolder(tmp_path / "here"), NatsBucket("rollover-sums", subject="sums")
        for content in CONTENTS:
            here.put(content)
        async with connected(server) as connection:
            await bucket.open(connection)
            foreign = await connection.client.jetstream().object_store("rollover-sums")
            await foreign.put("notes.txt", b"of somebody else")
            other = NatsBucket("rollover-sums", subject="other")
            (theirs := tmp_path / "theirs").mkdir()
            (theirs / hashlib.sha256(b"theirs").hexdigest()).write_bytes(b"theirs")
            await other.mirror(connection, theirs)
            await bucket.mirror(connection, here.root)
            fetching = downloads(tmp_path / "there", server, bucket)
            await fetching.get([ref(content) for content in CONTENTS])
            there = BlobFolder(tmp_path / "there")
            assert [there.read(ref(content).digest) for content in CONTENTS] == CONTENTS
            here.keep([ref(CONTENTS[1]).digest])
            again = NatsBucket("rollover-sums", subject="sums")  # of a trainer that was started anew
            await again.mirror(connection, here.root)
            names = {each.name for each in await foreign.list()}
            assert names == {"notes.txt", ref(b"theirs").digest, ref(CONTENTS[1]).digest}
            stored = (await foreign.status()).stream_info.state.bytes
            assert stored < 10_000, "what was deleted takes no room"
            await fetching.close()
            late = downloads(tmp_path / "late", server, bucket)
            with pytest.raises(BlobMissing, match="jetstream://rollover-sums"):
                await late.get([ref(CONTENTS[3])])
            await late.close()

    run(law)


def test_downloads_outlive_the_server_and_a_damaged_object_does_not_count(tmp_path: Path, server: NatsServer) -> None:
    async def law() -> None:
        here, bucket = BlobFolder(tmp_path / "here"), NatsBucket("rollover-sums", subject="sums")
        for content in CONTENTS:
            here.put(content)
        async with connected(server) as connection:
            await bucket.mirror(connection, here.root)
            store = await connection.client.jetstream().object_store("rollover-sums")
            await store.put(ref(CONTENTS[1]).digest, CONTENTS[1][:-1] + b"?")
        fetching = downloads(tmp_path / "there", server, bucket)
        await fetching.get([ref(CONTENTS[0])])
        server.kill()
        rest = asyncio.create_task(fetching.get([ref(content) for content in CONTENTS]))
        while "Connect" not in fetching.waiting_for and "cannot be reached" not in fetching.waiting_for:
            await asyncio.sleep(0.01)
        server.start()
        while "content other than" not in fetching.waiting_for and "has the digest" not in fetching.waiting_for:
            await asyncio.sleep(0.01)
        async with connected(server) as connection:
            store = await connection.client.jetstream().object_store("rollover-sums")
            await store.put(ref(CONTENTS[1]).digest, CONTENTS[1])
        await rest
        there = BlobFolder(tmp_path / "there")
        assert [there.read(ref(content).digest) for content in CONTENTS] == CONTENTS
        await fetching.close()

    run(law)


def test_without_jetstream_and_other_places_there_is_one_message(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)

    async def law() -> None:
        config = SwarmConfig(transport="nats", nats_url=f"{server.url}/sums")
        with pytest.raises(ConfigError, match=r"engine\.nats_url = .*there is no JetStream.*engine\.blob_urls"):
            check_nats(config)
        elsewhere = SwarmConfig(transport="nats", nats_url=f"{server.url}/sums", blob_urls=("https://weights.example",))
        assert "weights are fetched from https://weights.example" in check_nats(elsewhere)[0]
        side = await open_nats_side(elsewhere)
        assert side.blob_urls == ()
        await side.close()

    with running(server):
        run(law)


def permitted(user: str) -> str:
    """The permissions that the how-to page names for a user, as a server's configuration."""
    (row,) = re.findall(rf"^\| {user} \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    publish, subscribe = (json.dumps(re.findall(r"`([^`]+)`", cell)) for cell in row)
    return f"permissions: {{publish: {publish}, subscribe: {subscribe}}}"


def test_the_permissions_of_the_page_are_enough(tmp_path: Path) -> None:
    users = [
        f"{{user: trainer, password: t, {permitted('trainer')}}}",
        f"{{user: kitchen, password: k, {permitted('worker `kitchen`')}}}",
    ]
    server = NatsServer(tmp_path, jetstream=True, lines=[f"authorization {{users: [{', '.join(users)}]}}"])
    credentials, sessions = Credentials(tmp_path / "workers.json"), RecordedSessions()
    address = NatsAddress.parse(f"{server.url}/runs.sums")
    trainer, kitchen = (address.having(login(tmp_path, text)) for text in ("trainer:t", "kitchen:k"))
    blobs = BlobFolder(tmp_path / "here")
    for content in CONTENTS:
        blobs.put(content)

    async def law() -> None:
        cluster = NatsCluster(trainer)
        await cluster.open()
        gateway = NatsGateway(cluster, sessions, hashes=credentials.hashes)
        await gateway.serve()
        bucket = NatsBucket("rollover-runs_sums", subject="runs.sums")
        assert cluster.connection is not None
        await bucket.mirror(cluster.connection, blobs.root)
        kitchens = credentials.add("kitchen", KEY)
        async with dial(kitchen, kitchens, None, timeout_s=5.0) as connection:
            await greeted(connection)
            await exchanged(connection, sessions)
        transports = blob_transports(kitchen, kitchens, None, timeout_s=5.0)
        fetching = BlobDownloads(BlobFolder(tmp_path / "there"), transports=transports)
        fetching.use([bucket.url])
        await fetching.get([ref(content) for content in CONTENTS])
        await fetching.close()
        with pytest.raises(Refused, match=r"(?i)permissions violation for subscription"):
            async with dial(kitchen, credentials.add("attic", KEY), None, timeout_s=5.0):
                pass
        assert cluster.connection is not None, "nothing was denied to the trainer"
        await gateway.close()

    with running(server):
        run(law)


DENIED_TO_PUBLISH = [
    "$JS.API.STREAM.DELETE.OBJ_rollover-runs_sums",
    "$JS.API.STREAM.PURGE.OBJ_rollover-runs_sums",
    "$JS.API.STREAM.UPDATE.OBJ_rollover-runs_sums",
    "$JS.API.STREAM.MSG.DELETE.OBJ_rollover-runs_sums",
    "$JS.API.STREAM.CREATE.spy",
    "$JS.API.STREAM.NAMES",
    "$JS.API.STREAM.INFO.other",
    "$JS.API.STREAM.MSG.GET.other",
    "$JS.API.CONSUMER.CREATE.other",
    "$O.rollover-runs_sums.C.x",
    "runs.sums.worker.attic.x",
    "runs.sums.coordinator",
    "_INBOX.x",
]
DENIED_TO_HEAR = [
    "runs.sums.>",
    "runs.sums.session.*",
    "runs.sums.hello",
    "runs.sums.worker.attic.>",
    "_INBOX.>",
    "$O.>",
]


def test_the_permissions_of_the_page_are_no_more_than_enough(tmp_path: Path) -> None:
    """A worker's user can neither touch what others rely on nor hear what they say."""
    users = f"{{user: kitchen, password: k, {permitted('worker `kitchen`')}}}"
    server = NatsServer(tmp_path, jetstream=True, lines=[f"authorization {{users: [{users}]}}"])
    told: asyncio.Queue[str] = asyncio.Queue()

    async def tell(error: Exception) -> None:
        told.put_nowait(str(error).lower())

    async def ignore(message: Msg) -> None:
        raise AssertionError("nothing is to be heard")

    async def law() -> None:
        client = await nats_library.connect(server.url, user="kitchen", password="k", error_cb=tell)
        for subject in DENIED_TO_PUBLISH:
            await client.publish(subject, b"{}")
            assert f'publish to "{subject}"'.lower() in await told.get()
        for subject in DENIED_TO_HEAR:
            await client.subscribe(subject, cb=ignore)
            assert f'subscription to "{subject}"'.lower() in await told.get()
        await client.close()

    with running(server):
        run(law)


@asynccontextmanager
async def swarm(server: NatsServer, root: Path, model: Path) -> AsyncIterator[SwarmEngine]:
    engine = await open_swarm(
        SwarmConfig(transport="nats", nats_url=f"{server.url}/sums", lease_s=6.0, admin=None),
        model,
        root=root,
        run="sums",
        max_context_tokens=128,
        keep_versions=4,
        clock=SystemClock(),
        checks=False,
    )
    try:
        await engine.load(0, weights(0, model))
        await engine.start()
        yield engine
    finally:
        await engine.close()


def test_a_server_that_comes_back_without_its_disk_is_given_the_weights_again(
    tmp_path: Path, server: NatsServer
) -> None:
    """No publication has to come first: it may be that none comes, since no worker can fetch the one there is."""

    async def in_the_bucket() -> set[str]:
        client = await nats_library.connect(server.url)
        try:
            return {each.name for each in await (await client.jetstream().object_store("rollover-sums")).list()}
        except nats_library.js.errors.NotFoundError:
            return set()
        finally:
            await client.close()

    async def law() -> None:
        model = saved(tiny_model(seed=0), tmp_path / "model")
        async with swarm(server, tmp_path / "swarm", model) as engine:
            needed = {path.name for path in (tmp_path / "swarm" / "blobs").iterdir()}
            assert await in_the_bucket() == needed
            server.kill_and_forget()
            server.start()
            while await in_the_bucket() != needed:
                await asyncio.sleep(0.05)
            server.kill_and_forget()
            server.start()
            await engine.pause()
            await engine.load(1, weights(1, saved(tiny_model(seed=1), tmp_path / "next")))
            assert await in_the_bucket() == {path.name for path in (tmp_path / "swarm" / "blobs").iterdir()}

    run(law)


@pytest.mark.slow
def test_a_worker_over_nats_samples_what_the_engine_beside_the_trainer_does(tmp_path: Path, server: NatsServer) -> None:
    async def law() -> None:
        torch.set_num_threads(1)
        models = [saved(tiny_model(seed=seed), tmp_path / f"v{seed}") for seed in range(2)]
        root, lines, stops = tmp_path / "swarm", list[str](), list[Callable[[str], None]]()
        async with swarm(server, root, models[0]) as engine, asyncio.TaskGroup() as group:
            token = Credentials(root / "workers.json").add("laptop", open_key(root / "publisher.key").public_key())
            joining = work_for(
                NatsAddress.parse(engine.url),
                token,
                WorkerConfig(engine=ENGINE),
                tmp_path / "w",
                None,
                "test",
                lines.append,
                stops.append,
            )
            running = group.create_task(joining)
            for version in range(2):
                if version:
                    await engine.pause()
                    await engine.load(version, weights(version, models[version]))
                    await engine.resume()
                    while engine.coordinator.members["laptop"].version != version:
                        await asyncio.sleep(0.01)
                settings = {"name": f"s{version}", "seed": 5, "max_new_tokens": 40}
                chunks = await collected(engine, **settings)
                assert {chunk.policy_version for chunk in chunks} == {version}
                alone = flat(await expected(models[version], **settings))
                assert [token for token, _ in flat(chunks)] == [token for token, _ in alone]
            client = await nats_library.connect(server.url)
            objects = await (await client.jetstream().object_store("rollover-sums")).list()
            assert {each.name for each in objects} == {path.name for path in (root / "blobs").iterdir()}
            await client.close()
            stops[0]("done")
            await running
        assert any("serving version 1" in line for line in lines), lines

    run(law)
