"""Opens the trainer's side of a swarm on a NATS cluster: the connection, and the bucket for the weights."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rollover.errors import ConfigError, EngineError, require
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.transports.base import Sessions
from rollover.swarm.coordinator.transports.nats.cluster import NatsCluster
from rollover.swarm.coordinator.transports.nats.gateway import NatsGateway
from rollover.swarm.nats.client import NatsFailure
from rollover.swarm.nats.credentials import NatsCredentials
from rollover.swarm.nats.objects import NatsBucket
from rollover.swarm.wire.messages import Head
from rollover.weights.base import WeightSource

_AGAIN_S = 0.5


class NatsSide:
    """A run's place on a cluster, before there is an engine for it.

    Example: ``side = await open_nats_side(config)``; workers are told ``side.blob_urls``, and
    ``side.gateway(engine, hashes)`` is the engine's transport.
    """

    def __init__(self, cluster: NatsCluster, bucket: NatsBucket | None) -> None:
        self._cluster, self._bucket = cluster, bucket
        self._fill: Callable[[], Awaitable[None]] | None = None
        """Puts into the bucket what it lacks, once there is something to put."""

    @property
    def blob_urls(self) -> tuple[str, ...]:
        """Return the bucket, where there is one."""
        return () if self._bucket is None else (self._bucket.url,)

    def gateway(self, sessions: Sessions, *, hashes: Callable[[], Mapping[str, str]]) -> NatsGateway:
        """Return the transport."""
        return NatsGateway(self._cluster, sessions, hashes=hashes, fill=self._fill)

    def publishing(
        self, publish: Callable[[int, WeightSource], Head], blobs: Path, *, timeout_s: float
    ) -> Callable[[int, WeightSource], Head]:
        """Return the function that publishes, and returns the new head when all that it needs is in the bucket. It is
        called in a thread."""
        bucket, loop = self._bucket, asyncio.get_running_loop()
        if bucket is None:
            return publish
        self._fill = partial(self._mirror, bucket, blobs, timeout_s)

        def publish_both(version: int, source: WeightSource) -> Head:
            head = publish(version, source)
            asyncio.run_coroutine_threadsafe(self._mirror(bucket, blobs, timeout_s), loop).result()
            return head

        return publish_both

    async def close(self) -> None:
        """Leave the cluster, where no gateway has been made to do that."""
        await self._cluster.close()

    async def _mirror(self, bucket: NatsBucket, blobs: Path, timeout_s: float) -> None:
        """Copy new blobs into the bucket, again and again while that fails."""
        reason: object = "there is no connection to the cluster"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if (connection := self._cluster.connection) is not None:
                        try:
                            await bucket.mirror(connection, blobs)
                            return
                        except NatsFailure as e:
                            reason = e
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise EngineError(
                f"{self._cluster.address}: the weights could not be put into the bucket within {timeout_s:g} s"
                f" (engine.update_timeout_s): {reason}"
            ) from None


async def open_nats_side(config: SwarmConfig) -> NatsSide:
    """Connect to the cluster and find the place for the weights.

    Raises ``ConfigError`` when the cluster cannot be used, another run is under the subject, or the weights have no
    place.
    """
    require("nats", purpose='engine.transport = "nats"')
    address = config.nats_address
    if config.nats_credentials is not None:
        try:
            address = address.having(NatsCredentials.read(Path(config.nats_credentials)))
        except ConfigError as e:
            raise ConfigError(f"engine.nats_credentials: {e}") from None
    cluster = NatsCluster(address, tls=None if config.nats_ca_file is None else _tls(config.nats_ca_file))
    await cluster.open()
    bucket: NatsBucket | None = None
    try:
        if config.nats_bucket is not None or not config.blob_urls:
            name = config.nats_bucket or f"rollover-{address.subject.replace('.', '_')}".lower()
            bucket = NatsBucket(name, subject=address.subject)
            assert cluster.connection is not None
            await bucket.open(cluster.connection)
    except NatsFailure as e:
        await cluster.close()
        raise cluster.unusable(e) from e
    return NatsSide(cluster, bucket)


def check_nats(config: SwarmConfig) -> list[str]:
    """Try the cluster and leave it again; return what a user should know. Raises as ``open_nats_side``."""
    with ThreadPoolExecutor(1) as pool:  # the caller may be on an event loop, which this must not be
        return pool.submit(lambda: asyncio.run(_checked(config))).result()


async def _checked(config: SwarmConfig) -> list[str]:
    side = await open_nats_side(config)
    await side.close()
    places = ", ".join((*config.blob_urls, *side.blob_urls))
    return [f"{config.nats_address}; weights are fetched from {places}"]


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise ConfigError(
            f"engine.nats_ca_file = {ca_file!r} holds no certificates that can be read: {reason}"
        ) from None
