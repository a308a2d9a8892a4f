"""Models of what takes time: a decoding replica, and latencies of training and scoring."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """One engine replica. An iteration decodes one token for each of B running samples in ``c0_s (1 + B / b0)``:
    weights are read once per iteration, a key-value cache once per sample."""

    c0_s: float
    """Time of an iteration as B goes to 0."""
    b0: float
    """Batch at which an iteration takes twice that."""
    prefill_tokens_per_s: float = math.inf
    """Decoding stands still while prompts and lost caches are computed."""
    kv_tokens: float = math.inf
    """Room of the key-value cache. When it is full, parked caches go first, then the youngest sample waits."""
    max_running: int = 2**31
    """Samples decoded at the same time."""
    swap_pause_s: float = 0.0
    """Decoding stands still this long for new weights."""
    fast_lane: bool = False
    """Takes only samples that ask for the fast lane."""

    def __post_init__(self) -> None:
        for key in ("c0_s", "b0", "prefill_tokens_per_s", "kv_tokens", "max_running"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be above 0, got {getattr(self, key)}")
        if not self.swap_pause_s >= 0:
            raise ValueError(f"swap_pause_s must be at least 0 seconds, got {self.swap_pause_s}")

    def iteration_s(self, num_running: float) -> float:
        return self.c0_s * (1 + num_running / self.b0)

    @property
    def capacity(self) -> float:
        """What a sample more or less is measured by when replicas are compared."""
        return self.max_running if self.max_running < 2**31 else self.b0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """``base_s + s_per_token * tokens``, times a lognormal factor of mean 1 where ``sigma`` is above 0."""

    base_s: float = 0.0
    s_per_token: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        for key in ("base_s", "s_per_token", "sigma"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must be at least 0, got {getattr(self, key)}")

    @property
    def is_zero(self) -> bool:
        return self.base_s == self.s_per_token == 0

    def seconds(self, num_tokens: int, rng: random.Random) -> float:
        seconds = self.base_s + self.s_per_token * num_tokens
        return seconds * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma) if self.sigma else seconds


NO_TIME = Latency()
