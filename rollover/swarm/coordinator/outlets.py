"""The open calls of a swarm as their callers see them: chunks come out in order, unless all stands still.

Invariants: a chunk is taken once; while calls are held, only an end by error or abort comes out, and what has come in
meanwhile comes out before anything later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.used_ids import UsedIds
from rollover.types import FinishReason


class Outlet:
    """The chunks that a caller has yet to take of its call."""

    def __init__(self, came_out: Callable[[Chunk], None]) -> None:
        self._items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._came_out = came_out
        self._held: list[Chunk | Exception] | None = None
        self.ended = asyncio.Event()
        """The end has come out, though the caller may not have taken it yet."""

    async def take(self) -> Chunk:
        """Return the next chunk, or raise the exception that was put in; none comes after a finish reason."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def put(self, item: Chunk | Exception) -> None:
        if isinstance(item, Exception) or item.finish_reason is FinishReason.ABORT:
            self.flow()
        if self._held is not None:
            self._held.append(item)
            return
        self._items.put_nowait(item)
        if isinstance(item, Chunk):
            self._came_out(item)
        if isinstance(item, Exception) or item.finish_reason is not None:
            self.ended.set()

    def hold(self) -> None:
        """Keep what comes from the caller."""
        self._held = self._held or []

    def flow(self) -> None:
        """Let out what was kept, and all that comes."""
        held, self._held = self._held, None
        for item in held or ():
            self.put(item)


class Outlets:
    """All open calls by id, and the calls that were opened while the engine stands still."""

    def __init__(self) -> None:
        self._open: dict[str, Outlet] = {}
        self._used_ids = UsedIds(self._open)
        self._held_back: list[GenerateRequest] | None = None
        """Calls that were opened while the engine stands still; ``None`` while it runs."""
        self.num_decoded = 0
        self.num_reprefilled = 0

    @property
    def stands_still(self) -> bool:
        return self._held_back is not None

    @property
    def num_held_back(self) -> int:
        """Return the number of calls that wait for the engine to resume."""
        return len(self._held_back or ())

    @property
    def ids(self) -> list[str]:
        return list(self._open)

    def get(self, call_id: str) -> Outlet | None:
        return self._open.get(call_id)

    def open(self, request: GenerateRequest) -> Outlet:
        """Begin a call. Raises ``EngineError`` for an id that was used before."""
        self._used_ids.claim(request.request_id)
        outlet = self._open[request.request_id] = Outlet(self._came_out)
        return outlet

    def close(self, request: GenerateRequest) -> bool:
        """End a call for its caller. Returns whether it still runs, so that it has to be stopped."""
        outlet = self._open.pop(request.request_id, None)
        if outlet is None or outlet.ended.is_set():
            return False
        self._held_back = self._held_back and [r for r in self._held_back if r is not request]
        return True

    def hold(self) -> None:
        """Stop, as far as callers can see."""
        if self._held_back is None:
            self._held_back = []
            for outlet in self._open.values():
                outlet.hold()

    def hold_back(self, request: GenerateRequest) -> bool:
        """Keep a new call while the engine is stopped. Returns whether it did."""
        if self._held_back is None:
            return False
        self._held_back.append(request)
        return True

    def taken_back(self, call_ids: Collection[str]) -> list[GenerateRequest]:
        """Let go of the calls among these that were held back, and return them."""
        early = [request for request in self._held_back or () if request.request_id in call_ids]
        if early:
            self._held_back = [request for request in self._held_back or () if request.request_id not in call_ids]
        return early

    def flow(self) -> list[GenerateRequest]:
        """Resume. Returns the calls that were held back."""
        held_back, self._held_back = self._held_back, None
        for outlet in self._open.values():
            outlet.flow()
        return held_back or []

    def put(self, call_id: str, item: Chunk | Exception) -> None:
        """Put new tokens, or the error with which a call ends, into its outlet."""
        if (outlet := self._open.get(call_id)) is not None:
            outlet.put(item)

    def _came_out(self, chunk: Chunk) -> None:
        self.num_decoded += len(chunk.token_ids)
        self.num_reprefilled += chunk.num_prefilled_tokens
