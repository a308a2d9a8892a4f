"""One worker's session over NATS, on the coordinator's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollover.swarm.coordinator.transports.base import MAX_UNSENT_BYTES, Sessions, WorkerConversation
from rollover.swarm.nats.client import NatsConnection, NatsFailure
from rollover.swarm.nats.pump import ChannelPump
from rollover.swarm.nats.sealed import SealedChannel, SessionKeys
from rollover.swarm.wire.messages import ProtocolError

_CLOSE_TIMEOUT_S = 5.0


class NatsSession:
    """A ``Connection`` over NATS, with what the worker says on it.

    Args:
        subject: where the worker's messages come.
        inbox: where it listens.
        ended: called once, when the session is over.

    Example: ``session.came(payload)`` for each message to ``subject``; ``session.send(frame)`` returns at once.
    """

    def __init__(
        self,
        connection: NatsConnection,
        sessions: Sessions,
        *,
        name: str,
        token_hash: str,
        subject: str,
        inbox: str,
        ended: Callable[[NatsSession], None],
    ) -> None:
        keys = SessionKeys.of(token_hash, inbox, subject)
        self.name, self.subject, self.inbox = name, subject, inbox
        self._channel = SealedChannel(sending=keys.down, receiving=keys.up, part_bytes=connection.part_bytes)
        self._pump = ChannelPump(connection, self._channel, subject=inbox, reply=subject)
        self._conversation = WorkerConversation(name, sessions, self)
        self._ended = ended
        self._is_closing = self._is_over = False
        self.running = asyncio.create_task(self._run())
        self._closing: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Return True once the worker has said hello, under a seal that only the token makes."""
        return self._conversation.has_begun

    @property
    def is_authentic(self) -> bool:
        """Return True once the worker has shown that it knows the token."""
        return self._channel.is_authentic

    def send(self, frame: bytes) -> None:
        if self._is_closing:
            return
        if self._channel.num_waiting_bytes + len(frame) > MAX_UNSENT_BYTES:
            self.end()
            return
        self._channel.put(frame)
        self._pump.wake()

    def close(self) -> None:
        """End the session after everything that was sent; a worker that does not take that gets
        ``_CLOSE_TIMEOUT_S``."""
        if not self._is_closing:
            self._is_closing = True
            self._closing = asyncio.create_task(self._close())

    def came(self, payload: bytes) -> None:
        """Deal with a message of the worker. Raises ``ProtocolError`` when the session must end."""
        taken = self._channel.take(payload)
        if taken is not None and not self._is_closing:
            frame, size = taken
            self._conversation.took(frame)
            self._channel.consumed(size)
        self._pump.wake()

    def end(self) -> None:
        """End the session now."""
        if not self._is_over:
            self._is_over = self._is_closing = True
            self.running.cancel()
            if self._closing is not None:
                self._closing.cancel()
            self._ended(self)
            self._conversation.ended()

    async def until_over(self) -> None:
        """Return when a session that was closed has ended."""
        if self._closing is not None:
            await asyncio.gather(self._closing, self.running, return_exceptions=True)

    async def _close(self) -> None:
        sent = asyncio.create_task(self._pump.until_sent())
        try:
            await asyncio.wait((sent,), timeout=_CLOSE_TIMEOUT_S)
        finally:
            sent.cancel()
        self._closing = None
        self.end()

    async def _run(self) -> None:
        try:
            await self._pump.run()
        except (NatsFailure, ProtocolError):  # the connection has ended: its owner deals with all sessions
            return
