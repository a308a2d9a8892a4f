"""The ``[rollout]`` section: the settings that all strategies share, and the strategy with its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rollover.engine.base import Capabilities
from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategies import SIMULATED_ONLY, AnyStrategyConfig, AprilConfig
from rollover.rollout.strategy import Strategy
from rollover.settings.schema import ByKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(SharedConfig):
    """Settings that decide which rollouts are launched, stopped, resumed and trained.

    Example:
        ``RolloutConfig(rollout_batch_size=32, strategy=AprilConfig(over_sampling_batch_size=48))`` starts each round
        with 48 groups, 16 more than a step trains; ``staleness_bound`` is then 4.
    """

    strategy: Annotated[AnyStrategyConfig, ByKind(elsewhere=SIMULATED_ONLY)] = field(default_factory=AprilConfig)
    """Decides how much is started, what is stopped and what is trained first. `strategy = "sync"` is short for a table
    `[rollout.strategy]` with `kind = "sync"` and no options."""

    def __post_init__(self) -> None:
        super(RolloutConfig, self).__post_init__()  # slots make a second class: plain super() fails
        self.strategy.check(self)

    @property
    def staleness_bound(self) -> int:
        """Return ``max_staleness`` with its default filled in."""
        return self.strategy.staleness_bound(self)

    def build_strategy(self, engine: Capabilities) -> Strategy:
        """Return the strategy with its options, for an engine with these capabilities."""
        return self.strategy.build(self, engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on how long and how often the driver tolerates failures.

    Example: ``Limits(stall_timeout_s=120.0)`` ends a run in which nothing was decoded or scored for two minutes.
    """

    save_every_tokens: int = 256
    stall_timeout_s: float = 600.0
    abort_timeout_s: float = 60.0
    max_retries: int = 3
    max_failed_batches: int = 2
    max_filtered_batches: int = 32

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Limits:
        return cls(
            save_every_tokens=config.save_every_tokens,
            stall_timeout_s=config.stall_timeout_s,
            max_retries=config.max_retries,
        )
