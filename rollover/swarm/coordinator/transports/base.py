"""The seam between a coordinator and the gateway through which workers reach it.

::

    worker ──frames──▶ gateway ──messages──▶ Sessions (the coordinator's shell)
    worker ◀──frames── gateway ◀── Connection ◀───┘

The gateway decides nothing: it says who a worker is, carries frames in order, and ends what breaks the protocol.
"""

from __future__ import annotations

from typing import Literal, Protocol

from rollover.swarm.wire.messages import FromWorker, Hello

Refusal = Literal["login", "protocol", "frame"]
"""The reason of a refusal: a token that is unknown or revoked, another protocol, a frame that breaks the protocol."""


class Connection(Protocol):
    """The sending side of one worker's connection.

    Example: ``connection.send(frame)`` returns at once; ``connection.close()`` ends it after what was sent.
    """

    def send(self, frame: bytes) -> None: ...

    def close(self) -> None: ...


class Sessions(Protocol):
    """The coordinator's shell, as the gateway sees it.

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
        """Count a client, or a frame of a worker, that the gateway has refused."""
        ...
