"""One file describes one run: ``RunConfig`` composes the configs of the components and adds nothing to them.

A loaded config is complete and valid: every key is known, typed and in range, and no two sections contradict each
other. It is never changed afterwards. Importing this module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from rollover.algorithms.config import AlgorithmConfig, resolve
from rollover.algorithms.registry import ADVANTAGES, Algorithm
from rollover.cluster.config import ClusterConfig
from rollover.engine.base import Capabilities
from rollover.engine.config import EngineDemands
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.errors import ConfigError
from rollover.report.config import LoggingConfig
from rollover.rollout.config import RolloutConfig
from rollover.rollout.strategies import STRATEGIES, no_in_flight_update
from rollover.rollout.strategies.config import NumRunning
from rollover.rollout.strategy import OnFull
from rollover.run.kinds import AnyEngineConfig
from rollover.run.layout import RUN_FILES
from rollover.run.sections import EvalConfig, ModelConfig, WarmupConfig
from rollover.settings.changes import Changeable, OnResume
from rollover.settings.shape import ByKind
from rollover.tasks.config import TasksConfig
from rollover.tasks.sources import SourceConfig
from rollover.trainer.config import CheckpointConfig, TrainerConfig
from rollover.types import AdapterShape

_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _stays_when_scheduled(before: RunConfig, after: RunConfig) -> str | None:
    if before.trainer.schedule == "constant":
        return None
    return f"the learning rate of trainer.schedule {before.trainer.schedule!r} depends on it"


def _stays_undone(before: RunConfig, after: RunConfig) -> str | None:
    return "the steps so far were not repeatable" if after.deterministic else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a whole run.

    Examples:
        >>> config = build_config("quickstart")
        >>> config.algorithm.name, config.rollout.strategy.kind, config.engine.kind
        ('grpo', 'april', 'embedded')
    """

    model: ModelConfig
    seed: int = 0
    """Seeds everything random: prompts, sampling noise and weights built from scratch."""
    steps: Annotated[
        int, OnResume(_stays_when_scheduled, "may change on resume, unless the learning rate has a schedule")
    ] = 100
    """Number of training steps; each trains one batch and produces one policy version."""
    deterministic: Annotated[bool, OnResume(_stays_undone, "may change to `false` on resume")] = False
    """Makes the run repeatable bit for bit on one machine (CPU), even across a restart; slower."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    engine: Annotated[AnyEngineConfig, ByKind()] = field(default_factory=EmbeddedConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sft: WarmupConfig | None = None
    """Supervised warm-up before the first step; no warm-up when left out."""
    cluster: Changeable[ClusterConfig | None] = None
    """A Ray cluster on which the trainer's ranks and engine servers run; only this machine is used when left out."""
    checkpoint: Changeable[CheckpointConfig] = field(default_factory=CheckpointConfig)
    eval: Changeable[EvalConfig] = field(default_factory=EvalConfig)
    logging: Changeable[LoggingConfig] = field(default_factory=LoggingConfig)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Runs to compare, by name; each table lists the changes to this config, as in ``[variants.april.rollout]``
    followed by ``strategy = "april"``. All variants start from the same initial policy."""

    other_names: ClassVar[Mapping[str, str]] = {
        "algorithm.clip_low": "clip_ratio eps_clip epsilon",
        "algorithm.kl_coef": "beta kl_loss_coef",
        "algorithm.name": "adv_estimator advantage_estimator loss_type",
        "checkpoint.every_steps": "save_freq save_interval save_steps",
        "eval.every_steps": "eval.interval eval_interval eval_steps test_freq",
        "model.path": "hf_checkpoint model.name model_name_or_path name_or_path",
        "rollout.group_size": "n n_samples_per_prompt num_generations",
        "rollout.max_new_tokens": "max_completion_length max_response_length rollout_max_response_len",
        "rollout.rollout_batch_size": "batch_size global_batch_size train_batch_size",
        "steps": "max_steps num_rollout num_train_epochs total_epochs total_training_steps",
        "tasks.train": "data dataset dataset_name prompt_data train_files",
        "trainer.learning_rate": "lr",
    }
    """Names that TRL, verl and slime have for some of these keys, for messages about unknown ones."""

    @property
    def weighing_algorithm(self) -> Algorithm:
        """Return the algorithm with the weights of the rewards that it compares, and of those of turns."""
        weights = {source.name: {r.component: r.weight for r in source.rewards} for source in self.tasks.train}
        of_turns = {
            source.name: sum(reward.weight for reward in source.all_rewards if reward.kind == "environment")
            for source in self.tasks.train
        }
        return replace(resolve(self.algorithm), reward_weights=weights, turn_weights=of_turns)

    @property
    def warmup_sources(self) -> tuple[SourceConfig, ...]:
        """Return the sources whose solutions a warm-up teaches, and for which a tokenizer from scratch is made."""
        return (self.sft and self.sft.sources) or self.tasks.train

    @property
    def published_adapters(self) -> AdapterShape | None:
        """Return the shape of the adapters that engines get in place of full weights; ``None`` if they get full
        weights."""
        lora = self.trainer.lora
        return None if lora is None or lora.publish == "merged" else AdapterShape(rank=lora.rank, targets=lora.targets)

    @property
    def eval_sets(self) -> dict[str, EvalConfig]:
        """Return how each source of ``tasks.eval`` is evaluated, by its name; as ``[eval]`` says if there is none."""
        return {source.name: self.eval.of(source.name) for source in self.tasks.eval} or {"": self.eval}

    @property
    def best_metric(self) -> str:
        """Return ``eval.metric`` under the name that evaluations give it: without the source, if there is only one."""
        names = [source.name for source in self.tasks.eval]
        return self.eval.metric.removesuffix(f"/{names[0]}") if len(names) == 1 else self.eval.metric

    def response_limit(self, source: str) -> int:
        """Return the largest number of tokens of a response to a prompt of this source; ``eval/...`` is one of
        ``tasks.eval``."""
        kind, _, name = source.rpartition("/")
        own = self.eval_sets[name].max_new_tokens if kind else None
        return own or self.rollout.max_new_tokens

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        self._check_variants()
        if found := list(contradictions(self)):
            raise ValueError("; ".join(found))

    def _check_variants(self) -> None:
        for name, changes in self.variants.items():
            if alike := sorted(changes.keys() & {"sft", "model", "variants"}):
                raise ValueError(
                    f"variants.{name}.{alike[0]} cannot differ: all variants start from one policy; start two runs"
                )
            if not _VARIANT_NAME.fullmatch(name) or name in RUN_FILES:
                raise ValueError(
                    f"variants: {name!r} cannot name a variant, because its run gets a directory of that name: use"
                    f" up to 64 letters, digits, '_', '-' and '.', and none of {', '.join(RUN_FILES)}"
                )
        if len(self.variants) == 1:
            raise ValueError(
                f"variants: {min(self.variants)!r} is the only variant, and a comparison needs two: add another"
                " (an empty table is this config unchanged), or move its changes into the config"
            )


def check_context(config: RunConfig, max_context_tokens: float, keys: Sequence[str] = ("rollout", "eval")) -> None:
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


def context_needed(config: RunConfig, key: str) -> int:
    """Return the tokens of the longest admissible prompt and response of the section ``key``."""
    sections = [config.rollout] if key == "rollout" else config.eval_sets.values()
    budget = max(each.max_new_tokens or config.rollout.max_new_tokens for each in sections)
    return config.tasks.max_prompt_tokens + budget


def longest_tokens(config: RunConfig) -> int:
    """Return the tokens of the longest prompt and response of the run, in training or evaluation."""
    return max(context_needed(config, key) for key in ("rollout", "eval"))


def check_capabilities(config: RunConfig, capabilities: Capabilities) -> None:
    """Raise ``ConfigError`` when the engine lacks a capability that the strategy needs."""
    if config.rollout.strategy.needs_in_flight_update and not capabilities.in_flight_update:
        raise ConfigError(no_in_flight_update(config.rollout.strategy.kind, config.engine.kind))


def contradictions(config: RunConfig) -> Iterator[str]:
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
    for source in config.tasks.train:
        if advantage.by_component and not source.rewards:
            yield (
                f"algorithm.advantage {algorithm.advantage!r} compares the components of rewards, and source"
                f" {source.name!r} has none: list its rewards as tasks.train.rewards, or use 'group_std'"
            )
        if single and any(reward.compares_siblings for reward in source.all_rewards):
            yield f"rollout.{single}, but a reward of source {source.name!r} compares siblings: change one of them"
    if config.trainer.mini_batches > rollout.rollout_batch_size * rollout.num_siblings:
        yield (
            f"trainer.mini_batches ({config.trainer.mini_batches}) is above rollout.rollout_batch_size"
            f" ({rollout.rollout_batch_size}): each mini-batch needs a group"
        )
    if rollout.strategy.needs_in_flight_update and not can.in_flight_update:
        yield no_in_flight_update(rollout.strategy.kind, config.engine.kind)
    if rollout.strategy.overlaps_training and can.is_colocated:
        others = ", ".join(kind for kind, strategy in STRATEGIES.items() if strategy.builds.on_full is not OnFull.KEEP)
        yield (
            f"rollout.strategy {rollout.strategy.title} generates while the trainer trains, but with engine.colocated ="
            " true the engine sleeps meanwhile: choose a strategy that stops for the trainer"
            f" ({others}), or set engine.colocated = false"
        )
    if config.deterministic and rollout.strategy.overlaps_training:
        yield (
            f"deterministic = true is impossible with rollout.strategy {rollout.strategy.title}, which trains and"
            " generates at the same time: use a strategy that stops for the trainer, such as 'april'"
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
    if rollout.replays_truncation and not can.gives_kept:
        yield (
            f"rollout.top_p ({rollout.top_p:g}), rollout.top_k ({rollout.top_k}) and rollout.min_p ({rollout.min_p:g})"
            f" leave tokens out, but engine.kind {engine.kind!r} does not return the tokens among which it drew,"
            " without which the gradient is biased: set them to 1, 0 and 0, use engine.kind 'embedded', or set"
            " rollout.accept_truncation_bias = true"
        )
    if config.trainer.replay_routes and not can.gives_routes:
        yield (
            f"trainer.replay_routes = true, but engine.kind {engine.kind!r} does not return the experts that it chose:"
            " use engine.kind 'embedded', 'embedded_server' or 'sglang', or set it to false"
        )
    running = rollout.strategy.num_running if isinstance(rollout.strategy, NumRunning) else None
    if running is not None and can.max_running is not None and running > can.max_running:
        yield (
            f"rollout.strategy.num_running ({running}) is above engine.max_running"
            f" ({can.max_running}): raise the latter or lower the former"
        )
    if can.max_context_tokens is not None:
        yield from _too_long(config, can.max_context_tokens, can.context_key)
    if config.model.scratch is not None:
        yield from _too_long(config, config.model.scratch.max_position, "model.scratch.max_position")
        if config.tasks.chat_template_file is not None:
            yield "tasks.chat_template_file is for a model with a tokenizer of its own, not for model.scratch: omit it"
    yield from _about_evaluation(config)


def _about_evaluation(config: RunConfig) -> Iterator[str]:
    names = [source.name for source in config.tasks.eval]
    for name in sorted(config.eval.sets.keys() - set(names)):
        yield f"eval.sets.{name} is about no source of tasks.eval, which names {', '.join(names) or 'none'}"
    if config.eval.keep_best or config.eval.patience or config.eval.metric != "accuracy":
        measured = _measured(config.eval_sets) if names else []
        if config.best_metric not in measured:
            remedy = f"use one of {', '.join(measured)}" if names else "add a source to tasks.eval"
            yield f"eval.metric is {config.eval.metric!r}, which no evaluation measures: {remedy}"


def _measured(sets: Mapping[str, EvalConfig]) -> list[str]:
    """List the metrics of an evaluation by which weights can be compared."""
    places: dict[str, Collection[int]] = {"": set.intersection(*(set(each.k) for each in sets.values()))}
    if len(sets) > 1:
        places |= {f"/{name}": each.k for name, each in sets.items()}
    return [
        f"{metric}{place}"
        for place, ks in places.items()
        for metric in ("accuracy", *(f"pass@{k}" for k in sorted(ks) if k > 1))
    ]


def _too_long(config: RunConfig, context: int, key: str) -> Iterator[str]:
    needed = config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > context:
        yield (
            f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) and tasks.max_prompt_tokens"
            f" ({config.tasks.max_prompt_tokens}) make {needed} tokens, above {key} ({context}):"
            " lower one of the first two or raise the last"
        )
