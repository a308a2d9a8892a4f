"""All strategies that can be simulated. Some of them no engine can run, or they serve comparison alone:
``RolloutConfig`` does not know these; ``SimulatedRollout`` does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import AnyStrategyConfig, AprilConfig, StrategyConfig
from rollover.settings.shape import ByKind, kinds
from rollover.sim.strategies.fast_lane import FastLaneConfig
from rollover.sim.strategies.probe import ProbeConfig
from rollover.sim.strategies.sorted import SortedConfig
from rollover.sim.strategies.tail_rounds import TailRoundsConfig
from rollover.sim.strategies.threshold import ThresholdConfig
from rollover.sim.strategies.windowed import WindowedConfig

AnySimulatedConfig = (
    AnyStrategyConfig
    | SortedConfig
    | TailRoundsConfig
    | ThresholdConfig
    | WindowedConfig
    | ProbeConfig
    | FastLaneConfig
)
"""Distinguished by ``kind``. One that is not in ``AnyStrategyConfig`` also has a row in ``SIMULATED_ONLY``, which names
the strategy to train with instead."""

SIMULATED: dict[str, type[StrategyConfig]] = kinds(AnySimulatedConfig)
"""By kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRollout(RolloutConfig):
    """A ``RolloutConfig`` whose strategy may be any that can be simulated.

    Example:
        ``SimulatedRollout.of("sorted", group_size=4, over_sampling_batch_size=96)`` puts the first setting beside the
        strategy and the second into its options.
    """

    strategy: Annotated[AnySimulatedConfig, ByKind()] = field(default_factory=AprilConfig)  # type: ignore[assignment]

    @classmethod
    def of(cls, kind: str, **settings: Any) -> SimulatedRollout:
        """Return a rollout of this strategy; ``settings`` holds both its options and the settings that all strategies
        share."""
        strategy: Any = SIMULATED[kind]
        options = {key: settings.pop(key) for key in {f.name for f in fields(strategy)} & settings.keys()}
        return cls(strategy=strategy(**options), **settings)
