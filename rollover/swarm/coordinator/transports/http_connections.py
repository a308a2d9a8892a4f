"""Connections over which a peer has yet to make its request: they have a deadline, and their number is limited.

What it keeps true: whoever has shown no token holds a connection for ``REQUEST_TIMEOUT_S`` at the longest before a
request, and again after each answer; at most ``MAX_WAITING`` such connections are open.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import h11

REQUEST_TIMEOUT_S = 10.0
"""Seconds that a client may take from the opening of a connection, or the last answer, to a complete request."""


def _max_waiting() -> int:
    """Return a quarter of the files that this process may open, so that there are enough for its work, or as many as a
    thousand workers need that dial in at once."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2048 if num_files == resource.RLIM_INFINITY else min(2048, num_files // 4)


MAX_WAITING = _max_waiting()
"""Open connections without a request; for one more, the one that has waited longest is cut."""


class ImpatientHttp(H11Protocol):
    """The HTTP of a connection, until it becomes a WebSocket. uvicorn itself waits for a first request for ever.

    Example: ``uvicorn.Config(app, http=ImpatientHttp)``
    """

    _deadline: asyncio.TimerHandle | None = None
    """Set while no request is under way."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        waiting = [c for c in self.connections if isinstance(c, ImpatientHttp) and c._deadline is not None]
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda connection: connection._since_s).cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_nothing()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._expect_nothing()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    def cut(self) -> None:
        """End the connection."""
        self._expect_nothing()
        self.transport.abort()

    def _expect_request(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self.cut)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def _since_s(self) -> float:
        return self._deadline.when() if self._deadline is not None else 0.0
