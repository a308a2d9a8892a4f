"""The ``[rollout]`` section: the settings that all strategies share, and the strategy with its options."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from rollover.engine.base import Capabilities
from rollover.errors import ConfigError
from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategies import SIMULATED_ONLY, STRATEGIES, AnyStrategyConfig, AprilConfig
from rollover.rollout.strategy import Strategy
from rollover.settings.schema import build
from rollover.settings.shape import ByKind
from rollover.settings.toml import Document


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
        super(RolloutConfig, self).__post_init__()  # slots create a second class, so plain super() fails
        self.strategy.check(self)

    @property
    def staleness_bound(self) -> int:
        """Return ``max_staleness`` with its default filled in."""
        return self.strategy.staleness_bound(self)

    def build_strategy(self, engine: Capabilities) -> Strategy:
        """Return the strategy with its options, for an engine with these capabilities."""
        return self.strategy.build(self, engine)


def strategy(kind: str, engine: Capabilities, **settings: Any) -> Strategy:
    """Create a strategy for an engine.

    Args:
        kind: one of ``STRATEGIES``.
        settings: options of the strategy by their names in the table ``[rollout.strategy]`` of a run's config, and from
            ``[rollout]`` ``rollout_batch_size``, ``group_size``, ``max_staleness`` and ``max_new_tokens``.

    Raises:
        ConfigError: there is no such strategy or setting, or a value or an engine that cannot work.

    Examples:
        >>> engine = Capabilities(max_running=16, max_context_tokens=4096)
        >>> april = strategy("april", engine, rollout_batch_size=4, group_size=2, over_sampling_batch_size=6)
        >>> april.batch_size, april.launched_groups, april.max_staleness
        (4, 6, 4)
    """
    own = {f.name for f in fields(STRATEGIES[kind])} if kind in STRATEGIES else {}
    options = {name: value for name, value in settings.items() if name in own}
    shared = {name: value for name, value in settings.items() if name not in own}
    known = {"rollout_batch_size", "group_size", "max_staleness", "max_new_tokens"}
    if stray := sorted(shared.keys() & {f.name for f in fields(SharedConfig)} - known):
        where = "SamplingParams and the limits of RolloutDriver hold what strategies do not"
        raise ConfigError(f"strategy({kind!r}): {stray[0]} is no setting of a strategy: {where}")
    document = Document(name=f"strategy({kind!r})", data={**shared, "strategy": {"kind": kind, **options}})
    config = build(RolloutConfig, document)
    if config.strategy.needs_in_flight_update and not engine.in_flight_update:
        raise ConfigError(
            f"strategy({kind!r}) loads weights while samples are running, and this engine cannot"
            " (Capabilities.in_flight_update): choose another strategy"
        )
    return config.build_strategy(engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on how long and how often the driver tolerates failures.

    Examples:
        A run in which nothing is decoded for two minutes ends:

        >>> Limits(stall_timeout_s=120.0).max_retries
        3
    """

    save_every_tokens: int = 256
    """A running sample's tokens reach the journal at least this often."""
    stall_timeout_s: float = 600.0
    """Longest time without a token, while no environment or scorer is at work."""
    abort_timeout_s: float = 60.0
    """Longest time that the engine may take to stop calls."""
    max_retries: int = 3
    """Failures in a row, without a token in between, that a sample survives."""
    max_failed_batches: int = 2
    """Batches of samples that may fail in a row without one success."""
    max_dropped_batches: int = 32
    """Batches of groups that may be dropped in a row, by the group filter or for want of rewards."""

    @classmethod
    def from_config(cls, config: RolloutConfig, *, away_s: float = 0.0) -> Limits:
        """Return the limits that are set. ``away_s``: the longest that calls may wait for servers that are away."""
        return cls(
            save_every_tokens=config.save_every_tokens,
            stall_timeout_s=config.stall_timeout_s + away_s,
            max_retries=config.max_retries,
        )
