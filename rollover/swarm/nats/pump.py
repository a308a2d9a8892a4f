"""The one sender of a session's messages: numbers go out in order, since nothing else sends."""

from __future__ import annotations

import asyncio

from rollover.swarm.nats.client import NatsConnection
from rollover.swarm.nats.sealed import SealedChannel


class ChannelPump:
    """Publishes what a channel lets out.

    Args:
        subject: where the other side of the session listens.
        reply: named in each message; one on a subject without a listener is answered there.

    Example: ``channel.put(frame); pump.wake(); await pump.until_sent()``
    """

    def __init__(self, connection: NatsConnection, channel: SealedChannel, *, subject: str, reply: str = "") -> None:
        self._connection, self._channel = connection, channel
        self._subject, self._reply = subject, reply
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()

    def wake(self) -> None:
        """Look for something to send: a frame was put, or the other side has taken some, or has sent some."""
        self._sent.clear()
        self._wake.set()

    async def until_sent(self) -> None:
        """Return when all that was put is sent."""
        await self._sent.wait()

    async def run(self) -> None:
        """Send until cancelled. Raises ``NatsFailure``."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for message in self._channel.outgoing():
                await self._connection.publish(self._subject, message, reply=self._reply)
            if self._channel.is_drained and not self._wake.is_set():
                self._sent.set()
