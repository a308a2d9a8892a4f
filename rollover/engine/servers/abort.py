"""Stopping calls of a server: asked for until each has ended, and never waited for longer than allowed.

What it keeps true: only the end of a call proves that it has stopped, whatever the server answers when it is asked; a
call that is not handed over in time ends here, with what it has streamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress

from rollover.engine.servers.call import GenerationCall
from rollover.errors import EngineError

logger = logging.getLogger(__name__)

_FIRST_RESEND_S, _MAX_RESEND_S = 0.05, 1.0


class Stopper:
    """Stops calls of one server.

    Args:
        ask: to stop some calls by their ids, at least one.
        ask_all: in a stronger way, to stop every call.
        open_calls: those that ``ask_all`` stops.
        end: ends a call from here.
        timeout_s: how long a server may take; after half of it, all its calls are stopped.
    """

    def __init__(
        self,
        server: object,
        *,
        ask: Callable[[Collection[str]], Awaitable[None]],
        ask_all: Callable[[], Awaitable[None]],
        open_calls: Callable[[], Collection[GenerationCall]],
        end: Callable[[GenerationCall], None],
        timeout_s: float,
    ) -> None:
        self._server = server
        self._ask = ask
        self._ask_all = ask_all
        self._open_calls = open_calls
        self._end = end
        self._timeout_s = timeout_s

    async def stop(self, calls: Collection[GenerationCall]) -> None:
        """Return when each of ``calls`` has ended, after ``timeout_s`` at the latest."""
        for call in calls:
            call.asked_to_stop = True
            if not call.sent:
                self._end(call)
        for way in (self.ask_by_id, self.ask_for_all):
            if _still_open(calls):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timeout_s / 2):
                        await way(_still_open(calls))
        if late := _still_open(calls):
            logger.warning(
                "%r did not hand over %s in %g s (engine.abort_timeout_s): %s with what had come",
                self._server,
                late[0].request.request_id if len(late) == 1 else f"{len(late)} calls",
                self._timeout_s,
                "it ends" if len(late) == 1 else "they end",
            )
            for call in late:
                self._end(call)

    async def ask_by_id(self, calls: Collection[GenerationCall]) -> None:
        """A call that is still on its way to the server cannot be stopped there: ask again until all have
        ended."""
        wait_s = _FIRST_RESEND_S
        while late := _still_open(calls):
            for call in late:
                call.asked_to_stop = True
            with suppress(EngineError):  # a server that fails ends the calls in its own way, or not at all
                await self._ask([call.request.request_id for call in late])
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await _all_ended(late)
            wait_s = min(2 * wait_s, _MAX_RESEND_S)

    async def ask_for_all(self, calls: Collection[GenerationCall]) -> None:
        for call in self._open_calls():
            call.asked_to_stop = True
        with suppress(EngineError):
            await self._ask_all()
        await _all_ended(calls)


def _still_open(calls: Iterable[GenerationCall]) -> list[GenerationCall]:
    return [call for call in calls if not call.ended.is_set()]


async def _all_ended(calls: Iterable[GenerationCall]) -> None:
    for call in calls:
        await call.ended.wait()
