"""Aborting calls of a server: asked for until each has ended, and never waited for longer than allowed.

Invariants: only the end of a call shows that it has stopped, whatever the server answers when it is asked; a
call that is not handed over in time ends here, with what it has streamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

from rollover.engine.background import attempt
from rollover.engine.servers.calls.call import GenerationCall
from rollover.engine.servers.calls.dialect import Dialect
from rollover.engine.servers.calls.open_calls import OpenCalls
from rollover.errors import EngineError

logger = logging.getLogger(__name__)

_FIRST_RESEND_S, _MAX_RESEND_S = 0.05, 1.0
_SWEEP_S = 0.5


class Aborter:
    """Aborts calls of one server.

    Args:
        server: what messages call it.
        timeout_s: how long the server may take; after half of it, all its calls are aborted.
    """

    def __init__(self, server: str, dialect: Dialect, calls: OpenCalls, *, timeout_s: float) -> None:
        self._server = server
        self._dialect = dialect
        self._calls = calls
        self._timeout_s = timeout_s
        self._sweeping = False

    async def abort(self, calls: Collection[GenerationCall]) -> None:
        """Return when each of ``calls`` has ended, after ``timeout_s`` at the latest."""
        for call in calls:
            call.asked_to_stop = True
            if not call.sent:
                self._calls.end(call)
        for way in (self._abort_by_id, self._abort_all):
            if _still_open(calls):
                await attempt(way(_still_open(calls)), self._timeout_s / 2)
        if late := _still_open(calls):
            logger.warning(
                "%s did not hand over %s in %g s (engine.abort_timeout_s): %s with what had come",
                self._server,
                late[0].request_id if len(late) == 1 else f"{len(late)} calls",
                self._timeout_s,
                "it ends" if len(late) == 1 else "they end",
            )
            for call in late:
                self._calls.end(call)

    async def check(self, call: GenerationCall) -> None:
        """Abort a running call by its id.

        Raises ``EngineError`` when it continues: on such a server, work that is stopped would continue and be lost.
        """
        half_s = self._timeout_s / 2
        await attempt(self._abort_by_id([call], one_by_one=True), half_s)
        if not call.ended.is_set():
            await attempt(self._dialect.ask_to_abort_all(), half_s)
            self._calls.end(call)
            raise EngineError(
                f"{self._server} does not stop a call by its id within {half_s:g} s:"
                " this version of the server cannot be used for partial rollouts"
            )

    async def sweep(self) -> None:
        """See that the server runs no more calls than we have open: one whose connection was closed is decoded in vain.
        Its count comes with some delay, so one look is not enough."""
        if self._sweeping:
            return
        self._sweeping = True
        loop = asyncio.get_running_loop()
        give_up_s, num_clear = loop.time() + self._timeout_s / 2, 0
        try:
            while num_clear < 2 and (num_calls := await self._dialect.num_calls()) is not None:
                surplus = num_calls > len(self._calls.sent)
                num_clear = 0 if surplus else num_clear + 1
                if surplus and loop.time() > give_up_s:
                    async with self._calls.held:
                        if not self._calls.sent:
                            await self._dialect.ask_to_abort_all()
                await asyncio.sleep(_SWEEP_S)
        except EngineError:
            return  # the pool's probes say more about it
        finally:
            self._sweeping = False

    async def _abort_by_id(self, calls: Collection[GenerationCall], *, one_by_one: bool = False) -> None:
        """Ask again until all have ended: a call that is still on its way to the server cannot be aborted there."""
        wait_s = _FIRST_RESEND_S
        while late := _still_open(calls):
            for call in late:
                call.asked_to_stop = True
            with suppress(EngineError):  # a server that fails ends the calls in its own way, or not at all
                await self._ask([call.request_id for call in late], one_by_one=one_by_one)
            await attempt(_all_ended(late), wait_s)
            wait_s = min(2 * wait_s, _MAX_RESEND_S)

    async def _ask(self, request_ids: list[str], *, one_by_one: bool) -> None:
        if self._dialect.traits.aborts_all_at_once and not one_by_one:
            async with self._calls.held:
                if {call.request_id for call in self._calls.sent} <= {*request_ids}:
                    await self._dialect.ask_to_abort_all()
                    return
        await self._dialect.ask_to_abort(request_ids)

    async def _abort_all(self, calls: Collection[GenerationCall]) -> None:
        for call in self._calls.sent:
            call.is_displaced = not call.asked_to_stop
        with suppress(EngineError):
            await self._dialect.ask_to_abort_all()
        await _all_ended(calls)


def _still_open(calls: Iterable[GenerationCall]) -> list[GenerationCall]:
    return [call for call in calls if not call.ended.is_set()]


async def _all_ended(calls: Iterable[GenerationCall]) -> None:
    for call in calls:
        await call.ended.wait()
