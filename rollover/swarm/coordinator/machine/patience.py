"""The time for which calls have been held back for members that were expected to finish them sooner.

The dispatch rule lets a call wait for a member that is busy or fetching weights if that member is expected to finish
it before any member with room. Such an expectation can be wrong: it rests on speeds that members report. A call that
was held back for as long as the fastest member with room would have taken goes to that member.

What it keeps true: waiting at most doubles the time that a call takes, whatever members report of themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_KINDS = 64
"""Kinds of calls that are remembered; there are few, since a kind is what is due at one step."""
FORGOTTEN_S = 60.0
"""A kind that was not asked about for this long begins again."""


class CallPatience:
    """Remembers by kind of call since when none could be given away though there was room.

    Example: after ``waited_s("due at 7", 10.0)``, ``waited_s("due at 7", 25.0)`` returns 15. Then
    ``given("due at 7", 30.0)`` says that a member that was waited for has taken one, so that
    ``waited_s("due at 7", 32.0)`` returns 2.
    """

    def __init__(self) -> None:
        self._waits: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """Since when calls of a kind are held back, and when they were last asked about."""

    def waited_s(self, kind: Hashable, now_s: float) -> float:
        """Return for how long calls of a kind have been held back; that begins when it is first asked for."""
        since_s, asked_s = self._waits.pop(kind, (now_s, now_s))
        if now_s - asked_s > FORGOTTEN_S:
            since_s = now_s
        self._waits[kind] = since_s, now_s
        if len(self._waits) > MAX_KINDS:
            self._waits.popitem(last=False)
        return now_s - since_s

    def given(self, kind: Hashable, now_s: float) -> None:
        """Begin again: a call of this kind went where the dispatch rule wanted it."""
        if kind in self._waits:
            self._waits[kind] = now_s, now_s
