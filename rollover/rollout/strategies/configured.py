"""Strategies with options of their own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rollover.engine.base import Capabilities
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured(Strategy):
    """Each field that a subclass adds is filled from the ``RolloutConfig`` attribute of the same name."""

    @classmethod
    def from_config(cls, config: RolloutConfig, engine: Capabilities) -> Strategy:
        common = Strategy.from_config(config, engine)
        values: dict[str, Any] = {f.name: getattr(common, f.name) for f in fields(common)}
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls) if f.name not in values}, **values)
