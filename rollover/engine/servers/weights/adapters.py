"""Remember which adapter a server has beside its base: each that is sent has a name of its own.

A call names the adapter that computes it and keeps it to its end. So calls are ended before another adapter is sent, no
cached block is found by a call of another one, and what is left of earlier ones, including those of a run that was
killed, is known by its name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from rollover.weights.adapters import AdapterShape

_OURS = "rollover:"


class HeldAdapter:
    """Remembers what one server has, as far as we know: which adapter, and whether the base is below it.

    Args:
        shape: of the adapters that it will be given; ``None`` if it is given full weights alone.

    Example: after ``held.took_full("rollover:r:0", is_base=True)`` a server whose label is still that one needs no
    base; one that was started again and says ``"default"`` does.
    """

    def __init__(self, shape: AdapterShape | None) -> None:
        self.shape = shape
        self.name: str | None = None
        """Name by which calls refer to the adapter in force."""
        self._label: str | None = None
        self._has_base = False

    def needs_base(self, label: str) -> bool:
        """Say whether a server with this label has to be given the base before an adapter."""
        return not self._has_base or label != self._label

    def took_full(self, label: str, *, is_base: bool) -> None:
        """Record that the server has loaded full weights."""
        self.name, self._label, self._has_base = None, label, is_base

    def took_adapter(self, label: str, name: str) -> None:
        """Record that the server has put an adapter beside the base."""
        self.name, self._label = name, label

    @staticmethod
    def new_name(label: str) -> str:
        """Return a name for an adapter with this label that none has had before."""
        return f"{label}/{secrets.token_hex(4)}"

    def stale(self, names: Iterable[str]) -> list[str]:
        """Return the adapters on a server that we, or a run before us, have left there."""
        return [name for name in names if name.startswith(_OURS) and name != self.name]
