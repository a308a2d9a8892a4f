"""New weights for several servers in one group: a server that fails is left out, and the others are sent them again.

A group fails as a whole. The members that leave it show which one is to blame: a server that is gone, is stopped or
hangs does not leave, is taken out, and the others form a new group. Where all have left and none is evidently at fault,
each is sent the weights in a group of its own, and fails alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rollover.engine.background import in_time
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.pool.members import Act, Member, Members
from rollover.engine.servers.weights.transfer import GroupMember, Receiver, TransferFailed, send_to_all
from rollover.errors import EngineError
from rollover.weights.sending import SenderLost, SentByHolder

logger = logging.getLogger(__name__)


class GroupUpdate:
    """One version of the weights on its way to the members of a pool."""

    def __init__(self, members: Members, config: ServerConfig) -> None:
        self._members = members
        self._config = config

    async def send(self, members: Sequence[Member], version: int, source: SentByHolder) -> dict[Member, EngineError]:
        """Send to members that stand still, and return the members that failed. Raises ``WeightsGone`` when the weights
        can no longer be had from anywhere; when cancelled, takes out the members that were not done."""
        try:
            done, failed = await self._sent(list(members), version, source)
        except BaseException as e:
            if not isinstance(e, Exception):
                left = EngineError(f"it was left in the middle: it did not load weights version {version} yet")
                self._members.take_out(dict.fromkeys(members, left))
            raise
        return failed | await self._each(
            done, lambda member: _engine(member).settle(version), f"load weights version {version}"
        )

    async def _each(self, members: Sequence[Member], act: Act, what: str) -> dict[Member, EngineError]:
        """Do ``act`` on members at once, including members that are out and stand still until they have weights again.
        Returns the failures by member."""
        limit_s = self._config.install_timeout_s
        out = [member for member in members if member.is_down]
        failed, ends = await asyncio.gather(
            self._members.each([member for member in members if not member.is_down], act, limit_s, what),
            asyncio.gather(*(failure_of(in_time(act(member), limit_s, member.name, what)) for member in out)),
        )
        return failed | {member: end for member, end in zip(out, ends, strict=True) if end is not None}

    async def _sent(
        self, left: list[Member], version: int, source: SentByHolder
    ) -> tuple[list[Member], dict[Member, EngineError]]:
        """Return the members that have received everything, and how the others failed."""
        failed: dict[Member, EngineError] = {}
        while left:
            try:
                failed |= (unready := await self._send(left, version, source))
                return [member for member in left if member not in unready], failed
            except SenderLost as e:  # whoever holds the weights limits how often
                logger.warning("weights version %d are sent again: %s", version, e)
            except _GroupFailed as e:
                failed |= e.failed
                left = [member for member in left if member not in e.failed]
                if left:
                    names = ", ".join(member.name for member in left)
                    logger.warning("weights version %d are sent again to %s: %s", version, names, e)
                if not e.is_evident:
                    return await self._sent_alone(left, version, source, failed)
        return [], failed

    async def _sent_alone(
        self, left: Sequence[Member], version: int, source: SentByHolder, failed: dict[Member, EngineError]
    ) -> tuple[list[Member], dict[Member, EngineError]]:
        done = []
        for member in left:
            own_done, own_failed = await self._sent([member], version, source)
            done += own_done
            failed |= own_failed
        return done, failed

    async def _send(self, members: Sequence[Member], version: int, source: SentByHolder) -> dict[Member, EngineError]:
        """Send to members in one group. Returns the members that did not get so far. Raises ``_GroupFailed``."""
        receivers: dict[Member, Receiver] = {}

        async def prepare(member: Member) -> None:
            receivers[member] = await _engine(member).prepare(version, source)

        unready = await self._each(members, prepare, f"get ready for weights version {version}")
        if not receivers:
            return unready
        formats = _engine(members[0]).formats
        try:
            await send_to_all(list(receivers.values()), source, formats, self._config)
        except TransferFailed as e:
            gone = {member: e.gone[r] for member, r in receivers.items() if r in e.gone}
            if not gone and len(receivers) == 1:
                gone = {member: e.errors.get(r, e) for member, r in receivers.items()}
            raise _GroupFailed(str(e), {**unready, **gone}, is_evident=bool(gone)) from e
        return unready


class _GroupFailed(Exception):
    def __init__(self, message: str, failed: Mapping[Member, EngineError], *, is_evident: bool) -> None:
        super().__init__(message)
        self.failed = failed
        self.is_evident = is_evident
        """True when the servers at fault are among the failed ones."""


async def failure_of(work: Coroutine[Any, Any, None]) -> EngineError | None:
    try:
        await work
    except EngineError as e:
        return e
    return None


def _engine(member: Member) -> GroupMember:
    assert member.engine.group is not None
    return member.engine.group
