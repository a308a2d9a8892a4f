"""Watching the members of a pool: probes while they are up, weights and checks before they come back.

::

    up ──a call failed, probes late──▶ down ──▶ revive, load the current weights, probe, check log-probs ──▶ up
    distrust ──▶ down for good

Invariants: a member that comes back gets calls only once it has the weights of the pool and, where log-probs
are checked, has passed the check under these or under weights that it was given just before.
"""

from __future__ import annotations

import logging

from rollover.clock import wait_for_any
from rollover.engine.background import BackgroundTasks
from rollover.engine.logprob_check import LogprobCheck
from rollover.engine.servers.pool.members import Health, Member, Members
from rollover.engine.servers.pool.updates import PoolUpdates
from rollover.errors import EngineError, EngineMismatch, RolloverError

logger = logging.getLogger(__name__)


class Watch:
    """Probes the members of a pool and brings them back."""

    def __init__(
        self, members: Members, updates: PoolUpdates, *, probe_interval_s: float, check_timeout_s: float
    ) -> None:
        self.logprob_check: LogprobCheck | None = None
        self._members = members
        self._updates = updates
        self._probe_interval_s, self._check_timeout_s = probe_interval_s, check_timeout_s
        self._has_checked = False
        """True once all members in service have passed the log-prob check; any other passes it when it comes back."""
        self._mismatched: set[Member] = set()
        """Members that are out because they failed the log-prob check."""
        self._tasks = BackgroundTasks()

    def start(self) -> None:
        for member in self._members.all:
            self._tasks.start(self._watch(member))

    async def stop(self) -> None:
        await self._tasks.cancel()

    async def check_logprobs(self, *, strict: bool) -> dict[str, EngineError]:
        """See ``EnginePool.check_logprobs``."""
        assert self.logprob_check is not None, "there is a way to check them"
        check, version, members = self.logprob_check, self._updates.version, self._members.in_service
        known, self._has_checked = self._has_checked, True
        failed = await self._members.each(
            members,
            lambda m: check(m.engine, version, is_known=known, draws=not known),
            self._check_timeout_s if known else None,
            "answer the log-prob check",
        )
        mismatched = {member: e for member, e in failed.items() if isinstance(e, EngineMismatch)}
        if strict and mismatched:
            raise next(iter(mismatched.values()))
        self._members.take_out(failed)
        if members and mismatched.keys() == {*members}:
            reasons = "; ".join(map(str, failed.values()))
            raise EngineMismatch(f"no engine samples from weights version {version}: {reasons}")
        self._mismatched |= mismatched.keys()
        return {member.name: e for member, e in failed.items()}

    async def _watch(self, member: Member) -> None:
        """Probe a member while it is up, bring it back while it is down; until it is expelled."""
        clock = self._members.clock
        while not member.is_expelled:
            if member.is_down:
                await clock.sleep(max(0.0, member.retry_s - clock.now_s()))
                if not member.is_expelled:
                    await self._bring_back(member)
                continue
            member.look.clear()
            await wait_for_any(clock, self._probe_interval_s, member.look)
            if not member.is_down and self._updates.may_probe(member):
                await self._probe(member)

    async def _probe(self, member: Member) -> None:
        try:
            await member.engine.probe(decode=member.health is Health.SUSPECT)
        except EngineError as e:
            member.late(str(e))
            return
        if not member.is_down:
            self._members.admit(member)

    async def _bring_back(self, member: Member) -> None:
        """Take a member in again once it answers and has the weights of the pool, or leave it out for longer."""
        member.returned.clear()
        try:
            await member.engine.revive()
            version = await self._updates.catch_up(member)
            await member.engine.probe(decode=True)
            if self.logprob_check is not None:
                await self.logprob_check(member.engine, version)
            # A check can take longer than a fast run keeps a version: the weights that follow are checked as in
            # other members, after the next update.
            while not self._updates.is_current(version):
                version = await self._updates.catch_up(member, given=version)
        except (RolloverError, OSError) as e:
            member.take_out(str(e))
            if isinstance(e, EngineMismatch) and member not in self._mismatched:
                self._mismatched.add(member)
                logger.warning("%s stays out: %s", member.name, e)
            return
        finally:
            member.returned.set()
        if member.is_expelled:
            return
        self._mismatched.discard(member)
        logger.warning("%s is back with weights version %d", member.name, version)
        self._members.admit(member)
