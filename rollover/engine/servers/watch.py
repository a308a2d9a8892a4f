"""Watching the members of a pool: probes while they are up, weights and checks before they come back.

::

    up ──a call failed, probes late──▶ down ──▶ revive, load the current weights, probe, check log-probs ──▶ up
    distrust ──▶ down for good

What it keeps true: a member that comes back gets calls only once it has the weights of the pool and, where log-probs
are checked, has passed the check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rollover.engine.base import Engine
from rollover.engine.servers.background import wait_for_any
from rollover.engine.servers.members import Members
from rollover.engine.servers.updates import PoolUpdates
from rollover.errors import EngineError, EngineMismatch

logger = logging.getLogger(__name__)

LogprobCheck = Callable[[Engine, int], Coroutine[Any, Any, None]]
"""Given a member and the version it serves, returns when its log-probs are those of these weights, else raises
``EngineError``. Needs no more of the member than ``generate``."""


class Watch:
    """Probes the members of a pool and brings them back."""

    def __init__(self, members: Members, updates: PoolUpdates, *, probe_interval_s: float) -> None:
        self.logprob_check: LogprobCheck | None = None
        self._members = members
        self._updates = updates
        self._probe_interval_s = probe_interval_s
        self._mismatched: set[int] = set()
        """Members that are out because they failed the log-prob check."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(index)) for index in range(len(self._members.engines))]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check_logprobs(self, *, strict: bool) -> dict[str, EngineError]:
        """See ``EnginePool.check_logprobs``."""
        assert self.logprob_check is not None, "there is a way to check them"
        check, version, members = self.logprob_check, self._updates.version, self._members
        indices = members.state.in_service
        failed = await members.each(indices, lambda index: check(members.engines[index], version))
        mismatched = {index: e for index, e in failed.items() if isinstance(e, EngineMismatch)}
        if strict and mismatched:
            raise next(iter(mismatched.values()))
        members.take_out(failed)
        if indices and mismatched.keys() == {*indices}:
            reasons = "; ".join(map(str, failed.values()))
            raise EngineMismatch(f"no engine samples from weights version {version}: {reasons}")
        self._mismatched |= mismatched.keys()
        return {members.name(index): e for index, e in failed.items()}

    async def _watch(self, index: int) -> None:
        """Probe a member while it is up, bring it back while it is down; until it is expelled."""
        members, member = self._members, self._members.state.members[index]
        while not member.is_expelled:
            if members.state.is_down(index):
                await members.clock.sleep(max(0.0, member.retry_s - members.clock.now_s()))
                if not member.is_expelled:
                    await self._bring_back(index)
                continue
            members.look[index].clear()
            await wait_for_any(members.clock, self._probe_interval_s, members.look[index])
            if not members.state.is_down(index) and self._updates.may_probe(index):
                await self._probe(index)

    async def _probe(self, index: int) -> None:
        try:
            await self._members.engines[index].probe(decode=self._members.is_suspect(index))
        except EngineError as e:
            self._members.late(index, str(e))
            return
        if not self._members.state.is_down(index):
            self._members.admit(index)

    async def _bring_back(self, index: int) -> None:
        """Take a member in again once it answers and has the weights of the pool, or put it off for longer."""
        engine, name = self._members.engines[index], self._members.name(index)
        try:
            await engine.revive()
            while True:
                version = await self._updates.catch_up(index)
                await engine.probe(decode=True)
                if self.logprob_check is not None:
                    await self.logprob_check(engine, version)
                if self._updates.is_current(version):
                    break
        except EngineError as e:
            self._members.put_off(index, e)
            if isinstance(e, EngineMismatch) and index not in self._mismatched:
                self._mismatched.add(index)
                logger.warning("%s stays out: %s", name, e)
            return
        if self._members.state.members[index].is_expelled:
            return
        self._mismatched.discard(index)
        logger.warning("%s is back with weights version %d", name, version)
        self._members.admit(index)
