"""The ids of generation calls, each of which may be used once.

Invariants: an id is refused while its call is open, however long that is, and for as long as anything of the
call may still arrive: until ``NUM_REMEMBERED`` others have been used after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from rollover.errors import EngineError

NUM_REMEMBERED = 65_536
"""Far more calls than any engine has open at the same time, and some 10 MB."""


class UsedIds:
    """The ids that an engine has seen.

    Args:
        open_calls: the engine's open calls by id; a view that follows them.
    """

    def __init__(self, open_calls: Container[str]) -> None:
        self._open_calls = open_calls
        self._used: OrderedDict[str, None] = OrderedDict()
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._used)

    def claim(self, request_id: str) -> None:
        """Use an id for a new call. Raises ``EngineError`` if it was used before."""
        self.check(request_id)
        self._used[request_id] = None
        if len(self._used) > NUM_REMEMBERED:
            self._used.popitem(last=False)

    def check(self, request_id: str) -> None:
        """Raise ``EngineError`` if an id was used before."""
        if request_id in self._open_calls or request_id in self._used:
            raise EngineError(f"request id {request_id!r} was used before; each generation call needs its own")
