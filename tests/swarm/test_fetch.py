"""What a worker fetches is the publisher's, bit for bit; whatever goes wrong, it keeps what it has."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file

from rollover.errors import EngineTimeout, ResourceError
from rollover.swarm.publication import blobs
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.fetch import WeightFetcher
from rollover.swarm.publication.fetched import FetchedWeights
from rollover.swarm.publication.manifest import PublicationError, PublicationRefused, sign
from rollover.swarm.publication.publisher import SwarmPublisher
from rollover.swarm.publication.stream import store
from rollover.swarm.wire.messages import Head
from tests.speed import within
from tests.swarm.weights_kit import (
    Answer,
    BlobServer,
    Weights,
    assert_same,
    manifest_of,
    open_publisher,
    served,
    serving,
    source,
    trained,
    versions,
    whole,
)

VERSIONS = versions(7)
DEADLINE_S = within(20.0)


@pytest.fixture
def publisher(tmp_path: Path) -> SwarmPublisher:
    return open_publisher(tmp_path, keep_versions=10)


def publish(publisher: SwarmPublisher, *numbers: int) -> list[Head]:
    return [publisher.publish(source(n, VERSIONS[n])).head for n in numbers]


@asynccontextmanager
async def open_fetcher(
    publisher: SwarmPublisher, root: Path, *, run_id: str = "sums", max_model_bytes: int | None = None, **options: Any
) -> AsyncIterator[WeightFetcher]:
    downloads = partial(BlobDownloads, backoff_s=0.001, **options)
    fetcher = WeightFetcher(
        root, publisher.public_key, run_id=run_id, downloads=downloads, max_model_bytes=max_model_bytes
    )
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def fetch(
    fetcher: WeightFetcher, head: Head, *servers: BlobServer, run_epoch: int = 1, deadline_s: float = DEADLINE_S
) -> FetchedWeights:
    return await fetcher.fetch(head, [s.url for s in servers], run_epoch=run_epoch, deadline_s=deadline_s)


def tensors(fetched: FetchedWeights) -> Weights:
    return dict(fetched.tensors())


def blob_names(publisher: SwarmPublisher, head: Head) -> set[str]:
    return {blob.digest for blob in manifest_of(publisher, head).blobs}


def forge(publisher: SwarmPublisher, head: Head, key: Any = None, **changes: Any) -> Head:
    """A publication like ``head`` but for ``changes``, signed by the publisher or by somebody else."""
    manifest = msgspec.structs.replace(manifest_of(publisher, head), **changes)
    digest = publisher.blobs.put(sign(manifest, key or publisher._key))
    return Head(version=manifest.version, manifest=digest)


def answers(digests: set[str], change: Callable[[bytes], bytes], *, times: int = 10**6) -> Answer:
    """Blobs of these names come changed, the first so many times."""
    left = [times]

    def fault(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if digest not in digests or not left[0]:
            return None
        left[0] -= 1
        return whole(change(content), start)

    return fault


def flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 16]) + content[-8:]


# -- what comes ---------------------------------------------------------------------------------------------------


async def test_full_weights_and_deltas_come_bit_for_bit(publisher: SwarmPublisher, tmp_path: Path) -> None:
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            for version in range(3):
                (head,) = publish(publisher, version)
                fetched = await fetch(fetcher, head, server)
                assert fetcher.held is fetched
                assert (fetched.version, fetched.digest) == (version, head.manifest)
                assert_same(tensors(fetched), served(VERSIONS[version]))
                manifest = manifest_of(publisher, head)
                files = sum(f.blob.num_bytes for f in manifest.files) if version == 0 else 0
                size = len(publisher.blobs.read(head.manifest))
                assert fetched.wire_bytes == manifest.wire_bytes + files + size
                fetched.manifest.require_full(version, "an engine")
                assert [spec.dtype for spec in fetched.manifest.tensors] == 3 * ["bfloat16"]
            asked = server.num_asked
            assert await fetch(fetcher, head, server) is fetched
            assert server.num_asked == asked


async def test_the_folder_is_a_model_folder(publisher: SwarmPublisher, tmp_path: Path) -> None:
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            for head in publish(publisher, 0, 1, 2):
                fetched = await fetch(fetcher, head, server)
                assert fetched.folder is None
                folder = fetched.write_folder(tmp_path / "models")
                assert fetched.folder == folder == fetched.write_folder(tmp_path / "models")
        assert_same(load_file(folder / "model.safetensors"), dict(sorted(served(VERSIONS[2]).items())))
        for name in ("config.json", "tokenizer.json"):
            assert (folder / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
        assert [name[:5] for name in sorted(os.listdir(tmp_path / "models"))] == ["e1v1-", "e1v2-"]


async def test_a_worker_that_comes_late_or_lags_walks_the_chain(publisher: SwarmPublisher, tmp_path: Path) -> None:
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "a") as late, open_fetcher(publisher, tmp_path / "b") as lagging:
            first, *_, last = publish(publisher, 0, 1, 2, 3, 4)
            assert_same(tensors(await fetch(late, last, server)), served(VERSIONS[4]))
            await fetch(lagging, first, server)
            fetched = await fetch(lagging, last, server)
            assert_same(tensors(fetched), served(VERSIONS[4]))
            assert fetched.wire_bytes < manifest_of(publisher, first).wire_bytes / 2


async def test_a_worker_started_again_fetches_only_what_is_new(publisher: SwarmPublisher, tmp_path: Path) -> None:
    with serving(publisher.blobs.root) as server:
        first, second = publish(publisher, 0, 1)
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            await fetch(fetcher, first, server)
            await fetch(fetcher, second, server)
        asked = server.num_asked
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            again = await fetch(fetcher, second, server)
            assert (server.num_asked, again.wire_bytes) == (asked, 0)
            assert_same(tensors(again), served(VERSIONS[1]))


# -- blobs that arrive damaged, late or not at all --------------------------------------------------------------------


async def test_a_blob_that_stays_wrong_changes_nothing_and_is_named(publisher: SwarmPublisher, tmp_path: Path) -> None:
    first, second = publish(publisher, 0, 1)
    (name,) = blob_names(publisher, second)
    with serving(publisher.blobs.root, answers({name}, flipped)) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            before = await fetch(fetcher, first, server)
            with pytest.raises(EngineTimeout) as refusal:
                await fetch(fetcher, second, server, deadline_s=2.0)
            assert "version 1 of the weights did not arrive within" in str(refusal.value)
            assert f"blob {name[:16]} from" in str(refusal.value) and server.url in str(refusal.value)
            assert fetcher.held is before
            assert_same(tensors(before), served(VERSIONS[0]))
            server.fault = None
            assert_same(tensors(await fetch(fetcher, second, server)), served(VERSIONS[1]))


@pytest.mark.parametrize("range_answer", ["whole", "refused"])
async def test_without_range_the_whole_blob_comes(publisher: SwarmPublisher, tmp_path: Path, range_answer: str) -> None:
    (head,) = publish(publisher, 0)
    (name,) = blob_names(publisher, head)
    (tmp_path / "worker" / "blobs").mkdir(parents=True)
    (tmp_path / "worker" / "blobs" / f".partial-{name}").write_bytes(b"something else")

    def fault(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if not start:
            return None
        return whole(content) if range_answer == "whole" else (416, {"Content-Length": "0"}, b"")

    with serving(publisher.blobs.root, fault) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            assert_same(tensors(await fetch(fetcher, head, server)), served(VERSIONS[0]))


async def test_a_missing_delta_is_refused_and_the_next_full_weights_are_taken(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, anchor_every=4, keep_versions=10)
    first, second, third = publish(publisher, 0, 1, 2)
    publisher.blobs.path(second.manifest).unlink()
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            before = await fetch(fetcher, first, server)
            message = "version 2 is a delta to version 1, which this worker does not hold and cannot get: no source has"
            with pytest.raises(PublicationError, match=message):
                await fetch(fetcher, third, server)
            assert fetcher.held is before
            shutil.rmtree(tmp_path / "swarm" / "blobs")
            again = open_publisher(tmp_path, run_epoch=2)
            full = again.publish(source(3, VERSIONS[3]))
            assert full.kind == "full"
            assert_same(tensors(await fetch(fetcher, full.head, server, run_epoch=2)), served(VERSIONS[3]))


async def test_a_delta_on_altered_weights_is_replaced_by_full_ones(publisher: SwarmPublisher, tmp_path: Path) -> None:
    first, second = publish(publisher, 0, 1)
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            held = await fetch(fetcher, first, server)
            held.contents["model.layers.0.up.weight"][:] ^= 64
            assert_same(tensors(await fetch(fetcher, second, server)), served(VERSIONS[1]))


# -- publications that are refused ----------------------------------------------------------------------------------


async def refused(
    publisher: SwarmPublisher, root: Path, head: Head, message: str, *before: Head, **options: Any
) -> None:
    """After the publications ``before``, ``head`` is refused and changes nothing."""
    run_epoch, error = options.pop("run_epoch", 1), options.pop("error", PublicationError)
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, root, **options) as fetcher:
            held = None
            for earlier in before:
                held = await fetch(fetcher, earlier, server)
            with pytest.raises(error, match=message):
                await fetch(fetcher, head, server, run_epoch=run_epoch)
            assert fetcher.held is held


async def test_another_publishers_manifest(publisher: SwarmPublisher, tmp_path: Path) -> None:
    forged = forge(publisher, publish(publisher, 0)[0], Ed25519PrivateKey.generate())
    message = "not signed by the publisher whose key this worker was given with its token: ask the run's owner"
    await refused(publisher, tmp_path / "worker", forged, message, error=PublicationRefused)


async def test_another_run(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    message = "weights of the run 'sums', not of 'other'"
    await refused(publisher, tmp_path / "worker", head, message, run_id="other", error=PublicationRefused)


async def test_another_epoch_or_version_than_was_announced(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    message = "version 0 of epoch 2 was announced, but its manifest is of version 0 of epoch 1"
    await refused(publisher, tmp_path / "a", head, message, run_epoch=2)
    claimed = Head(version=7, manifest=head.manifest)
    await refused(publisher, tmp_path / "b", claimed, "version 7 of epoch 1 was announced, but .* version 0 of epoch 1")


async def test_old_publications_that_are_played_again_are_refused(publisher: SwarmPublisher, tmp_path: Path) -> None:
    first, second = publish(publisher, 0, 1)
    message = "version 0 of epoch 1 is outdated: this worker has already had version 1 of epoch 1"
    await refused(publisher, tmp_path / "worker", first, message, second, error=PublicationRefused)
    await refused(publisher, tmp_path / "worker", first, message, error=PublicationRefused)


async def test_a_second_manifest_of_one_version(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    twin = forge(publisher, head, files=())
    await refused(publisher, tmp_path / "worker", twin, "version 0 of epoch 1 is outdated", head)


async def test_another_tokenizer(publisher: SwarmPublisher, tmp_path: Path) -> None:
    first, second = publish(publisher, 0, 1)
    other = forge(publisher, second, model="0" * 64)
    message = "version 1 has a config or tokenizer other than version 0"
    await refused(publisher, tmp_path / "a", other, message, first, error=PublicationRefused)
    alone = forge(publisher, first, model="0" * 64)
    await refused(publisher, tmp_path / "b", alone, "config and tokenizer of version 0 do not belong to its model")


async def test_a_tensor_that_does_not_come_out_as_the_manifest_says(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    tensors = manifest_of(publisher, head).tensors
    wrong = forge(publisher, head, tensors=(msgspec.structs.replace(tensors[0], digest="0" * 64), *tensors[1:]))
    message = "tensor 'model.embed_tokens.weight' of version 0 came out with the digest .* instead of 0000"
    await refused(publisher, tmp_path / "worker", wrong, message)


async def test_a_delta_on_another_base_than_it_was_made_from(publisher: SwarmPublisher, tmp_path: Path) -> None:
    first, second, third = publish(publisher, 0, 1, 2)
    wrong = forge(publisher, third, base_manifest=first.manifest, base_version=0)
    message = "version 2 came out with the digest .* it was not made from version 0"
    await refused(publisher, tmp_path / "a", wrong, message, first)
    await refused(publisher, tmp_path / "b", wrong, message)
    lying = forge(publisher, third, base_manifest=first.manifest)
    await refused(publisher, tmp_path / "c", lying, "version 2 of epoch 1 cannot rest on version 0", second)


async def test_a_delta_that_rests_on_a_later_version(publisher: SwarmPublisher, tmp_path: Path) -> None:
    first, second, third = publish(publisher, 0, 1, 2)
    circle = forge(publisher, second, base_manifest=third.manifest, base_version=2)
    await refused(publisher, tmp_path / "worker", circle, "version 1 of epoch 1 cannot rest on version 2", first)


async def test_weights_beyond_this_machines_memory(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    message = "the weights of version 0 take 46,720 bytes, but this worker has memory for 40,000"
    await refused(publisher, tmp_path / "a", head, message, error=PublicationRefused, max_model_bytes=40_000)
    tensors = manifest_of(publisher, head).tensors
    huge = msgspec.structs.replace(tensors[0], shape=(2**30, 16), encoding="difference", num_bytes=0)
    bomb = forge(publisher, *publish(publisher, 1), tensors=(huge,))
    await refused(publisher, tmp_path / "b", bomb, "take 34,359,738,368 bytes", head, error=PublicationRefused)


async def test_a_blob_that_holds_more_than_it_says(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    bomb = msgspec.structs.replace(store(b"\0" * 2**26, publisher.blobs), raw_bytes=46_720)
    message = f"blob {bomb.digest} holds 67,108,864 bytes, the manifest says 46,720"
    await refused(publisher, tmp_path / "worker", forge(publisher, head, blobs=(bomb,)), message)


# -- several sources, deadlines, a head that moves ------------------------------------------------------------------


async def test_a_source_that_hangs_is_named_at_the_deadline(publisher: SwarmPublisher, tmp_path: Path) -> None:
    (head,) = publish(publisher, 0)
    gate = threading.Event()

    def hangs(*asked: Any) -> None:
        gate.wait(within(20))

    with serving(publisher.blobs.root, hangs) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            message = f"version 0 .* still waiting for blob {head.manifest[:16]} from {server.url}"
            with pytest.raises(EngineTimeout, match=message):
                await fetch(fetcher, head, server, deadline_s=0.1)
            gate.set()
            assert_same(tensors(await fetch(fetcher, head, server)), served(VERSIONS[0]))


async def test_a_head_that_moves_during_a_fetch(publisher: SwarmPublisher, tmp_path: Path) -> None:
    """The old fetch is cancelled, the new one goes on with the blobs that are there."""
    first, second = publish(publisher, 0, 1)
    arrived = threading.Event()
    (name,) = blob_names(publisher, second)
    gate = threading.Event()

    def held_up(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        if digest == name:
            arrived.set()
            gate.wait(within(20))
        return None

    with serving(publisher.blobs.root, held_up) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            before = await fetch(fetcher, first, server)
            old = asyncio.create_task(fetch(fetcher, second, server))
            await asyncio.to_thread(arrived.wait, 20)
            (third,) = publish(publisher, 2)
            new = asyncio.create_task(fetch(fetcher, third, server))
            await asyncio.sleep(0)
            assert fetcher.held is before
            old.cancel()
            with pytest.raises(asyncio.CancelledError):
                await old
            gate.set()
            assert_same(tensors(await new), served(VERSIONS[2]))
            assert fetcher.held is await new


async def test_a_full_disk_at_the_worker_is_said_and_changes_nothing(
    publisher: SwarmPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(publisher, 0, 1)
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            before = await fetch(fetcher, first, server)
            with monkeypatch.context() as patched:
                patched.setattr(blobs.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
                with pytest.raises(ResourceError, match="no space left on the disk"):
                    await fetch(fetcher, second, server)
            assert fetcher.held is before
            assert_same(tensors(await fetch(fetcher, second, server)), served(VERSIONS[1]))


@pytest.mark.parametrize("seed", range(3))
async def test_a_worker_has_what_was_published_or_keeps_what_it_had(tmp_path: Path, seed: int) -> None:
    """Publications, restarts of either side, damage on either disk and on the wire, in any order."""
    rng = random.Random(seed)
    published: dict[str, Weights] = {}
    weights = VERSIONS[0]
    epoch, version = 1, -1
    publisher = open_publisher(tmp_path, anchor_every=rng.randint(1, 4), keep_versions=rng.randint(1, 3))

    def misbehaves(server: BlobServer, digest: str, content: bytes, start: int) -> Any:
        status, headers, body = whole(content, start)
        answers = (
            [None] * 6
            + [(503, {"Content-Length": "0"}, b""), (status, headers, body[: len(body) // 2])]
            + [whole(flipped(content)), whole(content)]
        )
        return rng.choice(answers) if content else None

    num_fetched = 0
    fetchers = AsyncExitStack()
    with serving(publisher.blobs.root, misbehaves) as server:
        fetcher = await fetchers.enter_async_context(open_fetcher(publisher, tmp_path / "worker"))
        for _ in range(40):
            event = rng.choice(
                ["publish", "publish", "fetch", "fetch", "fetch", "restart trainer", "restart worker", "rot"]
            )
            if event == "publish":
                weights = trained(weights, rng.randrange(10**6), learning_rate=rng.choice([1e-7, 1e-6, 1e-2]))
                version += rng.randint(1, 3)
                published[publisher.publish(source(version, weights)).head.manifest] = served(weights)
            elif event == "restart trainer":
                epoch, version = epoch + 1, rng.randint(-1, version)
                publisher = open_publisher(tmp_path, run_epoch=epoch, anchor_every=3, keep_versions=2)
                version += 1
                published[publisher.publish(source(version, weights)).head.manifest] = served(weights)
            elif event == "restart worker":
                await fetchers.aclose()
                fetcher = await fetchers.enter_async_context(open_fetcher(publisher, tmp_path / "worker"))
            elif event == "rot":
                at = rng.choice([tmp_path / "worker" / "blobs", publisher.blobs.root])
                if names := sorted(name for name in os.listdir(at) if not name.startswith(".")):
                    (at / rng.choice(names)).write_bytes(b"rot")
            elif (head := publisher.head) is not None:
                before = fetcher.held
                try:
                    fetched = await fetch(fetcher, head, server, run_epoch=epoch, deadline_s=0.5)
                except (EngineTimeout, PublicationError):
                    assert fetcher.held is before
                    continue
                num_fetched += 1
                assert fetched.digest == head.manifest
                assert_same(tensors(fetched), published[head.manifest])
                if before is not None:  # nobody has written into what an engine may be reading
                    assert_same(tensors(before), published[before.digest])
        await fetchers.aclose()
    assert num_fetched >= 1


async def test_old_blobs_do_not_pile_up_at_the_worker(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, anchor_every=2)
    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            for version in range(5):
                await fetch(fetcher, *publish(publisher, version), server)
        manifest = manifest_of(publisher, publisher.head)  # type: ignore[arg-type]
        assert manifest.kind == "full"
    left = os.listdir(tmp_path / "worker" / "blobs")
    assert len(left) <= 8  # two chains of at most two publications, and two files
