"""Which settings of a strategy are tried: one key each, from little carried over to much.

A strategy is named as in a config; ``april:sample`` is ``april`` that trains single samples, ``unit = "sample"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rollover.errors import ConfigError, nearest
from rollover.frontier.setup import Setup
from rollover.rollout.config import RolloutConfig, StrategyName
from rollover.rollout.strategies import NEEDS

DEFAULT_STRATEGIES = ("sync", "oversample", "april", "concurrency", "bounded_async", "rollover")
_SAMPLE = ":sample"
_FREE = 64
"""A staleness bound that holds nothing back: what is measured is what the strategy itself does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The key by which a strategy trades lag for throughput."""

    key: str
    scale: Literal["groups", "samples", "plain"]
    """What a value of 1 stands for: the groups of a batch, its samples, or itself."""
    values: tuple[float, ...]


_OVER_SAMPLING = Knob(key="over_sampling_batch_size", scale="groups", values=(1.25, 1.5, 2.0, 2.5, 3.0))
_RUNNING = Knob(key="num_running", scale="samples", values=(0.75, 1.0, 1.5, 2.0, 3.0))
KNOBS: dict[str, Knob | None] = {
    "sync": None,
    "probe": None,
    "oversample": _OVER_SAMPLING,
    "april": _OVER_SAMPLING,
    "token_budget": _OVER_SAMPLING,
    "tail_rounds": _OVER_SAMPLING,
    "sorted": replace(_OVER_SAMPLING, values=(2.0, 3.0, 4.0)),
    "concurrency": _RUNNING,
    "fast_lane": _RUNNING,
    "inflight": _RUNNING,
    "windowed": _RUNNING,
    "bounded_async": Knob(key="max_staleness", scale="plain", values=(1, 2, 3, 4, 6)),
    "threshold": Knob(key="staleness_threshold", scale="plain", values=(0.25, 0.5, 1.0, 2.0, 3.0)),
    "rollover": Knob(key="lag_target", scale="plain", values=(0.25, 0.5, 1.0, 1.5, 2.0, 3.0)),
}
"""By strategy; ``None`` for those that are always on-policy."""


def knob_of(name: str) -> Knob | None:
    """Of a strategy, with or without ``:sample``."""
    return KNOBS[name.removesuffix(_SAMPLE)]


def check_strategies(names: Iterable[str], setup: Setup) -> tuple[str, ...]:
    """The strategies to try, ``sync`` first: it is what all are compared with.

    Raises:
        ConfigError: an unknown name, or one that needs what the scenario lacks.
    """
    known = get_args(StrategyName)
    for name in names:
        strategy = name.removesuffix(_SAMPLE)
        if strategy not in known:
            raise ConfigError(f"--strategies: no strategy {name!r}{nearest(strategy, known)}")
        if KNOBS[strategy] is None and strategy != name:
            raise ConfigError(f"--strategies: {name!r}: {strategy} waits for whole groups, it trains no single samples")
        if NEEDS.get(strategy) == "fast_lane" and not setup.scenario.has_fast_lane:
            raise ConfigError(
                f"--strategies: {name!r} needs a replica for the fast lane: in the scenario file,"
                " [engine] replicas = 2 and fast_lane_replicas = 1 (or more)"
            )
    return tuple(dict.fromkeys(("sync", *names)))


def settings(name: str, setup: Setup, *, max_staleness: int | None = None) -> list[RolloutConfig]:
    """What is tried of a strategy; settings that mean the same are tried once."""
    knob = knob_of(name)
    if knob is None:
        return [setting(name, setup, None)]
    values = [v for v in knob.values if is_allowed(knob, v, max_staleness)]
    return list(dict.fromkeys(setting(name, setup, v, max_staleness=max_staleness) for v in values))


def is_allowed(knob: Knob, value: float, max_staleness: int | None) -> bool:
    """Whether the setting is what it says under the staleness bound."""
    if max_staleness is None or knob.key in ("num_running", "lag_target"):
        return True
    return math.ceil(value) - (knob.key == "over_sampling_batch_size") <= max_staleness


def setting(name: str, setup: Setup, value: float | None, *, max_staleness: int | None = None) -> RolloutConfig:
    """A strategy with its knob at ``value``, in units of the knob's scale."""
    strategy = name.removesuffix(_SAMPLE)
    groups, size = setup.rollout.rollout_batch_size, setup.rollout.group_size
    knob = KNOBS[strategy]
    changes: dict[str, Any] = {}
    if knob is not None and value is not None:
        unit = {"groups": groups, "samples": groups * size, "plain": 1}[knob.scale]
        is_whole = knob.key not in ("staleness_threshold", "lag_target")
        changes[knob.key] = max(1, round(value * unit)) if is_whole else value
        if knob.key == "num_running":
            changes[knob.key] = min(changes[knob.key], setup.scenario.max_running)
        if strategy not in ("oversample", "tail_rounds") and knob.key != "max_staleness":
            changes["max_staleness"] = _FREE if max_staleness is None else max_staleness
    told = setup.scenario.capabilities.prefill_tokens_per_iteration
    if strategy == "rollover" and setup.unit == "s" and math.isfinite(told):
        changes["prefill_tokens_per_iteration"] = float(f"{told:.2g}")
    return RolloutConfig(
        strategy=strategy,  # type: ignore[arg-type]  # checked against the names it allows
        rollout_batch_size=groups,
        group_size=size,
        unit="group" if strategy == name else "sample",
        max_new_tokens=setup.cap_tokens,
        **changes,
    )


def name_of(config: RolloutConfig) -> str:
    """What the setting is one of: its strategy, and what that trains."""
    return config.strategy + _SAMPLE * (config.unit == "sample")


def place_of(config: RolloutConfig) -> tuple[str, float | None]:
    """The setting up to its staleness bound: its name and where its knob stands."""
    return name_of(config), value_of(config)


def value_of(config: RolloutConfig) -> float | None:
    """Where the setting's knob stands, in units of its scale; ``None`` where the strategy has none."""
    knob = KNOBS[config.strategy]
    match knob and knob.key:
        case None:
            return None
        case "over_sampling_batch_size":
            return config.launched_groups / config.rollout_batch_size
        case "max_staleness":
            return float(config.staleness_bound)
        case "staleness_threshold":
            return config.threshold
        case "lag_target":
            return config.target_lag
    if config.num_running is None:
        return math.inf
    return config.num_running / (config.rollout_batch_size * config.group_size)


_SYMBOLS = {"over_sampling_batch_size": "r", "max_staleness": "S", "staleness_threshold": "s", "lag_target": "lag"}


def label(config: RolloutConfig) -> str:
    """The setting in a word or two: ``april r=1.5``."""
    value, knob = value_of(config), KNOBS[config.strategy]
    if knob is None or value is None:
        return name_of(config)
    if knob.key == "num_running":
        running = "all that fit" if config.num_running is None else f"{config.num_running:,}"
        return f"{name_of(config)} C={running}"
    return f"{name_of(config)} {_SYMBOLS[knob.key]}={value:.4g}"
