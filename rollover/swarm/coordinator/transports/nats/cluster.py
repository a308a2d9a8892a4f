"""The coordinator's place on a NATS cluster, which it takes again whenever it is lost.

====================  ==========================  ==================================================================
task                  waits for                   is unblocked by
====================  ==========================  ==================================================================
``keep``              the end of the connection   the server's end, its silence for two pings, a missing permission
... when lost         a server that takes us      the next attempt, for ever; workers keep what they decode meanwhile
====================  ==========================  ==================================================================

What it keeps true: one run is under a subject at a time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from random import Random

from rollover.errors import ConfigError
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.client import NatsConnection, NatsFailure, connect

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_ASK_TIMEOUT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class NatsCluster:
    """A connection to a cluster and, when it is lost, the next one.

    Example: ``await cluster.open()``, then ``cluster.connection`` is what to publish on, or ``None`` while it is lost.
    """

    def __init__(self, address: NatsAddress, *, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._tls = tls
        self._connection: NatsConnection | None = None
        self._random = Random()

    @property
    def connection(self) -> NatsConnection | None:
        """Return the connection to the cluster, while there is one."""
        return self._connection if self._connection is not None and self._connection.is_open else None

    async def open(self) -> None:
        """Connect. Raises ``ConfigError`` when it cannot connect, or another run uses the subject."""
        try:
            self._connection = await self._connected()
        except NatsFailure as e:
            raise self.unusable(e) from e

    def unusable(self, reason: object) -> ConfigError:
        """Return the error that names the cluster's key."""
        return ConfigError(f"engine.nats_url = {str(self.address)!r} cannot be used: {reason}")

    async def keep(self, lost: Callable[[], None], back: Callable[[NatsConnection], Awaitable[None]]) -> None:
        """Call ``lost`` whenever the connection is lost, and ``back`` with the next one, until cancelled."""
        while True:
            assert self._connection is not None, "the cluster is open"
            failure = await self._connection.until_ended()
            logger.warning("the connection to %s is lost: %s", self.address, failure)
            lost()
            await self._connection.close()
            await self._come_back(back)
            logger.warning("the connection to %s is back", self.address)

    async def close(self) -> None:
        """Leave the cluster after everything that was sent."""
        if self._connection is not None:
            await self._connection.close()

    async def _come_back(self, back: Callable[[NatsConnection], Awaitable[None]]) -> None:
        num_failures, last_said = 0, ""
        while True:
            connection: NatsConnection | None = None
            try:
                connection = await self._connected()
                await back(connection)
                self._connection = connection
                return
            except NatsFailure as e:
                num_failures += 1
                if connection is not None:
                    await connection.close()
                if str(e) != last_said:
                    logger.warning("%s: %s; trying again", self.address, e)
                last_said = str(e)
            longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_failures, 10))
            await asyncio.sleep(longest_s * (0.5 + 0.5 * self._random.random()))

    async def _connected(self) -> NatsConnection:
        """Connect, unless another coordinator is there. Raises ``NatsFailure``."""
        connection = await connect(
            self.address, tls=self._tls, name="rollover", timeout_s=_CONNECT_TIMEOUT_S, replies=self.address.replies()
        )
        try:
            await self.stay_away_from_others(connection)
        except NatsFailure:
            await connection.close()
            raise
        return connection

    async def stay_away_from_others(self, connection: NatsConnection, own_id: bytes = b"") -> None:
        """Ask whether another run uses the subject; ``own_id`` tells the asker's own listener who asks. Raises
        ``NatsFailure`` if one does."""
        if await connection.asks(self.address.coordinator, own_id, timeout_s=_ASK_TIMEOUT_S):
            raise NatsFailure(
                f"another run already uses the subject {self.address.subject!r}: end that run, or"
                " name another subject at the end of the address",
                is_final=True,
            )
