"""Several engines as one: calls go where there is room, weights go everywhere, and an engine that fails is
left out for a while.

::

    generate ─▶ the member with most room, or that of its siblings
                └─ one that fails or is taken out ends its calls with EngineError: they are resumed elsewhere
    watcher, one per member:
        up ──a call failed, probes late──▶ down ──▶ revive, load the current weights, probe, check log-probs ──▶ up
    distrust ──▶ down for good

====================  ==========================  =========================================================
task                  waits for                   is unblocked by
====================  ==========================  =========================================================
``generate``          a member that is up         a member admitted; ``all_down_timeout_s``
... its next chunk    the member                  a chunk; the member taken out
``_watch``, a member  the next probe              time; a failed call
``abort``             the members concerned       their own deadlines; the member taken out
``pause``, ``load``   all members concerned       ... and ours for each, past which a member is taken out
====================  ==========================  =========================================================

What it keeps true: a member gets calls only while it is well and serves the version of the pool; one bad
member delays the others at nothing, at an update by no more than a deadline; a member that we have paused goes
on, on every way out; each chunk says which member sampled it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import fields, replace
from typing import Any, Protocol

from rollover.clock import Clock
from rollover.engine.base import (
    Capabilities,
    Chunk,
    Engine,
    EngineStats,
    GenerateRequest,
    WeightSource,
    WeightTarget,
)
from rollover.engine.servers.background import in_time, wait_for_any
from rollover.engine.servers.membership import Health, Membership
from rollover.errors import EngineError, EngineMismatch, EngineTimeout
from rollover.types import FinishReason

logger = logging.getLogger(__name__)

LogprobCheck = Callable[[Engine, int], Coroutine[Any, Any, None]]
"""(a member, the version it serves): returns when its log-probs are those of these weights, else raises
``EngineError``. Needs no more of it than ``generate``."""


class PoolMember(Engine, WeightTarget, Protocol):
    """An engine that may fail and come back."""

    async def probe(self, *, decode: bool = False) -> None:
        """Raises ``EngineError`` unless it is well, has the weights it was given and, with ``decode``,
        samples a token."""
        ...

    async def revive(self) -> None:
        """Start it again where that is in our power. Raises ``EngineError``."""
        ...


class _PoolCall:
    """An open ``generate``: with a member, or waiting for one."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.aborted = asyncio.Event()
        """Set to end it while it has no member."""


class EnginePool:
    """Implements ``Engine`` and ``WeightTarget``. ``open`` it before use; it closes its members.

    Args:
        source: what all members serve now, as version 0; what one that comes back is given until the next load.
        retry_after_s: until a member that was taken out is tried for the first time.
        switch_timeout_s: how long a member may take to stand still, and to go on.
        load_timeout_s: how long it may take to have new weights.
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
        assert members, "a pool needs a member"
        self._members = list(members)
        self._clock = clock
        self._probe_interval_s = probe_interval_s
        self._all_down_timeout_s = all_down_timeout_s
        self._switch_timeout_s = switch_timeout_s
        self._load_timeout_s = load_timeout_s
        self._state = Membership(
            [repr(m) for m in members],
            [m.capabilities.max_running for m in members],
            retry_after_s=retry_after_s,
            max_retry_after_s=max_retry_after_s,
        )
        self._version = 0
        self._source = source
        self._check: LogprobCheck | None = None
        self._mismatched: set[int] = set()
        """Members that are out because they failed the log-prob check."""
        self._paused: set[int] | None = None
        """Members that may stand still, while the pool is paused."""
        self._stopping: set[int] = set()
        """Those of them that do not yet: they are still probed, for one that hangs never will."""
        self._out_since_s: float | None = None
        """When somebody began to wait because no member was up."""
        self._calls: dict[str, _PoolCall] = {}
        self._closing: dict[str, int] = {}
        """Where calls run that were closed before their end, until somebody asks for their abort."""
        self._used_ids: set[str] = set()
        self._lost = [asyncio.Event() for _ in members]
        """Set while a member is down: its open calls end."""
        self._look = [asyncio.Event() for _ in members]
        """Set to have a member probed now."""
        self._admitted = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._watchers: list[asyncio.Task[None]] = []
        self._closed = False

    def __repr__(self) -> str:
        return ", ".join(member.name for member in self._state.members)

    async def open(self) -> None:
        """Take all members in; they are open, well and serve ``source``."""
        for index, member in enumerate(self._members):
            self._state.admit(index, member.capabilities.max_running)
        self._watchers = [asyncio.create_task(self._watch(i)) for i in range(len(self._members))]

    @property
    def capabilities(self) -> Capabilities:
        """What every member can do; room is that of the members that are up, at least one's."""
        each = [member.capabilities for member in self._members]
        room = [each[i].max_running for i in self._state.up] or [max(c.max_running for c in each)]
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
        each = [member.stats() for member in self._members]
        sums = {f.name: sum(getattr(s, f.name) for s in each) for f in fields(EngineStats)}
        return EngineStats(**{**sums, "policy_version": self._version})

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` when the member fails, and when no member comes up
        in time."""
        self._refuse_when_closed()
        if request.request_id in self._used_ids:
            raise EngineError(f"request id {request.request_id!r} was used before; ids are unique per generation call")
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

    async def _relay(self, request: GenerateRequest, index: int) -> AsyncGenerator[Chunk, None]:
        """A call on a member that counts it as its load already."""
        name, stream = self._state.members[index].name, self._members[index].generate(request)
        lost = asyncio.create_task(self._lost[index].wait())
        try:
            while True:
                chunk = await self._next(stream, lost, index)
                yield replace(chunk, engine=name)
                if chunk.finish_reason is not None:
                    return
        except EngineError as e:
            self._state.suspect(index, str(e))
            self._look[index].set()
            raise
        finally:
            lost.cancel()
            self._state.release(index)
            with suppress(EngineError):
                await stream.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_ids: Collection[str]) -> None:
        by_member: dict[int, list[str]] = {}
        for request_id in request_ids:
            call = self._calls.get(request_id)
            index = self._closing.pop(request_id, None) if call is None else call.index
            if index is not None:
                by_member.setdefault(index, []).append(request_id)
            elif call is not None:
                call.aborted.set()
        await self._each(by_member, lambda index: self._members[index].abort(by_member[index]))

    async def close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for call in self._calls.values():
            call.aborted.set()
        await asyncio.gather(*(member.close() for member in self._members))

    # -- WeightTarget ----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Waits for a member where all are out. Raises ``EngineError`` naming all members when none pauses."""
        self._refuse_when_closed()
        if not self._state.in_service:
            with suppress(EngineError):  # said below, with why
                await self._until_one_is_up(asyncio.Event())
        self._resumed.clear()
        members = self._state.in_service
        self._paused, self._stopping = set(members), set(members)
        failed = await self._each(members, self._stand_still, self._switch_timeout_s, "stand still")
        self._stopping.clear()
        self._take_out_all(failed)
        if not self._standing:
            self._paused = None
            self._resumed.set()
            raise EngineError(f"no engine could be paused; {self._state.why_none()}")

    async def _stand_still(self, index: int) -> None:
        await self._members[index].pause()
        self._stopping.discard(index)

    async def load(self, version: int, source: WeightSource) -> None:
        """Members that refuse what others take, and those that take too long, are taken out. Raises ``EngineError``
        when all refuse; they then go on with the old weights. Where nobody is left to refuse, the weights are those
        that a member is given when it comes back."""
        self._refuse_when_closed()
        if version < self._version:
            raise EngineError(f"weights cannot go back from version {self._version} to {version}")
        members = self._state.in_service if self._paused is None else self._standing
        failed = await self._each(
            members,
            lambda index: self._members[index].load(version, source),
            self._load_timeout_s,
            f"load weights version {version}",
        )
        refused = {index: e for index, e in failed.items() if not isinstance(e, EngineTimeout)}
        if refused and len(failed) == len(members):
            self._take_out_all({index: e for index, e in failed.items() if index not in refused})
            reasons = "; ".join(dict.fromkeys(str(e) for e in refused.values()))
            raise EngineError(f"no engine took weights version {version}: {reasons}")
        self._version, self._source = version, source
        self._take_out_all(failed)

    async def resume(self) -> None:
        self._refuse_when_closed()
        members, self._paused = self._standing, None
        try:
            failed = await self._each(
                members, lambda index: self._members[index].resume(), self._switch_timeout_s, "go on"
            )
            self._take_out_all(failed)
        finally:
            self._resumed.set()
            for look in self._look:  # whatever fell under suspicion meanwhile
                look.set()

    @property
    def _standing(self) -> list[int]:
        """Members that are paused. One that was taken out is woken when it comes back, or is closed."""
        return [index for index in sorted(self._paused or ()) if not self._state.is_down(index)]

    # -- which members sample what they say ------------------------------------------------------------------

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """From now on a member that comes back gets calls only once it has passed the log-prob check."""
        self._check = check

    async def check_logprobs(self, *, strict: bool = False) -> dict[str, EngineError]:
        """Check the log-probs of every member in service, all at once. Returns those that failed, which are taken out.

        Raises ``EngineMismatch`` when all are found to sample from something else; when one is, if ``strict``.
        """
        assert self._check is not None, "there is a way to check them"
        check, version, members = self._check, self._version, self._state.in_service
        failed = await self._each(members, lambda index: check(self._members[index], version))
        mismatched = {index: e for index, e in failed.items() if isinstance(e, EngineMismatch)}
        if strict and mismatched:
            raise next(iter(mismatched.values()))
        self._take_out_all(failed)
        if members and mismatched.keys() == {*members}:
            reasons = "; ".join(map(str, failed.values()))
            raise EngineMismatch(f"no engine samples from weights version {version}: {reasons}")
        self._mismatched |= mismatched.keys()
        return {self._state.members[index].name: e for index, e in failed.items()}

    def distrust(self, name: str, reason: str) -> None:
        """Take a member out for good: what it reported was wrong although its log-prob check passed. Its calls end
        with ``EngineError``. One that is not of this pool is none the worse.

        Raises ``EngineMismatch`` when no other is left that is up or may come back.
        """
        for index, member in enumerate(self._state.members):
            if member.name == name:
                self._state.expel(index, reason)
                self._left(index)
        if all(member.is_expelled for member in self._state.members):
            raise EngineMismatch(f"no engine is left whose log-probs can be trusted: {self._state.why_none()}")

    # -- the inside ------------------------------------------------------------------------------------------

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine pool is closed")

    def _aborted(self) -> Chunk:
        return Chunk(
            token_ids=(),
            logprobs=(),
            policy_version=self._version,
            kv_version=self._version,
            finish_reason=FinishReason.ABORT,
        )

    async def _assign(self, request: GenerateRequest, call: _PoolCall) -> int | None:
        """The member for a call; ``None`` when it was aborted meanwhile. Waits for one to come up, since all
        may be out for a moment."""
        while not call.aborted.is_set():
            if (index := self._state.assign(request.prompt_key)) is not None:
                return index
            await self._until_one_is_up(call.aborted)
        return None

    async def _until_one_is_up(self, unless: asyncio.Event) -> None:
        """Return when a member is up or ``unless`` is set. Raises ``EngineError`` after ``all_down_timeout_s``."""
        deadline_s = self._clock.now_s() + self._all_down_timeout_s
        while not (self._state.up or unless.is_set()):
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                raise EngineError(
                    f"no engine has been up for {self._all_down_timeout_s:g} s (engine.all_down_timeout_s):"
                    f" {self._state.why_none()}"
                )
            if self._out_since_s is None and not self._state.in_service:
                self._out_since_s = self._clock.now_s()
                logger.warning(
                    "no engine is up: waiting up to %g s for one (engine.all_down_timeout_s)", self._all_down_timeout_s
                )
            self._admitted.clear()
            await wait_for_any(self._clock, left_s, self._admitted, unless)

    def _is_up(self, index: int) -> None:
        """Calls may go to a member."""
        self._state.admit(index, self._members[index].capabilities.max_running)
        self._admitted.set()
        if self._out_since_s is not None:
            waited_s, self._out_since_s = self._clock.now_s() - self._out_since_s, None
            logger.warning("%s is up after %.0f s without any engine", self._state.members[index].name, waited_s)

    async def _next(self, stream: AsyncIterator[Chunk], lost: asyncio.Task[bool], index: int) -> Chunk:
        """The next chunk of a call, or ``EngineError`` as soon as its member is taken out."""
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
        member = self._state.members[index]
        raise EngineError(f"{member.name} was taken out: {member.reason}")

    async def _each(
        self,
        indices: Collection[int],
        act: Callable[[int], Coroutine[Any, Any, None]],
        limit_s: float | None = None,
        what: str = "",
    ) -> dict[int, EngineError]:
        """``act`` on members at once; how it failed where it did. Nobody waits for a member that is taken out, nor for
        one that takes longer than ``limit_s`` for ``what``. Cancelled, it takes out those that were not done."""

        async def one(index: int) -> EngineError | None:
            name = self._state.members[index].name
            lost = asyncio.create_task(self._lost[index].wait())
            done = asyncio.create_task(in_time(act(index), limit_s, name, what))
            try:
                await asyncio.wait([done, lost], return_when=asyncio.FIRST_COMPLETED)
                if not done.done():
                    return EngineTimeout(f"{name} was taken out")
                done.result()
            except EngineError as e:
                return e
            except asyncio.CancelledError:
                if limit_s is not None and not done.done():
                    self._take_out_all({index: EngineError(f"{name} was left in the middle: it did not {what} yet")})
                raise
            finally:
                lost.cancel()
                done.cancel()
                await asyncio.gather(lost, done, return_exceptions=True)
            return None

        failures = await asyncio.gather(*map(one, indices))
        return {index: e for index, e in zip(indices, failures, strict=True) if e is not None}

    def _take_out_all(self, failed: dict[int, EngineError]) -> None:
        for index, error in failed.items():
            if not self._state.is_down(index):
                self._state.take_out(index, str(error), self._clock.now_s())
                self._left(index)

    def _left(self, index: int) -> None:
        member = self._state.members[index]
        logger.warning("%s is taken out: %s", member.name, member.reason)
        self._lost[index].set()
        self._look[index].set()

    async def _watch(self, index: int) -> None:
        """Probe a member while it is up, bring it back while it is down; until the pool is closed."""
        member = self._state.members[index]
        while not member.is_expelled:
            if self._state.is_down(index):
                await self._clock.sleep(max(0.0, member.retry_s - self._clock.now_s()))
                if not member.is_expelled:
                    await self._bring_back(index)
                continue
            self._look[index].clear()
            await wait_for_any(self._clock, self._probe_interval_s, self._look[index])
            if not self._state.is_down(index) and (self._paused is None or index in self._stopping):
                await self._probe(index, decode=member.health is Health.SUSPECT)

    async def _probe(self, index: int, *, decode: bool) -> None:
        try:
            await self._members[index].probe(decode=decode)
        except EngineError as e:
            if not self._state.is_down(index) and self._state.late(index, str(e), self._clock.now_s()):
                self._left(index)
            return
        if not self._state.is_down(index):
            self._is_up(index)

    async def _bring_back(self, index: int) -> None:
        """Take a member in again once it answers and has the weights of the pool, or put it off for longer."""
        engine, name = self._members[index], self._state.members[index].name
        try:
            await engine.revive()
            while True:
                await self._resumed.wait()
                version, source = self._version, self._source
                switch_s, load_s = self._switch_timeout_s, self._load_timeout_s
                try:
                    await in_time(engine.pause(), switch_s, name, "stand still")
                    await in_time(engine.load(version, source), load_s, name, f"load version {version}")
                finally:
                    await in_time(engine.resume(), switch_s, name, "go on")
                await engine.probe(decode=True)
                if self._check is not None:
                    await self._check(engine, version)
                if self._paused is None and version == self._version:
                    break
        except EngineError as e:
            self._state.take_out(index, str(e), self._clock.now_s())
            if isinstance(e, EngineMismatch) and index not in self._mismatched:
                self._mismatched.add(index)
                logger.warning("%s stays out: %s", self._state.members[index].name, e)
            return
        if self._state.members[index].is_expelled:
            return
        self._mismatched.discard(index)
        logger.warning("%s is back with weights version %d", self._state.members[index].name, self._version)
        self._lost[index].clear()
        self._is_up(index)
