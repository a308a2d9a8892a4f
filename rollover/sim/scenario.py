"""The environment of a simulated run, apart from the strategy and the lengths: a model of a decoding replica, and the
latencies of training and scoring."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rollover.engine.base import Capabilities
from rollover.engine.config import check_colocated


def _require(record: object, words: str, holds: Callable[[float], bool], *fields: str) -> None:
    """Raise ``ValueError`` for a field whose value must do what ``words`` say and does not."""
    for field in fields:
        if not holds(value := getattr(record, field)):
            raise ValueError(f"{field} must {words}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """One engine replica. An iteration decodes one token for each of B running samples in ``c0_s (1 + B / b0)``:
    weights are read once per iteration, a key-value cache once per sample.

    Examples:
        >>> replica = ReplicaModel(c0_s=0.01, b0=64.0)
        >>> replica.iteration_s(0), replica.iteration_s(64)
        (0.01, 0.02)
    """

    c0_s: float
    """Time of an iteration as B approaches 0."""
    b0: float
    """Batch size at which an iteration takes twice as long."""
    prefill_tokens_per_s: float = math.inf
    """Prefill rate; decoding pauses while prompts and lost caches are computed."""
    prefill_call_s: float = 0.0
    """Fixed seconds of a prefill, once for all samples that are prefilled at the same moment."""
    call_s: float = 0.0
    """Seconds to send a sample to the engine, once per call."""
    kv_tokens: float = math.inf
    """Capacity of the key-value cache. If full, parked caches are evicted first; then the youngest sample waits."""
    max_running: int = 2**31
    """Maximum number of samples decoded at the same time."""
    swap_pause_s: float = 0.0
    """Seconds for which decoding pauses for new weights."""
    fast_lane: bool = False
    """True if it takes only samples that ask for the fast lane."""

    def __post_init__(self) -> None:
        _require(self, "be above 0", lambda x: x > 0, "c0_s", "b0", "prefill_tokens_per_s", "kv_tokens", "max_running")
        _require(self, "be at least 0 seconds", lambda x: x >= 0, "prefill_call_s", "call_s", "swap_pause_s")

    def iteration_s(self, num_running: float) -> float:
        return self.c0_s * (1 + num_running / self.b0)

    @property
    def most_tokens_per_s(self) -> float:
        """Return the rate that no batch exceeds: the rate of a batch so large that only caches are read."""
        return self.b0 / self.c0_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """``base_s + s_per_token * tokens``, times a lognormal factor of mean 1 where ``sigma`` is above 0.

    Example: ``Latency(base_s=2.0, s_per_token=0.01)`` takes 5 s for 300 tokens.
    """

    base_s: float = 0.0
    s_per_token: float = 0.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        _require(self, "be at least 0", lambda x: x >= 0, "base_s", "s_per_token", "sigma")

    @property
    def is_zero(self) -> bool:
        return self.base_s == self.s_per_token == 0

    def seconds(self, num_tokens: int, rng: random.Random) -> float:
        seconds = self.base_s + self.s_per_token * num_tokens
        return seconds * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma) if self.sigma else seconds


NO_TIME = Latency()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Episodes: responses consist of turns, and the environment answers each. Meanwhile the sample occupies no slot.

    Example: with ``Turns(tokens=64, answer_s=0.1, observed_tokens=12)`` a response of 150 tokens has turns of 64, 64
    and 22 tokens, the environment answers three times, and 24 tokens are read between the turns.
    """

    tokens: int
    """Sampled tokens of a turn; the last one has the rest."""
    answer_s: float = 0.0
    """Mean time of an answer."""
    answer_sigma: float = 0.0
    """Deviation of the logarithm of that time."""
    observed_tokens: int = 0
    """Tokens of an answer that another turn follows."""

    def __post_init__(self) -> None:
        _require(self, "be at least 1", lambda x: x >= 1, "tokens")
        _require(self, "be at least 0", lambda x: x >= 0, "answer_s", "answer_sigma", "observed_tokens")

    @property
    def answer(self) -> Latency:
        return Latency(base_s=self.answer_s, sigma=self.answer_sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Replicas, trainer and rewards.

    Examples:
        Two replicas that decode up to 64 samples each:

        >>> scenario = Scenario(replicas=2 * (ReplicaModel(c0_s=0.01, b0=64.0, max_running=64),))
        >>> scenario.max_running
        128
    """

    replicas: tuple[ReplicaModel, ...]
    trainer: Latency = NO_TIME
    """Time of a training step, as a function of the response tokens of its batch."""
    reward: Latency = NO_TIME
    """Time of a sample's reward, as a function of its response tokens."""
    turns: Turns | None = None
    """The turns of episodes; ``None`` if each response is decoded in one piece."""
    kv_on_update: Literal["keep", "recompute"] = "recompute"
    """``keep``: caches survive weight updates. ``recompute``: they are recomputed."""
    colocated: bool = False
    """If true, replicas and trainer take turns on the same devices, and no cache survives a step. ``swap_pause_s`` then
    includes the time of releasing memory and acquiring it again."""
    accuracy: float = 0.5
    """Probability of reward 1 instead of 0, mean over prompts."""
    accuracy_icc: float = 0.0
    """Intraclass correlation of what decides a response (``rollover.sim.rewards``): at 0 all prompts are equally hard,
    at 1 each is always or never solved."""
    accuracy_length_correlation: float = 0.0
    """Correlation between how easy a prompt is and how long its responses are; below 0, long responses are wrong more
    often."""
    filter_zero_signal: bool = False
    """If true, groups of equal rewards are dropped (dynamic sampling)."""

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("there must be at least one replica")
        if all(r.fast_lane for r in self.replicas):
            raise ValueError("at least one replica must be outside the fast lane")
        if self.colocated:
            check_colocated(self.kv_on_update)
        _require(self, "lie in [0, 1]", lambda x: 0 <= x <= 1, "accuracy", "accuracy_icc")
        _require(self, "lie in [-1, 1]", lambda x: -1 <= x <= 1, "accuracy_length_correlation")

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
