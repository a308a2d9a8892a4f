"""Decides which settings of a strategy are tried: one key each, from little carried over to much.

A strategy is named as in a config; ``april:sample`` is ``april`` training single samples, ``unit = "sample"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rollover.errors import ConfigError, nearest
from rollover.frontier.setup import Setup
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import RolloverConfig
from rollover.rollout.strategies.config import Knob
from rollover.rollout.strategy import OnFull
from rollover.settings.shape import types_at
from rollover.sim.strategies import SIMULATED, SimulatedRollout

DEFAULT_STRATEGIES = ("sync", "oversample", "april", "concurrency", "bounded_async", "rollover")
_SAMPLE = ":sample"
_FREE = 64
"""A staleness bound that holds nothing back, so that the strategy's own behaviour is measured."""


def knob_of(name: str) -> Knob | None:
    """Return the option of a strategy that is varied, with or without ``:sample``; ``None`` for on-policy
    strategies."""
    return SIMULATED[name.removesuffix(_SAMPLE)].knob


def default_strategies(setup: Setup) -> tuple[str, ...]:
    """Return the strategies tried by default: all that the scenario can run."""
    return tuple(name for name in DEFAULT_STRATEGIES if not is_asleep(name, setup))


def is_asleep(name: str, setup: Setup) -> bool:
    """Return whether the strategy would generate while the trainer has the devices."""
    return (setup.scenario.colocated or setup.takes_turns) and SIMULATED[
        name.removesuffix(_SAMPLE)
    ].builds.on_full is OnFull.KEEP


def check_strategies(names: Iterable[str], setup: Setup) -> tuple[str, ...]:
    """Return the strategies to try, ``sync`` first, since all are compared with it. Raises ``ConfigError`` if a name is
    unknown, or needs something that the scenario lacks."""
    for name in names:
        strategy = name.removesuffix(_SAMPLE)
        if strategy not in SIMULATED:
            raise ConfigError(f"--strategies: unknown strategy {name!r}{nearest(strategy, SIMULATED)}")
        if SIMULATED[strategy].on_policy and strategy != name:
            raise ConfigError(f"--strategies: {name!r}: {strategy} cannot train single samples, only whole groups")
        if strategy == "fast_lane" and not setup.scenario.has_fast_lane:
            raise ConfigError(
                f"--strategies: {name!r} needs a replica for the fast lane: in the scenario file,"
                " [engine] replicas = 2 and fast_lane_replicas = 1 (or more)"
            )
        if is_asleep(name, setup):
            cause = "replicas and trainer take turns (colocated = true): remove one of the two"
            if setup.takes_turns:
                cause = "trainer and engine took turns: remove it, or set colocated = false in a scenario file"
            raise ConfigError(f"--strategies: {name!r} generates while the trainer trains, but {cause}")
    return tuple(dict.fromkeys(("sync", *names)))


def settings(name: str, setup: Setup) -> list[SimulatedRollout]:
    """Return the settings of a strategy to try; equivalent settings are tried once."""
    knob = knob_of(name)
    if knob is None:
        return [setting(name, setup, None)]
    values = [v for v in knob.values if is_allowed(name, setup, v)]
    return list(dict.fromkeys(setting(name, setup, v) for v in values))


def is_allowed(name: str, setup: Setup, value: float) -> bool:
    """Return whether the setting keeps its meaning under the setup's staleness bound."""
    config = _turned(name, setup, value)
    needed = max(config.max_staleness or 0, config.strategy.staleness_needed(config))
    return setup.max_staleness is None or needed <= setup.max_staleness


def setting(name: str, setup: Setup, value: float | None) -> SimulatedRollout:
    """Return a strategy with its knob at ``value``, in units of the knob's scale."""
    config = _turned(name, setup, value)
    if config.strategy.knob is None or config.strategy.discards or config.max_staleness is not None:
        return config
    return replace(config, max_staleness=_FREE if setup.max_staleness is None else setup.max_staleness)


def _turned(name: str, setup: Setup, value: float | None) -> SimulatedRollout:
    """Return the setting under the staleness bound that it has by itself."""
    groups, size = setup.rollout.rollout_batch_size, setup.rollout.group_size
    kind = name.removesuffix(_SAMPLE)
    knob, changes = SIMULATED[kind].knob, dict[str, Any]()
    if knob is not None and value is not None:
        whole = max(1, round(value * {"groups": groups, "samples": groups * size, "plain": 1}[knob.scale]))
        most = setup.scenario.max_running if knob.scale == "samples" else whole
        changes[knob.key] = value if float in types_at(SIMULATED[kind], [knob.key]) else min(whole, most)
    if SIMULATED[kind] is RolloverConfig:
        changes["overlap"] = setup.has_own_trainer
        told = setup.scenario.capabilities.prefill_tokens_per_iteration
        if setup.unit == "s" and math.isfinite(told):
            changes["prefill_tokens_per_iteration"] = float(f"{told:.2g}")
    return SimulatedRollout.of(
        kind,
        rollout_batch_size=groups,
        group_size=size,
        unit="group" if kind == name else "sample",
        max_new_tokens=setup.cap_tokens,
        **changes,
    )


def name_of(config: RolloutConfig) -> str:
    """Return what the setting is one of: its strategy, and what that trains."""
    return config.strategy.kind + _SAMPLE * (config.unit == "sample")


def place_of(config: RolloutConfig) -> tuple[str, float | None]:
    """Return the setting up to its staleness bound: its name and where its knob stands."""
    return name_of(config), value_of(config)


def value_of(config: RolloutConfig) -> float | None:
    """Return where the setting's knob stands, in units of its scale; ``None`` where the strategy has none."""
    if (knob := config.strategy.knob) is None:
        return None
    groups = config.rollout_batch_size
    unit = {"groups": groups, "samples": groups * config.group_size, "plain": 1}[knob.scale]
    return config.strategy.knob_value(config) / unit


def label(config: RolloutConfig) -> str:
    """Name the setting in a word or two, such as ``april r=1.5``."""
    value, knob = value_of(config), config.strategy.knob
    if knob is None or value is None:
        return name_of(config)
    shown = f"{value:.4g}"
    if knob.scale == "samples":
        shown = "all that fit" if value == math.inf else f"{config.strategy.knob_value(config):,.0f}"
    return f"{name_of(config)} {knob.symbol}={shown}"
