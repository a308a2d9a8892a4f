"""Checks that concern several sections of a run's config at once, and the capabilities that its engine turns out to
have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from rollover.algorithms.config import AlgorithmConfig, resolve
from rollover.algorithms.registry import ADVANTAGES
from rollover.cluster.config import ClusterConfig
from rollover.engine.base import Capabilities
from rollover.engine.config import EngineConfig, EngineDemands
from rollover.errors import ConfigError
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import STRATEGIES, no_in_flight_update
from rollover.rollout.strategies.config import NumRunning
from rollover.rollout.strategy import OnFull
from rollover.run.sections import EvalConfig, ModelConfig
from rollover.tasks.config import TasksConfig
from rollover.trainer.config import TrainerConfig
from rollover.weights.adapters import AdapterShape


class Sections(Protocol):
    """The parts of a ``RunConfig`` that are checked against each other when it is created.

    Example: ``longest_tokens(config)`` is 1536 for prompts of 512 tokens and responses of 1024.
    """

    @property
    def deterministic(self) -> bool: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def tasks(self) -> TasksConfig: ...

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def rollout(self) -> RolloutConfig: ...

    @property
    def algorithm(self) -> AlgorithmConfig: ...

    @property
    def trainer(self) -> TrainerConfig: ...

    @property
    def cluster(self) -> ClusterConfig | None: ...

    @property
    def eval(self) -> EvalConfig: ...

    @property
    def published_adapters(self) -> AdapterShape | None: ...


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


def longest_tokens(config: Sections) -> int:
    """Return the tokens of the longest prompt and response of the run, in training or evaluation."""
    return max(context_needed(config, key) for key in ("rollout", "eval"))


def check_capabilities(config: Sections, capabilities: Capabilities) -> None:
    """Raise ``ConfigError`` when the engine lacks a capability that the strategy needs."""
    if config.rollout.strategy.needs_in_flight_update and not capabilities.in_flight_update:
        raise ConfigError(no_in_flight_update(config.rollout.strategy.kind, config.engine.kind))
    if config.rollout.strategy.overlaps_training and capabilities.is_colocated:
        raise ConfigError(_asleep_in_training(config))


def _asleep_in_training(config: Sections) -> str:
    others = ", ".join(kind for kind, strategy in STRATEGIES.items() if strategy.builds.on_full is not OnFull.KEEP)
    return (
        f"rollout.strategy {config.rollout.strategy.kind!r} generates while the trainer trains, but with"
        " engine.colocated = true the engine sleeps meanwhile: choose a strategy that stops for the trainer"
        f" ({others}), or set engine.colocated = false"
    )


def contradictions(config: Sections) -> Iterator[str]:
    rollout, engine = config.rollout, config.engine
    can = engine.declared
    algorithm = resolve(config.algorithm)
    advantage = ADVANTAGES[algorithm.advantage]
    single = "group_size is 1" if rollout.group_size == 1 else "unit is 'sample'" if rollout.unit == "sample" else ""
    if single and advantage.compares == "siblings":
        yield (
            f"rollout.{single}, but the advantage {algorithm.advantage!r} of algorithm {algorithm.name!r} compares"
            " siblings: change that, or use algorithm.advantage = 'history' or algorithm.name = 'reinforce++'"
        )
    if single and algorithm.group_filter == "zero_signal":
        yield f"algorithm.group_filter 'zero_signal' would drop every group: rollout.{single}; change one of them"
    if advantage.compares == "history" and not single:
        yield (
            f"algorithm.advantage {algorithm.advantage!r} requires samples that are trained one by one: set"
            " rollout.unit = 'sample', or use an advantage that compares siblings"
        )
    if config.trainer.mini_batches > rollout.rollout_batch_size * rollout.num_siblings:
        yield (
            f"trainer.mini_batches ({config.trainer.mini_batches}) is above rollout.rollout_batch_size"
            f" ({rollout.rollout_batch_size}): each mini-batch needs a group"
        )
    if rollout.strategy.needs_in_flight_update and not can.in_flight_update:
        yield no_in_flight_update(rollout.strategy.kind, config.engine.kind)
    if rollout.strategy.overlaps_training and can.is_colocated:
        yield _asleep_in_training(config)
    if config.deterministic and rollout.strategy.overlaps_training:
        yield (
            f"deterministic = true is impossible with rollout.strategy {rollout.strategy.kind!r}, which trains and"
            " generates at the same time: use one that stops for the trainer, such as 'april'"
        )
    yield from engine.refusals(
        EngineDemands(
            strategy=rollout.strategy.kind,
            staleness_bound=rollout.staleness_bound,
            in_flight_update=rollout.strategy.needs_in_flight_update,
            deterministic=config.deterministic,
            adapters=config.published_adapters is not None,
            on_cluster=config.cluster is not None and bool(config.cluster.num_engines),
        )
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


def _too_long(config: Sections, context: int, key: str) -> Iterator[str]:
    needed = config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > context:
        yield (
            f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) and tasks.max_prompt_tokens"
            f" ({config.tasks.max_prompt_tokens}) make {needed} tokens, above {key} ({context}):"
            " lower one of the first two or raise the last"
        )
