"""Checks a run's config for combinations of sections that cannot work. Pure; one sentence per contradiction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from rollover.algorithms.config import AlgorithmConfig, resolve
from rollover.engine.base import Capabilities
from rollover.engine.config import EngineConfig
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.errors import ConfigError
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import STRATEGIES
from rollover.rollout.strategies.config import NumRunning
from rollover.swarm.config import SwarmConfig
from rollover.tasks.config import TasksConfig
from rollover.trainer.config import ScratchConfig, TrainerConfig


class Model(Protocol):
    """The section ``[model]``, as far as other sections depend on it."""

    @property
    def scratch(self) -> ScratchConfig | None: ...


class EvalLimits(Protocol):
    """The section ``[eval]``, as far as other sections depend on it."""

    @property
    def max_new_tokens(self) -> int | None: ...


RunEngineConfig = EngineConfig | SwarmConfig
"""Told apart by ``kind``; the first is meant where it is left out."""


class Sections(Protocol):
    """The sections of a run's config that constrain each other; ``RunConfig`` has them all."""

    @property
    def deterministic(self) -> bool: ...
    @property
    def model(self) -> Model: ...
    @property
    def tasks(self) -> TasksConfig: ...
    @property
    def engine(self) -> RunEngineConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def eval(self) -> EvalLimits: ...


def check(config: Sections) -> None:
    """Raise ``ValueError`` with every contradiction in ``config``, naming the keys and the remedy."""
    if found := list(_contradictions(config)):
        raise ValueError("; ".join(found))


def check_context(config: Sections, max_context_tokens: int, keys: Sequence[str] = ("rollout", "eval")) -> None:
    """Raise ``ConfigError`` when the longest admissible prompt and response of one of ``keys`` do not fit the model or
    engine."""
    for key in keys:
        needed = context_needed(config, key)
        budget = needed - config.tasks.max_prompt_tokens
        if needed > max_context_tokens:
            raise ConfigError(
                f"tasks.max_prompt_tokens ({config.tasks.max_prompt_tokens}) and {key}.max_new_tokens ({budget}) make"
                f" {needed} tokens, but the model's context holds {max_context_tokens}: lower one of the two, or use a"
                " model or server with a longer context"
            )


def context_needed(config: Sections, key: str) -> int:
    """Return the tokens of the longest admissible prompt and response of the section ``key``."""
    budget: int = getattr(config, key).max_new_tokens or config.rollout.max_new_tokens
    return config.tasks.max_prompt_tokens + budget


def check_capabilities(config: Sections, capabilities: Capabilities) -> None:
    """Raise ``ConfigError`` when the engine lacks a capability that the strategy needs."""
    if config.rollout.strategy.needs_in_flight_update and not capabilities.in_flight_update:
        raise ConfigError(_lacking(config))


def _lacking(config: Sections) -> str:
    others = ", ".join(kind for kind, strategy in STRATEGIES.items() if not strategy.needs_in_flight_update)
    return (
        f"rollout.strategy {config.rollout.strategy.kind!r} loads weights under running samples, which this engine"
        f" (engine.kind {config.engine.kind!r}) cannot: set engine.kv_on_update = 'keep', or choose a strategy that"
        f" does without: {others}"
    )


def _contradictions(config: Sections) -> Iterator[str]:
    rollout, engine = config.rollout, config.engine
    can = engine.declared
    algorithm = resolve(config.algorithm)
    single = "group_size is 1" if rollout.group_size == 1 else "unit is 'sample'" if rollout.unit == "sample" else ""
    if single and algorithm.advantage not in ("whitened", "history"):
        yield (
            f"rollout.{single}, but the advantage {algorithm.advantage!r} of algorithm {algorithm.name!r} compares"
            " siblings: change that, or use algorithm.advantage = 'history' or algorithm.name = 'reinforce++'"
        )
    if single and algorithm.group_filter == "zero_signal":
        yield f"algorithm.group_filter 'zero_signal' would drop every group: rollout.{single}; change one of them"
    if algorithm.advantage == "history" and not single:
        yield (
            "algorithm.advantage 'history' is for samples that are trained one by one: set rollout.unit = 'sample',"
            " or use an advantage that compares siblings"
        )
    if config.trainer.mini_batches > rollout.rollout_batch_size * rollout.num_siblings:
        yield (
            f"trainer.mini_batches ({config.trainer.mini_batches}) is above rollout.rollout_batch_size"
            f" ({rollout.rollout_batch_size}): each mini-batch needs a group"
        )
    if rollout.strategy.needs_in_flight_update and not can.in_flight_update:
        yield _lacking(config)
    if config.deterministic:
        yield from _nondeterminism(config)
    if isinstance(engine, SwarmConfig) and engine.mode == "pull" and rollout.staleness_bound > 0:
        yield (
            f"engine.mode 'pull' samples every token from the newest weights, but rollout.strategy"
            f" {rollout.strategy.kind!r} trains tokens that are up to {rollout.staleness_bound} versions older: use"
            " strategy 'sync', or engine.mode = 'push_pull'"
        )
    if not can.cuts_logprobs and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"rollout.top_p ({rollout.top_p:g}) and rollout.top_k ({rollout.top_k}) cut the distribution, but"
            f" engine.kind {engine.kind!r} reports log-probs from before the cut: set them to 1 and 0"
        )
    running = rollout.strategy.num_running if isinstance(rollout.strategy, NumRunning) else None
    if running is not None and can.max_running is not None and running > can.max_running:
        yield (
            f"rollout.strategy.num_running ({running}) is above engine.max_running"
            f" ({can.max_running}): raise the latter or lower the former"
        )
    if can.max_context_tokens is not None:
        yield from _too_long(config, can.max_context_tokens, "engine.max_context_tokens")
    if config.model.scratch is not None:
        yield from _too_long(config, config.model.scratch.max_position, "model.scratch.max_position")


def _nondeterminism(config: Sections) -> Iterator[str]:
    if config.rollout.strategy.overlaps_training:
        yield (
            f"deterministic = true cannot hold with rollout.strategy {config.rollout.strategy.kind!r}, which trains and"
            " generates at the same time: use one that stops for the trainer, such as 'april'"
        )
    if not config.engine.declared.deterministic:
        yield f"deterministic = true needs engine.kind 'embedded', got {config.engine.kind!r}"
    elif isinstance(config.engine, EmbeddedConfig) and config.engine.kv_on_update == "keep":
        yield (
            "deterministic = true needs engine.kv_on_update 'recompute': a cache kept over an update cannot be"
            " rebuilt after a restart"
        )


def _too_long(config: Sections, context: int, key: str) -> Iterator[str]:
    needed = config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > context:
        yield (
            f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) and tasks.max_prompt_tokens"
            f" ({config.tasks.max_prompt_tokens}) make {needed} tokens, above {key} ({context}):"
            " lower one of the first two or raise the last"
        )
