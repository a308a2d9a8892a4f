"""Decides when a generation call may be sent to a server.

What it keeps true: no call is sent while the server is paused, while all its calls are being aborted, or while it
serves weights that we do not know. A server that has been silent for ``RESTART_S`` may be a new process behind the same
address, so it is asked for the label of its weights first, once for all calls that wait.
"""

from __future__ import annotations

import asyncio

from rollover.engine.servers.background import BackgroundTasks
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.served_weights import ServedWeights

RESTART_S = 2.0
"""No server loads a model in less time: one heard from within it is still the same process."""


class SendGate:
    """Lets calls through to one server.

    Example: between ``gate.is_open.clear()`` and ``gate.is_open.set()`` every ``await gate.passed()`` waits.
    """

    def __init__(self, client: HTTPClient, served: ServedWeights, tasks: BackgroundTasks) -> None:
        self._client = client
        self._served = served
        self._tasks = tasks
        self.is_open = asyncio.Event()
        """Not set from the begin of a pause to its end."""
        self.is_open.set()
        self.held = asyncio.Lock()
        """Held while no call may be sent, because all are being aborted."""
        self._check: asyncio.Task[None] | None = None

    async def passed(self) -> None:
        """Return when a call may be sent. Raises ``EngineError`` when the server does not serve our weights."""
        await self._ready()
        while self.held.locked():
            async with self.held:
                pass
            await self._ready()

    async def check_weights(self) -> None:
        """Raise ``EngineError`` when the server serves other weights than it was given."""
        await self._served.check(still=self.is_open.is_set)

    async def _ready(self) -> None:
        while True:
            await self.is_open.wait()
            self._served.refuse_when_unknown()
            if asyncio.get_running_loop().time() - self._client.last_heard_s <= RESTART_S:
                return
            if self._check is None or self._check.done():
                self._check = self._tasks.start(self.check_weights())
                self._check.add_done_callback(_retrieve_error)
            await asyncio.shield(self._check)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """All who wait for a check may have been cancelled; asyncio would complain of an error that nobody has seen."""
    if not task.cancelled():
        task.exception()
