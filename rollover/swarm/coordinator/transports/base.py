"""The parts that all transports have in common: what a coordinator asks of one, and a worker's frames as messages.

::

    worker ──frames──▶ transport ──▶ WorkerConversation ──messages──▶ Sessions (the coordinator's shell)
    worker ◀──frames── transport ◀── Connection ◀───────────────┘

A transport decides nothing: it says who a worker is, carries frames in order, and ends what breaks the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from rollover.swarm.wire.messages import FromWorker, Goodbye, Hello, ProtocolError, decode_up, encode

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""Seconds of silence after which a peer that has opened a connection is disconnected."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Unread bytes at which a worker is disconnected; it comes back and continues."""


Refusal = Literal["token", "protocol", "frame"]
"""The reason of a refusal: a token that is unknown or revoked, another protocol, a frame that breaks the protocol."""


class Connection(Protocol):
    """The sending side of one worker's connection.

    Example: ``connection.send(frame)`` returns at once; ``connection.close()`` ends it after what was sent.
    """

    def send(self, frame: bytes) -> None: ...

    def close(self) -> None: ...


class Sessions(Protocol):
    """The coordinator's shell, as a transport sees it.

    Example: ``connected("laptop", hello, connection)`` returns the lease under which its messages are then
    ``received``.
    """

    def connected(self, name: str, hello: Hello, connection: Connection) -> int: ...

    def received(self, lease: int, message: FromWorker) -> None: ...

    def fenced(self, message: FromWorker) -> None:
        """Count a message under a lease that is not its connection's, and ignore it."""
        ...

    def disconnected(self, lease: int) -> None: ...

    def refused(self, cause: Refusal) -> None:
        """Count a client, or a frame of a worker, that the transport has refused."""
        ...


class Transport(Protocol):
    """A place where workers are met, opened by its maker, which raises ``ConfigError`` where it cannot be.

    Example: ``await transport.serve()`` answers workers from then on; ``await transport.close()`` ends all connections
    after what was sent.
    """

    @property
    def url(self) -> str:
        """Return the address that workers are to join."""
        ...

    async def serve(self) -> None: ...

    async def close(self) -> None: ...


class QueuedConnection:
    """A connection whose frames wait until the transport takes them, up to ``MAX_UNSENT_BYTES``.

    Example: ``await connection.relay(websocket.send_bytes)`` sends what comes until the connection is closed.
    """

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_unsent_bytes = 0
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        if self._is_closed:
            return
        self._num_unsent_bytes += len(frame)
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self.close()
            return
        self._frames.put_nowait(frame)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._frames.put_nowait(None)

    async def relay(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send what comes until the connection is closed."""
        while (frame := await self._frames.get()) is not None:
            await send(frame)
            self._num_unsent_bytes -= len(frame)
            await asyncio.sleep(0)  # lets the event loop notice that the connection is lost


class WorkerConversation:
    """The messages of one worker on one connection: a hello first, then what its lease covers.

    Example: ``conversation.took(frame)`` for each frame in order, and ``conversation.ended()`` when there are no more.
    """

    def __init__(self, name: str, sessions: Sessions, connection: Connection) -> None:
        self._name, self._sessions, self._connection = name, sessions, connection
        self._lease: int | None = None

    def took(self, frame: bytes) -> None:
        """Hand on what a frame says. Raises ``ProtocolError``: the connection must then be ended."""
        try:
            envelope = decode_up(frame)
            if self._lease is not None:
                if envelope.lease == self._lease:
                    self._sessions.received(self._lease, envelope.message)
                else:  # leases are small numbers: nobody may speak for another by naming theirs
                    self._sessions.fenced(envelope.message)
            elif isinstance(envelope.message, Hello):
                self._lease = self._sessions.connected(self._name, envelope.message, self._connection)
            else:
                raise ProtocolError("the first message of a connection must be a hello")
        except ProtocolError as e:
            self._sessions.refused("frame")
            logger.warning("%s broke the protocol and was disconnected: %s", self._name, e)
            raise

    def say_why(self, error: ProtocolError) -> None:
        """Tell the worker what was wrong, in the last message that is sent. It may come back: perhaps the way was to
        blame."""
        reason = f"this worker violates the protocol: {error}"
        self._connection.send(encode(self._lease or 0, Goodbye(reason=reason, is_final=False)))
        self._connection.close()

    def ended(self) -> None:
        """Record that the connection is gone."""
        if self._lease is not None:
            self._sessions.disconnected(self._lease)
