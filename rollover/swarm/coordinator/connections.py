"""The connections of a swarm's members, by lease."""

from __future__ import annotations

import logging

from rollover.swarm.coordinator.transports.base import Connection
from rollover.swarm.wire.messages import FromCoordinator, Goodbye, ProtocolError, encode

logger = logging.getLogger(__name__)


class Connections:
    """Sends messages to whoever holds a lease; what has no connection is not sent.

    Example: ``connections.send(3, Abort(call_ids=("a#1.",)))``
    """

    def __init__(self) -> None:
        self._open: dict[int, Connection] = {}

    def add(self, lease: int, connection: Connection) -> None:
        self._open[lease] = connection

    def forget(self, lease: int) -> None:
        """Take note that the connection of a lease is gone."""
        self._open.pop(lease, None)

    def send(self, lease: int, message: FromCoordinator) -> None:
        connection = self._open.get(lease)
        if connection is None:
            return
        try:
            connection.send(encode(lease, message))
        except ProtocolError as e:
            logger.error("a message to the worker of lease %d cannot be sent: %s", lease, e)
            connection.close()

    def close(self, lease: int) -> None:
        """End the connection of a lease after everything that was sent."""
        if (connection := self._open.pop(lease, None)) is not None:
            connection.close()

    def say_goodbye(self, goodbye: Goodbye) -> None:
        """Send all members away; the owner of the connections closes them."""
        for lease in list(self._open):
            self.send(lease, goodbye)
