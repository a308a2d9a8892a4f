"""The ways to a coordinator: which one an address means."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import httpx

from rollover.errors import require
from rollover.swarm.nats.address import SCHEMES, NatsAddress
from rollover.swarm.publication.proxied import ProxiedTransport
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.connection import CoordinatorConnection, open_connection

JoinAddress = CoordinatorAddress | NatsAddress


def parse_address(url: str, *, insecure: bool = False) -> JoinAddress:
    """Read the address that a worker is to join. Raises ``ConfigError``.

    Example: ``parse_address("nats://127.0.0.1:4222/rollover")`` is a ``NatsAddress``, ``parse_address("wss://a:8790")``
    a ``CoordinatorAddress``.
    """
    if url.partition("://")[0] in SCHEMES:
        return NatsAddress.parse(url, insecure=insecure)
    return CoordinatorAddress.parse(url, insecure=insecure)


def dial(
    address: JoinAddress,
    token: WorkerToken,
    tls: ssl.SSLContext | None,
    *,
    timeout_s: float,
    has_been_member: bool = False,
) -> AbstractAsyncContextManager[CoordinatorConnection]:
    """Open a connection, and close it afterwards. Raises ``Refused`` and ``Disconnected``."""
    if isinstance(address, CoordinatorAddress):
        return open_connection(address, token, tls, timeout_s=timeout_s, has_been_member=has_been_member)
    require("nats", purpose=f"joining {address}")
    from rollover.swarm.worker.nats_link import open_nats

    return open_nats(address, token, tls, timeout_s=timeout_s, has_been_member=has_been_member)


def blob_transports(
    address: JoinAddress, token: WorkerToken, tls: ssl.SSLContext | None, *, timeout_s: float
) -> Mapping[str, httpx.AsyncBaseTransport]:
    """Return the transports that fetch blobs from the coordinator, by the beginning of a URL: the buckets of its NATS
    cluster, or its own port. The port is given the token, so its certificate is checked as strictly as for a
    session."""
    if isinstance(address, CoordinatorAddress):
        return {} if tls is None else {f"https://{address.netloc}": ProxiedTransport(verify=tls)}
    from rollover.swarm.nats.client import connect
    from rollover.swarm.nats.objects import SCHEME, JetStreamTransport

    name, replies = f"rollover worker {token.name}: weights", address.replies(token.name)
    return {
        f"{SCHEME}://": JetStreamTransport(
            lambda: connect(address, tls=tls, name=name, timeout_s=timeout_s, replies=replies)
        )
    }
