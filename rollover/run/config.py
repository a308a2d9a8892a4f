"""One file describes one run: ``RunConfig`` composes the configs of the components and adds nothing to them.

A loaded config is complete and valid: every key is known, typed and in range, and no two sections contradict each
other. It is never changed afterwards. Importing this module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from rollover.algorithms.config import AlgorithmConfig
from rollover.cluster.config import ClusterConfig
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.report.config import LoggingConfig
from rollover.rollout.config import RolloutConfig
from rollover.run.checks import contradictions
from rollover.run.kinds import AnyEngineConfig
from rollover.run.layout import RUN_FILES
from rollover.run.sections import EvalConfig, ModelConfig, WarmupConfig
from rollover.settings.changes import Changeable, OnResume
from rollover.settings.schema import ByKind
from rollover.tasks.config import TasksConfig
from rollover.tasks.sources import SourceConfig
from rollover.trainer.config import CheckpointConfig, TrainerConfig
from rollover.weights.adapters import AdapterShape

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
        >>> config = load("quickstart")
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

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        self._check_variants()
        if found := list(contradictions(self)):
            raise ValueError("; ".join(found))

    def _check_variants(self) -> None:
        for name in self.variants:
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
