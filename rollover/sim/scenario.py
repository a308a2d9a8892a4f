"""Everything a simulated run happens in, apart from the strategy and the lengths."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from rollover.engine.base import Capabilities
from rollover.sim.models import NO_TIME, Latency, ReplicaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A replica that is gone for a while. What it decoded is kept, what it cached is lost."""

    replica: int
    at_s: float
    until_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < self.until_s:
            raise ValueError(
                f"a failure must begin at 0 s or later and end after that, got {self.at_s} to {self.until_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Replicas, trainer and rewards."""

    replicas: tuple[ReplicaModel, ...]
    trainer: Latency = NO_TIME
    """Of a step, by the response tokens of its batch."""
    reward: Latency = NO_TIME
    """Of a sample, by its response tokens."""
    kv_on_update: Literal["keep", "recompute"] = "recompute"
    """Whether caches outlive new weights."""
    accuracy: float = 0.5
    """Chance of reward 1 instead of 0, the same for all samples."""
    filter_zero_signal: bool = False
    """Whether groups of equal rewards are dropped (dynamic sampling)."""
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("replicas must name at least one")
        if all(r.fast_lane for r in self.replicas):
            raise ValueError("replicas: at least one must take samples that do not ask for the fast lane")
        if not 0 <= self.accuracy <= 1:
            raise ValueError(f"accuracy must lie in [0, 1], got {self.accuracy}")
        for failure in self.failures:
            if not 0 <= failure.replica < len(self.replicas):
                raise ValueError(f"failures name replica {failure.replica}, there are {len(self.replicas)}")

    @property
    def max_running(self) -> int:
        return sum(r.max_running for r in self.replicas)

    @property
    def capabilities(self) -> Capabilities:
        """Return what strategies are told of the engine."""
        rates = [r.prefill_tokens_per_s * r.c0_s for r in self.replicas]
        return Capabilities(
            max_running=self.max_running,
            max_context_tokens=sys.maxsize,
            in_flight_update=True,
            prefill_tokens_per_iteration=math.inf if self.kv_on_update == "keep" else sum(rates),
        )

    @property
    def has_fast_lane(self) -> bool:
        return any(r.fast_lane for r in self.replicas)
