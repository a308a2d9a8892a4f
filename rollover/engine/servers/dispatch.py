"""The choice of the server that gets the next call of a pool. It waits for nothing and calls no engine.

What it keeps true: only members that are up get calls; a member's load is the number of calls assigned to it and not
released; siblings share a member, which then prefills their prompt once, unless that would unbalance the pool.
"""

from __future__ import annotations

from collections import OrderedDict

from rollover.engine.servers.members import Member, Members

AFFINITY_SLACK = 0.25
"""Share of its capacity by which a member may be fuller than the emptiest one and still get its
sibling."""
_MAX_KEYS = 8192


class Dispatch:
    """Assigns calls to the member with most room, or to that of their siblings.

    Example: of two members with 64 slots, one with 10 calls and one with 3, the second gets the next prompt.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._homes: OrderedDict[str, Member] = OrderedDict()
        """The member to which the last call of a prompt went."""

    def assign(self, prompt_key: str) -> Member | None:
        """Choose the member that gets a call of this prompt, and count it as its load; ``None`` when none is up."""
        if not (up := self._members.up):
            return None
        chosen = min(up, key=lambda member: member.share)
        home = self._homes.get(prompt_key)
        if home in up and home.load < home.capacity and home.share <= chosen.share + AFFINITY_SLACK:
            chosen = home
        self._homes[prompt_key] = chosen
        self._homes.move_to_end(prompt_key)
        if len(self._homes) > _MAX_KEYS:
            self._homes.popitem(last=False)
        chosen.load += 1
        return chosen

    def release(self, member: Member) -> None:
        """End a call that was assigned to the member."""
        member.load -= 1
        assert member.load >= 0, f"{member.name} has fewer calls than none"
