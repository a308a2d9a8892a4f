"""The base class of a strategy's options, and the options that several strategies share.

Each strategy's file has its own ``StrategyConfig``: its options, their checks and defaults, and the facts about the
strategy that the rest of a run depends on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from rollover.engine.base import Capabilities
from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategy import OnFull, Strategy
from rollover.settings.changes import Inexact


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The option with which a strategy trades lag for throughput, and the values that a frontier tries.

    Example:
        ``Knob(key="num_running", symbol="C", scale="samples", values=(1.0, 2.0))`` tries as many samples in flight as
        a batch has, and twice as many.
    """

    key: str
    """A field of the strategy's config, or ``max_staleness``."""
    symbol: str
    """Name of the option in figures."""
    scale: Literal["groups", "samples", "plain"]
    """Unit of the values: multiples of the groups of a batch, multiples of its samples, or plain numbers."""
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """The options of one strategy, and the facts about it that the rest of a run depends on.

    Example:
        ``AprilConfig(over_sampling_batch_size=64).build(shared, engine)`` is an ``April`` that launches 64 groups.
    """

    builds: ClassVar[type[Strategy]]
    """The strategy that these options configure."""
    on_policy: ClassVar[bool] = False
    """True when every token is trained by the weights that sampled it, so that the staleness bound is 0."""
    needs_in_flight_update: ClassVar[bool] = False
    """True when the strategy makes sense only on an engine that can load weights under running samples."""
    knob: ClassVar[Knob | None] = None

    kind: str

    def build(self, shared: SharedConfig, engine: Capabilities) -> Strategy:
        """Return the strategy with these options, for an engine with these capabilities."""
        return self.builds(**self.arguments(shared, engine))

    @property
    def title(self) -> str:
        """Return the name of the strategy in messages, with the option that makes it overlap with training."""
        return repr(self.kind) + " with overlap = true" * bool(getattr(self, "overlap", False))

    def describe(self, shared: SharedConfig) -> str:
        """Return how much is started, in words for the plan of a run."""
        return f"{shared.rollout_batch_size} groups in flight at the start of a round"

    @property
    def overlaps_training(self) -> bool:
        """Return whether generation continues while the trainer trains."""
        return self.builds.on_full is OnFull.KEEP

    @property
    def discards(self) -> bool:
        """Return whether groups left unfinished by a round are thrown away, so that none of them grows old."""
        return self.builds.on_full is OnFull.DISCARD

    def staleness_needed(self, shared: SharedConfig) -> int:
        """Return the smallest bound that admits as many groups as the strategy wants open at the same time."""
        return 0

    def staleness_bound(self, shared: SharedConfig) -> int:
        """Return ``max_staleness`` with its default filled in."""
        if shared.max_staleness is not None:
            return shared.max_staleness
        needed = self.staleness_needed(shared)
        return needed if self.on_policy or self.discards else max(4, needed)

    def check(self, shared: SharedConfig) -> None:
        """Raise ``ValueError`` when the options contradict the settings that all strategies share."""
        if self.on_policy and shared.max_staleness:
            raise ValueError(
                f"rollout.max_staleness is {shared.max_staleness}, but strategy {self.kind!r} is always at 0;"
                " remove it, or choose a strategy that carries work over"
            )

    def knob_value(self, shared: SharedConfig) -> float:
        """Return the option that ``knob`` names, with its default filled in; infinite when it means as many as fit."""
        assert self.knob is not None, f"{self.kind} has no knob"
        value = getattr(self, self.knob.key)
        return math.inf if value is None else float(value)

    def reshaped(self, before: SharedConfig, after: SharedConfig) -> Self:
        """Return these options for batches of another shape: over-sampling and concurrency scale with them."""
        return self

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        """Return the fields of the strategy that these options and the shared settings determine."""
        siblings = shared.num_siblings
        return {
            "batch_size": shared.rollout_batch_size * siblings,
            "group_size": shared.group_size // siblings,
            "num_siblings": siblings,
            "max_staleness": self.staleness_bound(shared),
        }

    def require_at_least(self, least: float, *keys: str) -> None:
        """Raise ``ValueError`` for an option that is set and is below ``least`` or not finite."""
        for key in keys:
            value = getattr(self, key)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"rollout.strategy.{key} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class OverSampling(StrategyConfig):
    """The option of strategies whose rounds start with more groups than a batch trains.

    Example:
        With ``over_sampling_batch_size=96`` and batches of 32 groups, two batches may wait while one is being trained:
        ``staleness_needed`` is 2.
    """

    knob = Knob(key="over_sampling_batch_size", symbol="r", scale="groups", values=(1.25, 1.5, 2.0, 2.5, 3.0))

    over_sampling_batch_size: int | None = None
    """Groups in flight at the start of a round; twice `rollout_batch_size` when left out."""

    def launched_groups(self, shared: SharedConfig) -> int:
        """Return ``over_sampling_batch_size`` with its default filled in: N' of APRIL."""
        return self.over_sampling_batch_size or 2 * shared.rollout_batch_size

    def knob_value(self, shared: SharedConfig) -> float:
        return self.launched_groups(shared)

    def reshaped(self, before: SharedConfig, after: SharedConfig) -> Self:
        if (size := self.over_sampling_batch_size) is None:
            return self
        grown = round(size * after.rollout_batch_size / before.rollout_batch_size)
        return replace(self, over_sampling_batch_size=max(after.rollout_batch_size, grown))

    def describe(self, shared: SharedConfig) -> str:
        return f"{self.launched_groups(shared)} groups in flight at the start of a round"

    def staleness_needed(self, shared: SharedConfig) -> int:
        return -(-self.launched_groups(shared) // shared.rollout_batch_size) - 1

    def check(self, shared: SharedConfig) -> None:
        super().check(shared)
        size, bound = self.over_sampling_batch_size, self.staleness_bound(shared)
        if size is not None and size < shared.rollout_batch_size:
            raise ValueError(
                f"rollout.strategy.over_sampling_batch_size ({size}) must be at least"
                f" rollout.rollout_batch_size ({shared.rollout_batch_size})"
            )
        if bound < self.staleness_needed(shared):
            raise ValueError(
                f"rollout.max_staleness ({bound}) is below {self.staleness_needed(shared)}, which"
                f" {self.launched_groups(shared)} groups in flight for batches of {shared.rollout_batch_size} need;"
                " raise it, or lower rollout.strategy.over_sampling_batch_size"
            )

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        launched = self.launched_groups(shared) * shared.num_siblings
        return {**super().arguments(shared, engine), "launched_groups": launched}


@dataclass(frozen=True, kw_only=True)
class NumRunning(StrategyConfig):
    """The option of strategies that keep a fixed number of samples in flight.

    Example:
        ``num_running=512`` on an engine that decodes 256 at a time keeps 256 in flight.
    """

    knob = Knob(key="num_running", symbol="C", scale="samples", values=(0.75, 1.0, 1.5, 2.0, 3.0))

    num_running: Inexact[int | None] = None
    """Samples in flight; as many as the engine can run when left out."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "num_running")

    def reshaped(self, before: SharedConfig, after: SharedConfig) -> Self:
        if (running := self.num_running) is None:
            return self
        return replace(self, num_running=max(1, round(running * after.num_samples / before.num_samples)))

    def describe(self, shared: SharedConfig) -> str:
        return (
            "as many samples in flight as fit" if self.num_running is None else f"{self.num_running} samples in flight"
        )

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        running = min(self.num_running or engine.max_running, engine.max_running)
        return {**super().arguments(shared, engine), "num_running": running}
