"""The choice of the server that gets the next call of a pool. Pure: no engine, no clock, no asyncio.

What it keeps true: only members that are up get calls; a member's load is the number of calls assigned to it and not
released; siblings share a member, which then prefills their prompt once, unless that would unbalance the pool.
"""

from __future__ import annotations

from collections import OrderedDict

from rollover.engine.servers.membership import Membership

AFFINITY_SLACK = 0.25
"""Share of its capacity by which a member may be fuller than the emptiest one and still get its
sibling."""
_MAX_KEYS = 8192


class Dispatch:
    """Assigns calls to the member with most room, or to that of their siblings.

    Example: of two members with 64 slots, one with 10 calls and one with 3, the second gets the next prompt.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._homes: OrderedDict[str, int] = OrderedDict()
        """The member to which the last call of a prompt went."""

    def assign(self, prompt_key: str) -> int | None:
        """Choose the member that gets a call of this prompt, and count it as its load; ``None`` when none is up."""
        members, up = self._membership.members, self._membership.up
        if not up:
            return None
        chosen = min(up, key=lambda i: (members[i].share, i))
        home = self._homes.get(prompt_key)
        if home is not None and home in up and self._may_take_sibling(home, least=members[chosen].share):
            chosen = home
        self._homes[prompt_key] = chosen
        self._homes.move_to_end(prompt_key)
        if len(self._homes) > _MAX_KEYS:
            self._homes.popitem(last=False)
        members[chosen].load += 1
        return chosen

    def _may_take_sibling(self, home: int, *, least: float) -> bool:
        member = self._membership.members[home]
        return member.load < member.capacity and member.share <= least + AFFINITY_SLACK

    def release(self, index: int) -> None:
        """End a call that was assigned to the member."""
        member = self._membership.members[index]
        member.load -= 1
        assert member.load >= 0, f"{member.name} has fewer calls than none"
