"""New weights for all members of a pool: pause, load, resume.

Invariants: a member that hangs delays the others by no more than a deadline; a member that we have paused goes
on, on every way out; the pool's version is every serving member's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeGuard

from rollover.engine.background import in_time, within
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.pool.group_updates import GroupUpdate, failure_of
from rollover.engine.servers.pool.members import Member, Members
from rollover.engine.servers.weights.served import MemoryHeld
from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import WeightSource
from rollover.weights.sending import SentByHolder, WeightsGone


class PoolUpdates:
    """Implements ``WeightTarget`` over the members of a pool.

    Args:
        source: what all members serve now, as version 0; a member that comes back is given it until the next load.
    """

    def __init__(self, members: Members, source: WeightSource, config: ServerConfig) -> None:
        self.version = 0
        self.is_asleep = False
        """The members have given their memory back, and none may take it before the next pause."""
        self._source = source
        self._members = members
        self._switch_timeout_s = config.switch_timeout_s
        self._load_timeout_s = config.install_timeout_s
        self._paused: list[Member] | None = None
        """Members that may stand still, while the pool is paused."""
        self._pausing: set[Member] = set()
        """Members that are asked to stand still and do not yet."""
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._group = GroupUpdate(members, config)
        self._late: dict[Member, asyncio.Future[EngineError | None]] = {}
        """Members that come back and stand still until they are sent the next weights, with the answer to each."""
        self._is_awaited = asyncio.Event()
        """Set while there are such members."""

    async def sleep(self) -> None:
        """Have all members give their memory back, even members that are out. A member that is gone is taken
        out. No member is brought back meanwhile.

        Raises ``MemoryHeld`` naming the members that may still hold memory.
        """
        if self.is_asleep:
            return
        self.is_asleep = True
        self._resumed.clear()
        members = self._members.all
        found = await asyncio.gather(*map(_put_to_sleep, members))
        failed = {member: error for member, error in zip(members, found, strict=True) if error is not None}
        self._members.take_out(failed)
        if held := [str(error) for error in failed.values() if isinstance(error, MemoryHeld)]:
            raise MemoryHeld("; ".join(held))

    async def pause(self) -> None:
        """Wait for a member if all are out, including a member that needs the weights that come now.

        Raises ``EngineError`` naming all members when none pauses.
        """
        if self.is_asleep:  # from now on members that are gone may come back
            self.is_asleep = False
            self._resumed.set()
            failed = await self._members.each(
                self._members.in_service, lambda member: member.engine.pause(), self._switch_timeout_s, "answer"
            )
            self._members.take_out(failed)  # those that died meanwhile
        if not self._members.in_service:
            with suppress(EngineError):  # said below, with why
                await self._members.until_one_is_up(self._is_awaited)
        self._resumed.clear()
        self._paused = self._members.in_service
        self._pausing = {*self._paused}
        failed = await self._members.each(self._paused, self._pause_one, self._switch_timeout_s, "stand still")
        self._pausing.clear()
        self._members.take_out(failed)
        if not self._standing and not self._late:
            self._paused = None
            self._resumed.set()
            raise EngineError(f"no engine could be paused; {self._members.why_none()}")

    async def _pause_one(self, member: Member) -> None:
        await member.engine.pause()
        self._pausing.discard(member)

    async def load(self, version: int, source: WeightSource) -> None:
        """Take out members that refuse what others take, or take too long. Raises ``EngineError`` when all
        refuse; they then continue with the old weights. If no member is left to refuse, a member is given these weights
        when it comes back."""
        if version < self.version:
            raise EngineError(f"weights cannot go back from version {self.version} to {version}")
        members = self._members.in_service if self._paused is None else self._standing
        if _is_sent(source):
            failed = await self._have_sent(members, version, source)
        else:
            failed = await self._members.each(
                members,
                lambda member: member.engine.load(version, source),
                self._load_timeout_s,
                f"load weights version {version}",
            )
        refused = {member: e for member, e in failed.items() if not isinstance(e, EngineTimeout)}
        if refused and len(failed) == len(members):
            self._members.take_out({member: e for member, e in failed.items() if member not in refused})
            reasons = "; ".join(dict.fromkeys(str(e) for e in refused.values()))
            raise EngineError(f"no engine took weights version {version}: {reasons}")
        self.version, self._source = version, source
        self._members.take_out(failed)

    async def _have_sent(self, members: list[Member], version: int, source: SentByHolder) -> dict[Member, EngineError]:
        """Have weights sent to members, and to late members that wait for a return. Returns the failures of members;
        if a late member took the weights, the failed members are no reason to stop and are taken out."""
        late = dict(self._late)
        failed = await self._group.send([*members, *late], version, source)
        for member, answer in late.items():
            if not answer.done():
                answer.set_result(failed.get(member))
        own = {member: failed[member] for member in members if member in failed}
        if len(own) == len(members) and any(member not in failed for member in late):
            self._members.take_out(own)
            return {}
        return own

    async def resume(self) -> None:
        members, self._paused = self._standing, None
        try:
            failed = await self._members.each(
                members, lambda member: member.engine.resume(), self._switch_timeout_s, "go on"
            )
            self._members.take_out(failed)
        finally:
            self._resumed.set()
            for member in self._members.all:  # whatever fell under suspicion meanwhile
                member.look.set()

    def may_probe(self, member: Member) -> bool:
        """Tell whether a probe can say something: not of a member that stands still. One that was asked to stand still
        and does not yet is probed, since a member that hangs never will."""
        return self._paused is None or member in self._pausing

    async def catch_up(self, member: Member, *, given: int | None = None) -> int:
        """Give a member that comes back the weights of the pool: now or, if they can no longer be had from anywhere,
        with the next update. Returns their version.

        Args:
            given: version that the member was given, before whose check an update began. If weights are sent, which
                takes longer than a fast run keeps a version, it then gets the next one with others.
        """
        engine, name = member.engine, member.name
        await self._resumed.wait()
        if (version := self.version) == given:  # the update has failed
            return version
        try:
            await in_time(engine.pause(), self._switch_timeout_s, name, "stand still")
            if given is not None and _is_sent(self._source):
                async with within(self._load_timeout_s, f"{name} was not sent the next weights in time"):
                    return await self._with_the_others(member)
            try:
                await in_time(engine.load(version, self._source), self._load_timeout_s, name, f"load version {version}")
            except WeightsGone:
                version = await self._with_the_others(member)
        finally:
            await in_time(engine.resume(), self._switch_timeout_s, name, "go on")
        return version

    async def _with_the_others(self, member: Member) -> int:
        """Wait for the next update. Returns its version; raises the error with which it failed for this member."""
        answer = self._late[member] = asyncio.get_running_loop().create_future()
        self._is_awaited.set()
        member.returned.set()  # the next update comes after the trainer's turn
        try:
            if (error := await answer) is not None:
                raise error
            version = self.version
            await self._resumed.wait()
            return version
        finally:
            del self._late[member]
            if not self._late:
                self._is_awaited.clear()

    def is_current(self, version: int) -> bool:
        """Tell whether a member with these weights may be taken in now."""
        return self._paused is None and version == self.version

    @property
    def _standing(self) -> list[Member]:
        """Return the members that are paused. One that was taken out is woken when it comes back, or is closed."""
        return [member for member in self._paused or () if not member.is_down]


def _is_sent(source: WeightSource) -> TypeGuard[SentByHolder]:
    """Return whether weights are sent by their holder rather than read from a folder."""
    return source.folder is None and isinstance(source, SentByHolder)


async def _put_to_sleep(member: Member) -> EngineError | None:
    if (sleeper := member.engine.sleeper) is None:
        return MemoryHeld(f"{member.name} cannot give its memory back")
    return await failure_of(sleeper.sleep())
