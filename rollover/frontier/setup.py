"""The setup of a study: lengths, batch shape, engine, trainer and rewards, and the origin of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from rollover.errors import ConfigError
from rollover.rollout.lag import LagOf
from rollover.rollout.shared import SharedConfig
from rollover.settings import schema, toml
from rollover.sim.scenario import Latency, ReplicaModel, Scenario, Turns
from rollover.sim.strategies import SimulatedRollout
from rollover.types import UNBOUNDED
from rollover.workload.source import Lengths

PUBLISHED_LOAD = 2.4
"""Samples of a batch over B0 in APRIL's experiments: 256 samples, Qwen3-4B on 8 GPUs with B0 = 108."""
PREFILL_PER_C0 = 1600.0
"""Tokens prefilled in the time of an iteration over an empty batch: some billion parameters on today's accelerators."""
Unit = Literal["s", "c0"]
_MOST = {"replicas": 10_000, "fast_lane_replicas": 10_000}
_ACCURACY = ("accuracy", "accuracy_icc", "accuracy_length_correlation")
_OF_SCENARIO = ("trainer", "reward", "turns", "kv_on_update", "colocated", "filter_zero_signal", *_ACCURACY)
_FROM_ZERO = ("swap_pause_s", "fast_lane_replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """Section ``[engine]`` of a scenario file; unset keys are taken from the device, the benchmark or the run."""

    c0_s: float | None = None
    """Seconds of a decoding iteration over an empty batch."""
    b0: Annotated[float | None, UNBOUNDED] = None
    """Number of samples at which an iteration takes twice as long."""
    prefill_tokens_per_s: Annotated[float | None, UNBOUNDED] = None
    kv_tokens: Annotated[float | None, UNBOUNDED] = None
    """Capacity of the key-value cache of a replica, in tokens."""
    max_running: int | None = None
    """Number of samples that a replica decodes at the same time."""
    swap_pause_s: float | None = None
    """Seconds for which decoding pauses for new weights."""
    replicas: int | None = None
    fast_lane_replicas: int = 0
    """Number of replicas that take only samples that ask for the fast lane."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is None:
                continue
            if not (value >= 0 if field.name in _FROM_ZERO else value > 0):
                least = "at least" if field.name in _FROM_ZERO else "above"
                raise ValueError(f"{field.name} must be {least} 0, got {value}")
            if value > (most := _MOST.get(field.name, math.inf)):
                raise ValueError(f"{field.name} must be at most {most}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFile:
    """A scenario file. Every key may be left out."""

    rollout: SimulatedRollout | None = None
    """The setting currently in use, as in a run's config: its batch shape is simulated and its point is marked."""
    engine: EngineSection = EngineSection()
    trainer: Latency | None = None
    """Time of a training step, as a function of the response tokens of its batch."""
    reward: Latency | None = None
    """Time of a reward, as a function of the response tokens of its sample."""
    turns: Turns | None = None
    """The turns of episodes, between which environments act."""
    kv_on_update: Literal["keep", "recompute"] | None = None
    """``keep``: key-value caches survive weight updates. ``recompute``, the default: they are recomputed."""
    colocated: bool | None = None
    """If true, replicas and trainer take turns on the same devices, which loses caches at each step;
    ``engine.swap_pause_s`` is then the time that a turn costs."""
    accuracy: float | None = None
    """Probability of reward 1 instead of 0, mean over prompts."""
    accuracy_icc: float | None = None
    """Difference between prompts: at 0 all are equally hard, at 1 each is always or never solved."""
    accuracy_length_correlation: float | None = None
    """Correlation between how easy a prompt is and how long its responses are, from -1 to 1."""
    filter_zero_signal: bool | None = None
    """If true, groups of equal rewards are dropped (dynamic sampling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that is simulated except the strategies."""

    name: str
    """Name of the lengths."""
    lengths: Lengths
    rollout: SimulatedRollout
    """The batch shape, and the setting in use."""
    is_in_use: bool
    """True if the user specified the setting in use; otherwise only the batch shape counts."""
    scenario: Scenario
    unit: Unit
    """Unit of times: seconds, or iterations over an empty batch if no engine was given."""
    notes: tuple[str, ...] = ()
    """Sentences on the origin of the parameters."""
    max_staleness: int | None = None
    """Staleness bound of all settings; ``None`` for a strategy that holds nothing back."""
    lag_of: LagOf = "batch"
    """The lag that settings are compared by."""
    takes_turns: bool = False
    """True if trainer and engine share a device, or a host lets neither work beside the other."""

    @property
    def has_own_trainer(self) -> bool:
        """Return whether the trainer takes time, on devices of its own."""
        return not (self.scenario.colocated or self.takes_turns or self.scenario.trainer.is_zero)

    @property
    def cap_tokens(self) -> int:
        return self.lengths.cap_tokens


def read_scenario(file: Path) -> tuple[ScenarioFile, int | None]:
    """Read a scenario file; return it with the cap that its ``[rollout]`` names. Raises ``ConfigError`` naming file,
    line and key."""
    document = toml.read(file)
    rollout = document.data.get("rollout")
    cap = rollout.get("max_new_tokens") if isinstance(rollout, dict) else None
    return schema.build(ScenarioFile, document), cap


def shaped(rollout: SimulatedRollout, *, batch_size: int | None, group_size: int | None) -> SimulatedRollout:
    """Return the setting with another batch shape; over-sampling and concurrency grow and shrink with it."""
    try:
        groups, samples = batch_size or rollout.rollout_batch_size, group_size or rollout.group_size
        shape = SharedConfig(rollout_batch_size=groups, group_size=samples)
        strategy = rollout.strategy.reshaped(rollout, shape)
        return replace(rollout, rollout_batch_size=groups, group_size=samples, strategy=strategy)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def replicas_of(model: ReplicaModel, section: EngineSection, count: int) -> tuple[ReplicaModel, ...]:
    """Return ``count`` replicas, the last ones in the fast lane where the file asks for it. Raises ``ConfigError`` if
    none would be left for the others."""
    fast = section.fast_lane_replicas
    if fast >= count:
        raise ConfigError(f"engine.fast_lane_replicas ({fast}) must be below the number of replicas ({count})")
    return (model,) * (count - fast) + (replace(model, fast_lane=True),) * fast


def build_scenario(known: Scenario, file: ScenarioFile, replicas: int) -> Scenario:
    """Return a scenario of ``replicas`` like the first of ``known``, which also has the values that the scenario file
    leaves open."""
    given = {key: value for key in _OF_SCENARIO if (value := getattr(file, key)) is not None}
    figures = {field.name: getattr(file.engine, field.name, None) for field in fields(ReplicaModel)}
    model = replace(known.replicas[0], **{name: value for name, value in figures.items() if value is not None})
    try:
        return replace(known, replicas=replicas_of(model, file.engine, replicas), **given)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"scenario: {error}") from None
