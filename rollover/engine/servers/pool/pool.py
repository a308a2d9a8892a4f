"""Several engines as one: calls go where there is room, weights go everywhere, and an engine that fails is left out for
a while.

====================  ==========================  =========================================================
task                  waits for                   is unblocked by
====================  ==========================  =========================================================
``generate``          a member with room          a call ended; a member admitted; ``all_down_timeout_s``
... its next chunk    the member                  a chunk; the member taken out
``Watch``, a member   the next probe              time; a failed call
``abort``             the members concerned       their own deadlines; the member taken out
``pause``, ``load``   all members concerned       ... and ours for each, past which a member is taken out
``sleep``             all members, also starting  their own deadlines
====================  ==========================  =========================================================

Invariants: a member gets calls only while it is well, serves the version of the pool and has room; a call whose member
fails or is taken out ends with ``EngineError`` and is resumed elsewhere by the caller; each chunk says which member
sampled it; one bad member delays the others at nothing, at an update by no more than a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from rollover.clock import Clock
from rollover.engine.background import cancel
from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.logprob_check import LogprobCheck
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.pool.members import Dispatch, Member, Members, PoolEngine
from rollover.engine.servers.pool.updates import PoolUpdates
from rollover.engine.servers.pool.watch import Watch
from rollover.engine.used_ids import UsedIds
from rollover.errors import CallDisplaced, EngineError, EngineMismatch
from rollover.types import FinishReason
from rollover.weights.base import WeightPath, WeightSource


class _PoolCall:
    """An open ``generate``: with a member, or waiting for one."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.aborted = asyncio.Event()
        """Set once somebody asks for its end, which its member brings about if it has one."""
        self.turn = asyncio.Event()
        """Set when there may be room for it."""

    def abort(self) -> None:
        self.aborted.set()
        self.turn.set()


class EnginePool:
    """Implements ``Engine`` and ``WeightTarget``. ``open`` it before use; it closes its members.

    Args:
        source: what all members serve now, as version 0; a member that comes back is given it until the next load.
    """

    def __init__(self, engines: Sequence[PoolEngine], source: WeightSource, clock: Clock, config: ServerConfig) -> None:
        self._members = Members(engines, clock, config)
        self._dispatch = Dispatch(self._members)
        self._updates = PoolUpdates(self._members, source, config)
        self._watch = Watch(
            self._members,
            self._updates,
            probe_interval_s=config.health_interval_s,
            check_timeout_s=config.first_token_timeout_s,
        )
        self._calls: dict[str, _PoolCall] = {}
        self._used_ids = UsedIds(self._calls)
        self._closed = False

    def __repr__(self) -> str:
        return ", ".join(member.name for member in self._members.all)

    async def open(self) -> None:
        """Take all members in; they are open, well and serve ``source``."""
        for member in self._members.all:
            self._members.admit(member)
        self._watch.start()

    async def close(self) -> None:
        self._closed = True
        await self._watch.stop()
        for call in self._calls.values():
            call.abort()
        await asyncio.gather(*(member.engine.close() for member in self._members.all))

    async def until_up(self) -> None:
        """Return when a member is up. Raises ``EngineError`` after ``all_down_timeout_s``, naming each and why."""
        await self._members.until_one_is_up(asyncio.Event())

    @property
    def capabilities(self) -> Capabilities:
        """Report what every member can do; room is the room of the members that are up, at least one's."""
        each = [member.engine.capabilities for member in self._members.all]
        up = [member.engine.capabilities for member in self._members.up] or [max(each, key=lambda c: c.max_running)]
        return Capabilities(
            max_running=sum(c.max_running for c in up),
            max_context_tokens=min(c.max_context_tokens for c in each),
            keeps_kv_on_abort=len(each) == 1 and each[0].keeps_kv_on_abort,
            in_flight_update=all(c.in_flight_update for c in each),
            seeded=all(c.seeded for c in each),
            number_format=each[0].number_format,  # one model, one config
            prefill_tokens_per_iteration=sum(c.prefill_tokens_per_iteration for c in each),
        )

    def stats(self) -> EngineStats:
        each = [member.engine.stats() for member in self._members.all]
        sums = {f.name: sum(getattr(s, f.name) for s in each) for f in fields(EngineStats)}
        return EngineStats(**{**sums, "policy_version": self._updates.version})

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` when the member fails or no member comes up in time."""
        self._refuse_when_closed()
        self._used_ids.claim(request.request_id)
        call = self._calls[request.request_id] = _PoolCall()
        try:
            if (member := await self._assign(request, call)) is None:
                version, reason = self._updates.version, FinishReason.ABORT
                yield Chunk(token_ids=(), logprobs=(), policy_version=version, kv_version=version, finish_reason=reason)
                return
            call.member = member
            stream = member.engine.generate(request)
            lost = asyncio.create_task(member.lost.wait())
            try:
                while True:
                    chunk = await _next_chunk(stream, lost, member)
                    end = chunk.finish_reason
                    if end is not None and not (end is FinishReason.ABORT and call.aborted.is_set()):
                        member.call_ended(unasked=end is FinishReason.ABORT)
                    yield replace(chunk, engine=member.name)
                    if end is not None:
                        return
            except EngineError as e:
                if not isinstance(e, CallDisplaced):
                    member.suspect(str(e))
                raise
            finally:
                lost.cancel()
                self._dispatch.release(member)
                with suppress(EngineError):
                    await stream.aclose()  # type: ignore[attr-defined]
        finally:
            del self._calls[request.request_id]

    async def abort(self, request_ids: Collection[str]) -> None:
        by_member: dict[Member, list[str]] = {}
        for request_id in request_ids:
            if (call := self._calls.get(request_id)) is None:
                members = self._members.up  # it was closed before its end, and one of them may still be ending it
            else:
                call.abort()
                members = [] if call.member is None else [call.member]
            for member in members:
                by_member.setdefault(member, []).append(request_id)
        await self._members.each(by_member, lambda member: member.engine.abort(by_member[member]))

    async def _assign(self, request: GenerateRequest, call: _PoolCall) -> Member | None:
        """Choose the member for a call, which counts it; ``None`` when it was aborted meanwhile. Waits for room, after
        the calls that came before, and for a member to come up, since all may be out for a moment."""
        waiting = self._members.waiting
        waiting[call.turn] = None
        try:
            while not call.aborted.is_set():
                if not self._members.up:
                    await self._members.until_one_is_up(call.aborted)
                elif next(iter(waiting)) is call.turn and (member := self._dispatch.assign(request.prompt_key)):
                    return member
                else:
                    call.turn.clear()
                    await call.turn.wait()
            return None
        finally:
            del waiting[call.turn]
            self._members.look_for_room()

    # -- Sleeps ----------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See ``PoolUpdates.sleep``. Until the next ``pause`` no member is probed, revived or given weights. A member
        that is brought back is waited for once: that may take longer than the time between two sleeps."""
        self._refuse_when_closed()
        for member in self._members.all:
            await member.until_returned()
        await self._watch.stop()
        await self._updates.sleep()

    # -- WeightTarget ----------------------------------------------------------------------------------------

    @property
    def takes(self) -> WeightPath:
        """See ``WeightTarget.takes``. A member that comes back is given weights that, in memory, may have changed;
        if they are sent by their holder, it waits for the next ones then."""
        return "group" if all(member.engine.group is not None for member in self._members.all) else "folder"

    async def pause(self) -> None:
        self._refuse_when_closed()
        if self._updates.is_asleep:
            self._watch.start()
        await self._updates.pause()

    async def load(self, version: int, source: WeightSource) -> None:
        self._refuse_when_closed()
        await self._updates.load(version, source)

    async def resume(self) -> None:
        self._refuse_when_closed()
        await self._updates.resume()

    # -- which members sample what they say ------------------------------------------------------------------

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """Send calls to a member that comes back only once it has passed the log-prob check."""
        self._watch.logprob_check = check

    async def check_logprobs(self, *, strict: bool = False) -> dict[str, EngineError]:
        """Check the log-probs of all members in service at once. Returns the members that failed, which are taken out.

        Raises ``EngineMismatch`` when all are found to sample from something else; when one is, if ``strict``.
        """
        return await self._watch.check_logprobs(strict=strict)

    def distrust(self, name: str, reason: str) -> None:
        """Take a member out for good: what it reported was wrong although its log-prob check passed. Its calls end with
        ``EngineError``. A member of another pool is ignored.

        Raises ``EngineMismatch`` when no other is left that is up or may come back.
        """
        for member in self._members.all:
            if member.name == name:
                member.expel(reason)
        if all(member.is_expelled for member in self._members.all):
            raise EngineMismatch(f"no engine is left whose log-probs can be trusted: {self._members.why_none()}")

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine pool is closed")


async def _next_chunk(stream: AsyncIterator[Chunk], lost: asyncio.Task[Any], member: Member) -> Chunk:
    """Wait for the next chunk of a call. Raises ``EngineError`` as soon as its member is taken out."""
    step: asyncio.Future[Chunk] = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.wait([step, lost], return_when=asyncio.FIRST_COMPLETED)
        if step.done():
            return step.result()
    finally:
        if not step.done():
            await cancel((step,))
    raise EngineError(f"{member.name} was taken out: {member.reason}")
