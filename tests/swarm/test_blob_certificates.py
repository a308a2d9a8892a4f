"""With a certificate of the trainer's own, workers still fetch weights from relays and stores that their system trusts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker.joining import open_downloads
from tests.swarm.certificates import make_certificate
from tests.swarm.weights_kit import BlobServer, serving, store_blobs
from tests.swarm.worker_kit import TOKEN

Certificate = tuple[str, str]


@pytest.fixture
def trainers(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, "127.0.0.1", name="trainer")


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    """A certificate that the system trusts, as OpenSSL is told."""
    certificate = make_certificate(tmp_path, "127.0.0.1", name="store")
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    return certificate


@asynccontextmanager
async def downloads_of(
    trainer: BlobServer, folder: Path, ca_file: str, said: list[str], *urls: str
) -> AsyncIterator[BlobDownloads]:
    address = CoordinatorAddress.parse(f"wss://{trainer.url.removeprefix('https://').removesuffix('/blobs')}")
    downloads = open_downloads(BlobFolder(folder), address, TOKEN, Path(ca_file), say=said.append)
    downloads.use((*urls, address.blob_url))
    try:
        yield downloads
    finally:
        await downloads.close()


async def test_the_system_vouches_for_stores_alone(tmp_path: Path, trainers: Certificate, stores: Certificate) -> None:
    first, second = store_blobs(tmp_path / "blobs", b"weights", b"more weights")
    said: list[str] = []
    with (
        serving(tmp_path / "blobs", certificate=trainers) as trainer,
        serving(tmp_path / "blobs", certificate=stores) as store,
    ):
        async with downloads_of(trainer, tmp_path / "worker", trainers[0], said, store.url) as downloads:
            await downloads.get([first])
        async with downloads_of(trainer, tmp_path / "worker", trainers[0], said) as downloads:
            await downloads.get([second])
    assert [digest for digest, _ in store.asked] == [first.digest] and store.authorized == [None]
    assert [digest for digest, _ in trainer.asked] == [second.digest]
    assert trainer.authorized == [f"Bearer {TOKEN.text}"] and not said


async def test_a_relay_that_nobody_vouches_for_is_named_with_the_remedy(
    tmp_path: Path, trainers: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = store_blobs(tmp_path / "blobs", b"weights", b"more weights")
    relays, said = make_certificate(tmp_path, "127.0.0.1", name="relay"), list[str]()
    both = tmp_path / "both.pem"
    both.write_text(Path(trainers[0]).read_text() + Path(relays[0]).read_text())
    with (
        serving(tmp_path / "blobs", certificate=trainers) as trainer,
        serving(tmp_path / "blobs", certificate=relays) as relay,
    ):
        for ca_file, num_asked in ((trainers[0], 0), (str(both), 2)):
            folder = tmp_path / f"worker-{num_asked}"
            async with downloads_of(trainer, folder, ca_file, said, relay.url) as downloads:
                for blob in blobs:
                    await downloads.get([blob])
            assert relay.num_asked == num_asked
    assert trainer.num_asked == 2
    assert said == [
        f"weights cannot be fetched from {relay.url}, so the next source is asked: its certificate is not signed by an"
        " authority that this worker trusts (self-signed certificate): name the file of its authority, or of the"
        " certificate itself, with --ca-file, or add it to that file"
    ]


async def test_the_token_goes_to_the_trainer_alone(tmp_path: Path, trainers: Certificate, stores: Certificate) -> None:
    """Somebody with a certificate that the system trusts has taken the trainer's address."""
    (blob,) = store_blobs(tmp_path / "blobs", b"weights")
    said: list[str] = []
    with serving(tmp_path / "blobs", certificate=stores) as impostor, pytest.raises(TimeoutError):
        async with downloads_of(impostor, tmp_path / "worker", trainers[0], said) as downloads:
            async with asyncio.timeout(0.5):
                await downloads.get([blob])
    assert impostor.num_asked == 0 and "not signed by an authority" in said[0]
