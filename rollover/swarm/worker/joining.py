"""Everything that a worker needs, put together: its folder, its engine, its fetcher, its connection."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from rollover import locks
from rollover.clock import SystemClock
from rollover.errors import RunError
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.fetch import WeightFetcher
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.proxies import ProxiedTransport
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.connection import tls_context
from rollover.swarm.worker.host import OpenEngine
from rollover.swarm.worker.worker import SwarmWorker


def default_cache(token: WorkerToken) -> Path:
    """Return where a worker keeps what it fetches by default."""
    return Path.home() / ".cache" / "rollover" / "workers" / token.name


async def work_for(
    address: CoordinatorAddress,
    token: WorkerToken,
    config: WorkerConfig,
    open_on: OpenEngine,
    cache: Path,
    ca_file: Path | None,
    software: str,
    say: Callable[[str], None],
    started: Callable[[Callable[[str], None]], None],
) -> None:
    """Work for a coordinator until stopped.

    Args:
        open_on: opens the engine on a model folder.
        cache: a folder for blobs and models; no other worker may use it meanwhile.
        ca_file: certificates to check the coordinator's against, in place of the system's. Relays and object stores
            are checked against both.
        software: name and version of this program.
        say: shows a line to the user.
        started: given a function that stops the worker, which any thread and any signal handler may call.

    Raises:
        RolloverError: the coordinator refuses this worker, or its engine cannot be used.
    """

    def open_fetcher(run_id: str) -> WeightFetcher:
        folder = cache / "runs" / hashlib.sha256(run_id.encode()).hexdigest()[:32]
        return WeightFetcher(folder, token.publisher_key, run_id=run_id, downloads=downloads)

    def downloads(folder: BlobFolder) -> BlobDownloads:
        return open_downloads(folder, address, token, ca_file, say=say)

    work = cache / "engine"
    with _own(cache):
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
        worker = SwarmWorker(
            address,
            token,
            config,
            open_on=open_on,
            open_fetcher=open_fetcher,
            clock=SystemClock(),
            random=Random(secrets.randbits(64)),
            say=say,
            work=work,
            software=software,
            tls=_of_coordinator(address, ca_file),
        )
        loop = asyncio.get_running_loop()
        started(lambda reason: _call(loop, worker, reason))
        await worker.run()


def open_downloads(
    folder: BlobFolder,
    address: CoordinatorAddress,
    token: WorkerToken,
    ca_file: Path | None,
    *,
    say: Callable[[str], None],
) -> BlobDownloads:
    """Return what fetches blobs from the coordinator, which is given the token, and from any relay and object store,
    which are not. So the certificates of the latter may also be signed by whom the system trusts."""
    tls = _of_coordinator(address, ca_file)
    return BlobDownloads(
        folder,
        verify=tls_context(ca_file, and_system=True),
        authorization={address.blob_url: f"Bearer {token.text}"},
        transports={} if tls is None else {f"https://{address.netloc}": ProxiedTransport(verify=tls)},
        say=say,
    )


def _of_coordinator(address: CoordinatorAddress, ca_file: Path | None) -> ssl.SSLContext | None:
    return tls_context(ca_file) if address.is_encrypted or ca_file is not None else None


def _call(loop: asyncio.AbstractEventLoop, worker: SwarmWorker, reason: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(worker.stop, reason)


@contextmanager
def _own(cache: Path) -> Iterator[None]:
    """Keep other workers out of the folder. Raises ``RunError`` when one is in it."""
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cache / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks.take(descriptor)
    except BlockingIOError:
        raise RunError(f"{cache} is in use by another worker: give this one a folder of its own with --cache") from None
    try:
        yield
    finally:
        locks.release(descriptor)
