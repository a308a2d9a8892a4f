"""All strategies that can be simulated: those that runs can use, and those that no engine here can run or that serve
comparison alone. ``RolloutConfig`` does not know the latter; ``SimulatedRollout`` does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Union

from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import STRATEGIES, AprilConfig, StrategyConfig
from rollover.settings.schema import ByKind
from rollover.sim.strategies.fast_lane import FastLane, FastLaneConfig
from rollover.sim.strategies.probe import Probe, ProbeConfig
from rollover.sim.strategies.sorted import Sorted, SortedConfig
from rollover.sim.strategies.tail_rounds import TailRounds, TailRoundsConfig
from rollover.sim.strategies.threshold import Threshold, ThresholdConfig
from rollover.sim.strategies.windowed import Windowed, WindowedConfig

SIMULATED: dict[str, type[StrategyConfig]] = {
    **STRATEGIES,
    "sorted": SortedConfig,
    "tail_rounds": TailRoundsConfig,
    "threshold": ThresholdConfig,
    "windowed": WindowedConfig,
    "probe": ProbeConfig,
    "fast_lane": FastLaneConfig,
}
"""By kind."""

if TYPE_CHECKING:
    AnySimulatedConfig = StrategyConfig
else:
    AnySimulatedConfig = Union[tuple(SIMULATED.values())]  # noqa: UP007


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRollout(RolloutConfig):
    """A ``RolloutConfig`` whose strategy may be any that can be simulated.

    Example:
        ``SimulatedRollout.of("sorted", group_size=4, over_sampling_batch_size=96)`` puts the first setting beside the
        strategy and the second into its options.
    """

    strategy: Annotated[AnySimulatedConfig, ByKind()] = field(default_factory=AprilConfig)

    @classmethod
    def of(cls, kind: str, **settings: Any) -> SimulatedRollout:
        """A rollout of this strategy with ``settings``, its options and what all strategies share alike."""
        strategy = SIMULATED[kind]
        options = {key: settings.pop(key) for key in {f.name for f in fields(strategy)} & settings.keys()}
        return cls(strategy=strategy(**options), **settings)


__all__ = [
    "SIMULATED",
    "AnySimulatedConfig",
    "FastLane",
    "FastLaneConfig",
    "Probe",
    "ProbeConfig",
    "SimulatedRollout",
    "Sorted",
    "SortedConfig",
    "TailRounds",
    "TailRoundsConfig",
    "Threshold",
    "ThresholdConfig",
    "Windowed",
    "WindowedConfig",
]
