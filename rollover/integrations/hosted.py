"""The settings of a run inside another trainer: only ``[rollout]`` and ``[engine]`` of an ordinary run.

Batch and group size, temperature, length and seed are set in the other trainer, the host. A different value for one of
them is refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from rollover.engine.base import Capabilities
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.errors import ConfigError, nearest
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import SIMULATED_ONLY, STRATEGIES, no_in_flight_update
from rollover.run.kinds import AnyEngineConfig
from rollover.settings import toml
from rollover.settings.schema import build
from rollover.settings.shape import ByKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedConfig:
    """The settings of rollouts inside another trainer."""

    seed: int = 0
    """Seed of prompts and sampling noise, set by the host."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: Annotated[AnyEngineConfig, ByKind()] = field(default_factory=EmbeddedConfig)

    def __post_init__(self) -> None:
        if self.engine.declared.serves_training_only:
            raise ValueError(f"engine.kind {self.engine.kind!r} is for rollover train: choose another kind")
        if self.engine.declared.is_colocated:
            raise ValueError(
                "engine.colocated has no effect inside another trainer, which decides itself when its devices are free:"
                " leave it out"
            )
        if self.rollout.is_cut:
            raise ValueError(
                "rollout.top_p, top_k and min_p have no place inside another trainer, which computes log-probs over the"
                " whole vocabulary: leave them out"
            )

    @property
    def deterministic(self) -> bool:
        """Return false: a host does not promise equal bits, so settings that only affect rounding may change on
        resume."""
        return False


class Given(NamedTuple):
    """A setting that the host has decided."""

    value: Any
    by: str
    """The host's name for it, for messages."""


Asked = str | Path | Mapping[str, Any] | None
"""The forms of a user's settings: a strategy's name, a TOML file, or the tables ``rollout`` and ``engine`` of one."""


def hosted_config(asked: Asked, given: Mapping[str, Given], *, source: str) -> HostedConfig:
    """Return the settings that a user asks for, combined with the settings that the host has decided. Raises
    ``ConfigError`` if they cannot work, or contradict the host's.

    Args:
        given: by dotted key: ``{"rollout.temperature": Given(1.0, "GRPOConfig.temperature")}``.
        source: where the user wrote them, for messages.
    """
    document = _document(asked, source)
    data = copy.deepcopy(document.data)
    for key, (value, by) in given.items():
        *tables, last = key.split(".")
        here: Any = data
        for table in tables:
            here = here.setdefault(table, {})
            if not isinstance(here, dict):
                raise ConfigError(f"{document.name}: {table} must be a table of settings, got {here!r}")
        if last in here and here[last] != value:
            raise ConfigError(
                f"{document.name}: {key} is {here[last]!r}, but {by} sets it to {value!r}: leave {key} out"
            )
        here[last] = value
    _refuse_a_bound_without_use(data, given.get("rollout.max_staleness"), document.name)
    return build(HostedConfig, toml.Document(name=document.name, data=data, lines=document.lines))


def refuse_other_versions(host: str, found: str, supported: Sequence[str], remedy: str = "install that") -> None:
    """Raise ``ConfigError`` unless version ``found`` of a host is one of ``supported``, given without their last
    number."""
    if not found.startswith(tuple(f"{version}." for version in supported)):
        raise ConfigError(f"{host} {found} is installed, and this was written for {' and '.join(supported)}: {remedy}")


def split_options(asked: Any, options: type[T], source: str) -> tuple[T, dict[str, Any]]:
    """Separate the settings that only one host has from the tables of an ordinary run. Raises ``ConfigError`` if
    ``asked`` is something else, or a setting of the host's own cannot work.

    Args:
        asked: the name of a strategy, a table of settings or nothing.
        options: the dataclass of the host's own settings.
    Example: ``split_options({"weights_lag": 1, "rollout": {}}, SlimeOptions, "rollover")`` is
    ``(SlimeOptions(weights_lag=1), {"rollout": {}})``.
    """
    if isinstance(asked, str):
        asked = {"rollout": {"strategy": asked}}
    if not isinstance(asked, Mapping | None):
        raise ConfigError(f"{source}: expected the name of a strategy or a table of settings, got {asked!r}")
    tables = copy.deepcopy(dict(asked or {}))
    own = {f.name: tables.pop(f.name) for f in fields(options) if f.name in tables}  # type: ignore[arg-type]
    return build(options, toml.Document(name=source, data=own)), tables


def _refuse_a_bound_without_use(data: Mapping[str, Any], bound: Given | None, source: str) -> None:
    """Raise ``ConfigError`` if the host has set a bound that the strategy cannot use. The message names the host's
    argument, and not a setting that the user never wrote."""
    if bound is None or not bound.value:
        return
    asked = data["rollout"].get("strategy")
    kind = asked.get("kind") if isinstance(asked, Mapping) else asked
    strategy = STRATEGIES.get(kind) if isinstance(kind, str) else None
    if strategy is not None and strategy.on_policy:
        raise ConfigError(
            f"{source}: strategy {kind!r} trains no sample of older weights, but {bound.by} is {bound.value}: choose a"
            " strategy that carries work over, such as 'april'"
        )


def _document(asked: Asked, source: str) -> toml.Document:
    match asked:
        case None:
            return toml.Document(name=source, data={})
        case Mapping():
            return toml.Document(name=source, data=dict(asked))
        case str() if asked in STRATEGIES or asked in SIMULATED_ONLY:
            return toml.Document(name=source, data={"rollout": {"strategy": asked}})
        case Path() | str() if str(asked).endswith(".toml"):
            return toml.read(Path(asked))
        case _:
            raise ConfigError(
                f"{source}: {asked!r} is neither a strategy nor a .toml file nor a dictionary with the tables"
                f" 'rollout' and 'engine'{nearest(str(asked), STRATEGIES)}"
            )


def check_capabilities(config: HostedConfig, engine: Capabilities) -> None:
    """Raise ``ConfigError`` when the engine lacks a capability that the strategy needs."""
    strategy = config.rollout.strategy
    if strategy.needs_in_flight_update and not engine.in_flight_update:
        raise ConfigError(no_in_flight_update(strategy.kind, config.engine.kind))
    if engine.max_context_tokens <= config.rollout.max_new_tokens:
        raise ConfigError(
            f"responses may have {config.rollout.max_new_tokens} tokens, but this engine has room for only"
            f" {engine.max_context_tokens} tokens of prompt and response together: allow shorter responses, or use an"
            " engine with a longer context"
        )
