"""The token account of a run: where every decoded token went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollover.types import WasteCause


@dataclass(slots=True)
class Tokens:
    """The token account of a run: decoded = trained + wasted + live.

    Example: of 1,000 decoded tokens 600 were trained and 150 dropped with their groups. 250 are live: they are being
    decoded, parked, or in groups that no batch has taken yet.
    """

    decoded: int = 0
    trained: int = 0
    wasted: Counter[WasteCause] = field(default_factory=Counter)
    reprefilled: int = 0

    @property
    def live(self) -> int:
        return self.decoded - self.trained - sum(self.wasted.values())

    def write_off(self, untrained: Mapping[WasteCause, int], sign: int) -> None:
        """Move tokens without a gradient from the trained ones to the waste, or back again with ``sign`` -1."""
        for cause, num_tokens in untrained.items():
            self.trained -= sign * num_tokens
            self.wasted[cause] += sign * num_tokens
