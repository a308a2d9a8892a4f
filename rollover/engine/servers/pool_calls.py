"""The open calls of a pool: each is relayed from the member that it was assigned to.

What it keeps true: a member gets calls only while it is up; a call whose member fails or is taken out ends with
``EngineError`` and is resumed elsewhere by the caller; each chunk says which member sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.servers.members import Members
from rollover.engine.servers.updates import PoolUpdates
from rollover.errors import EngineError
from rollover.types import FinishReason


class _PoolCall:
    """An open ``generate``: with a member, or waiting for one."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.aborted = asyncio.Event()
        """Set to end it while it has no member."""


class PoolCalls:
    """Relays the open calls of a pool.

    Example: a call whose server dies ends with ``EngineError``; its caller resumes the sample with another call.
    """

    def __init__(self, members: Members, updates: PoolUpdates) -> None:
        self._members = members
        self._updates = updates
        self._calls: dict[str, _PoolCall] = {}
        self._closing: dict[str, int] = {}
        """Members of calls that were closed before their end, until somebody asks for their abort."""
        self._used_ids: set[str] = set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See ``EnginePool.generate``."""
        if request.request_id in self._used_ids:
            raise EngineError(f"request id {request.request_id!r} was used before; each generation call needs its own")
        self._used_ids.add(request.request_id)
        call = self._calls[request.request_id] = _PoolCall()
        try:
            call.index = await self._assign(request, call)
            if call.index is None:
                yield self._aborted()
                return
            async with aclosing(self._relay(request, call.index)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except GeneratorExit:
            if call.index is not None:
                self._closing[request.request_id] = call.index
            raise
        finally:
            del self._calls[request.request_id]

    async def abort(self, request_ids: Collection[str]) -> None:
        by_member: dict[int, list[str]] = {}
        for request_id in request_ids:
            call = self._calls.get(request_id)
            index = self._closing.pop(request_id, None) if call is None else call.index
            if index is not None:
                by_member.setdefault(index, []).append(request_id)
            elif call is not None:
                call.aborted.set()
        await self._members.each(by_member, lambda index: self._members.engines[index].abort(by_member[index]))

    def end_waiting(self) -> None:
        """End the calls that wait for a member."""
        for call in self._calls.values():
            call.aborted.set()

    async def _assign(self, request: GenerateRequest, call: _PoolCall) -> int | None:
        """Choose the member for a call; ``None`` when it was aborted meanwhile. Waits for one to come up, since all
        may be out for a moment."""
        while not call.aborted.is_set():
            if (index := self._members.dispatch.assign(request.prompt_key)) is not None:
                return index
            await self._members.until_one_is_up(call.aborted)
        return None

    async def _relay(self, request: GenerateRequest, index: int) -> AsyncGenerator[Chunk, None]:
        """Relay a call of a member that counts it as its load already."""
        name, stream = self._members.name(index), self._members.engines[index].generate(request)
        lost = asyncio.create_task(self._members.lost[index].wait())
        try:
            while True:
                chunk = await self._next(stream, lost, index)
                yield replace(chunk, engine=name)
                if chunk.finish_reason is not None:
                    return
        except EngineError as e:
            self._members.suspect(index, str(e))
            raise
        finally:
            lost.cancel()
            self._members.dispatch.release(index)
            with suppress(EngineError):
                await stream.aclose()  # type: ignore[attr-defined]

    async def _next(self, stream: AsyncIterator[Chunk], lost: asyncio.Task[bool], index: int) -> Chunk:
        """Wait for the next chunk of a call. Raises ``EngineError`` as soon as its member is taken out."""
        step: asyncio.Future[Chunk] = asyncio.ensure_future(anext(stream))
        try:
            waiting: list[asyncio.Future[Any]] = [step, lost]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                return step.result()
        finally:
            if not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
        raise EngineError(f"{self._members.name(index)} was taken out: {self._members.state.members[index].reason}")

    def _aborted(self) -> Chunk:
        version = self._updates.version
        return Chunk(
            token_ids=(), logprobs=(), policy_version=version, kv_version=version, finish_reason=FinishReason.ABORT
        )
