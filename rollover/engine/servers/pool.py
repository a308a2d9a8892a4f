"""Several engines as one: calls go where there is room, weights go everywhere, and one that fails is left out for a
while.

====================  ==========================  =========================================================
task                  waits for                   is unblocked by
====================  ==========================  =========================================================
``generate``          a member that is up         a member admitted; ``all_down_timeout_s``
... its next chunk    the member                  a chunk; the member taken out
``Watch``, a member   the next probe              time; a failed call
``abort``             the members concerned       their own deadlines; the member taken out
``pause``, ``load``   all members concerned       ... and ours for each, past which a member is taken out
====================  ==========================  =========================================================

What it keeps true: a member gets calls only while it is well and serves the version of the pool; one bad member delays
the others at nothing, at an update by no more than a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import fields

from rollover.clock import Clock
from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.servers.members import Members, PoolMember
from rollover.engine.servers.pool_calls import PoolCalls
from rollover.engine.servers.updates import PoolUpdates
from rollover.engine.servers.watch import LogprobCheck, Watch
from rollover.errors import EngineError, EngineMismatch
from rollover.weights.base import WeightSource


class EnginePool:
    """Implements ``Engine`` and ``WeightTarget``. ``open`` it before use; it closes its members.

    Args:
        source: what all members serve now, as version 0; what one that comes back is given until the next load.
        retry_after_s: until a member that was taken out is tried for the first time.
        switch_timeout_s: how long a member may take to stand still, and to go on.
        load_timeout_s: how long it may take to have new weights.

    Example: two servers with ``max_running = 64`` are a pool with ``capabilities.max_running == 128``, and one of 64
    while one of them is out.
    """

    def __init__(
        self,
        members: Sequence[PoolMember],
        source: WeightSource,
        clock: Clock,
        *,
        probe_interval_s: float,
        max_retry_after_s: float,
        all_down_timeout_s: float,
        retry_after_s: float = 1.0,
        switch_timeout_s: float = 120.0,
        load_timeout_s: float = 400.0,
    ) -> None:
        self._members = Members(
            members,
            clock,
            retry_after_s=retry_after_s,
            max_retry_after_s=max_retry_after_s,
            all_down_timeout_s=all_down_timeout_s,
        )
        self._updates = PoolUpdates(
            self._members, source, switch_timeout_s=switch_timeout_s, load_timeout_s=load_timeout_s
        )
        self._calls = PoolCalls(self._members, self._updates)
        self._watch = Watch(self._members, self._updates, probe_interval_s=probe_interval_s)
        self._closed = False

    def __repr__(self) -> str:
        return ", ".join(member.name for member in self._members.state.members)

    async def open(self) -> None:
        """Take all members in; they are open, well and serve ``source``."""
        for index in range(len(self._members.engines)):
            self._members.admit(index)
        self._watch.start()

    async def close(self) -> None:
        self._closed = True
        await self._watch.stop()
        self._calls.end_waiting()
        await asyncio.gather(*(engine.close() for engine in self._members.engines))

    @property
    def capabilities(self) -> Capabilities:
        """Report what every member can do; room is that of the members that are up, at least one's."""
        each = [engine.capabilities for engine in self._members.engines]
        room = [each[i].max_running for i in self._members.state.up] or [max(c.max_running for c in each)]
        return Capabilities(
            max_running=sum(room),
            max_context_tokens=min(c.max_context_tokens for c in each),
            keeps_kv_on_abort=len(each) == 1 and each[0].keeps_kv_on_abort,
            in_flight_update=all(c.in_flight_update for c in each),
            seeded=all(c.seeded for c in each),
            number_format=each[0].number_format,  # one model, one config
            prefill_tokens_per_iteration=sum(c.prefill_tokens_per_iteration for c in each),
        )

    def stats(self) -> EngineStats:
        each = [engine.stats() for engine in self._members.engines]
        sums = {f.name: sum(getattr(s, f.name) for s in each) for f in fields(EngineStats)}
        return EngineStats(**{**sums, "policy_version": self._updates.version})

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` when the member fails or no member comes up in time."""
        self._refuse_when_closed()
        async with aclosing(self._calls.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._calls.abort(request_ids)

    # -- WeightTarget ----------------------------------------------------------------------------------------

    needs_folder = True  # a member that comes back is given weights that may have changed in memory

    async def pause(self) -> None:
        """See ``PoolUpdates.pause``."""
        self._refuse_when_closed()
        await self._updates.pause()

    async def load(self, version: int, source: WeightSource) -> None:
        """See ``PoolUpdates.load``."""
        self._refuse_when_closed()
        await self._updates.load(version, source)

    async def resume(self) -> None:
        self._refuse_when_closed()
        await self._updates.resume()

    # -- which members sample what they say ------------------------------------------------------------------

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """From now on a member that comes back gets calls only once it has passed the log-prob check."""
        self._watch.logprob_check = check

    async def check_logprobs(self, *, strict: bool = False) -> dict[str, EngineError]:
        """Check the log-probs of every member in service, all at once. Returns those that failed, which are taken out.

        Raises ``EngineMismatch`` when all are found to sample from something else; when one is, if ``strict``.
        """
        return await self._watch.check_logprobs(strict=strict)

    def distrust(self, name: str, reason: str) -> None:
        """Take a member out for good: what it reported was wrong although its log-prob check passed. Its calls end
        with ``EngineError``. One that is not of this pool is none the worse.

        Raises ``EngineMismatch`` when no other is left that is up or may come back.
        """
        state = self._members.state
        for index, member in enumerate(state.members):
            if member.name == name:
                self._members.expel(index, reason)
        if all(member.is_expelled for member in state.members):
            raise EngineMismatch(f"no engine is left whose log-probs can be trusted: {state.why_none()}")

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine pool is closed")
