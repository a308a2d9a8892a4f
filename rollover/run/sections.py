"""The sections of a run's config that belong to no other package: the model, the warm-up and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated

from rollover.settings.changes import Changeable, Fixed
from rollover.settings.shape import ByKind
from rollover.tasks.config import require_own_names
from rollover.tasks.sources import SourceConfig
from rollover.trainer.config import ScratchConfig, SFTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: an existing model, or one built from scratch. Give exactly one of the two."""

    path: Changeable[str | None] = None
    """Hugging Face folder or hub id. A resumed run may load it from another place."""
    scratch: ScratchConfig | None = None
    """A small decoder with random weights, and a tokenizer trained for the tasks."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.scratch is None):
            seen = "neither" if self.path is None else "both: unset one with none (--model.scratch none)"
            raise ValueError(f"give either model.path or a table model.scratch, got {seen}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig(SFTConfig):
    """Supervised fine-tuning on worked solutions: before the first step, or alone with ``rollover sft``."""

    sources: tuple[Annotated[SourceConfig, ByKind()], ...] = ()
    """Sources of the worked solutions, which need no reward; `tasks.train` when left out."""
    bare_answers: float = 0.0
    """Share of the examples that show only the last line of the solution. The model then learns to guess as well as to
    work things out, which leaves reinforcement learning something to choose between."""

    def __post_init__(self) -> None:
        SFTConfig.__post_init__(self)
        require_own_names("sft.sources", self.sources)
        if not 0 <= self.bare_answers < 1:
            raise ValueError(f"sft.bare_answers must lie in [0, 1), got {self.bare_answers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetConfig:
    """Replaces settings of ``[eval]`` for one evaluation source."""

    samples_per_prompt: int | None = None
    """Replaces ``eval.samples_per_prompt``."""
    k: tuple[int, ...] | None = None
    """Replaces ``eval.k``."""
    temperature: float | None = None
    """Replaces ``eval.temperature``."""
    top_p: float | None = None
    """Replaces ``eval.top_p``."""
    top_k: int | None = None
    """Replaces ``eval.top_k``."""
    max_new_tokens: int | None = None
    """Replaces ``eval.max_new_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out prompts, before the first step, during training and after the last."""

    every_steps: int = 0
    """Training steps between evaluations; 0 evaluates only before the first step and after the last."""
    num_prompts: Fixed[int] = 200
    """Prompts from each evaluation source. With 200 prompts, an accuracy of 50 % has a standard error of 3.5 points."""
    samples_per_prompt: int = 1
    """Responses to each prompt; at least the largest value of ``k``."""
    k: tuple[int, ...] = (1,)
    """Values of k for which to report pass@k, the probability that at least one of k responses is right."""
    temperature: float = 1.0
    """1 measures the policy that is being trained; 0 is greedy decoding, which needs one sample per prompt."""
    top_p: float = 1.0
    """Samples from the most likely tokens with this total probability; 1 samples from all."""
    top_k: int = 0
    """Samples from this number of the most likely tokens; 0 samples from all."""
    max_new_tokens: int | None = None
    """Token budget of a response; `rollout.max_new_tokens` when left out."""
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Sampling of single sources, by their names: `[eval.sets.gsm8k]` followed by `temperature = 0.6`."""
    metric: str = "accuracy"
    """The metric that decides which checkpoint is best: ``accuracy``, ``pass@K``, or one of both of a single source,
    such as ``accuracy/gsm8k``."""
    keep_best: bool = False
    """Saves a checkpoint of all weights that are evaluated, and keeps the best one beside the newest. Evaluations then
    pause the run under every strategy, so that the checkpoint contains the weights that are measured."""
    patience: int = 0
    """Ends the run when this number of evaluations in a row have found no better weights; 0 never does."""

    def __post_init__(self) -> None:
        for key, least in (
            ("every_steps", 0),
            ("num_prompts", 1),
            ("samples_per_prompt", 1),
            ("temperature", 0),
            ("top_k", 0),
            ("patience", 0),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"eval.{key} must be at least {least}, got {getattr(self, key)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"eval.top_p must lie in (0, 1], got {self.top_p}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"eval.max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.k or min(self.k) < 1 or max(self.k) > self.samples_per_prompt:
            raise ValueError(
                f"eval.k must list numbers from 1 to eval.samples_per_prompt ({self.samples_per_prompt}), "
                f"got {list(self.k)}"
            )
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"eval.samples_per_prompt is {self.samples_per_prompt}, but at eval.temperature 0 "
                "all samples of a prompt are the same: raise the temperature or take one sample"
            )
        if self.patience and not self.every_steps:
            raise ValueError("eval.patience counts evaluations during training: set eval.every_steps too")
        for name in self.sets:
            try:
                self.of(name)
            except ValueError as error:
                raise ValueError(f"eval.sets.{name}: with this table, {error}") from error

    def of(self, source: str) -> EvalConfig:
        """Return the settings for one source of ``tasks.eval``."""
        own = self.sets.get(source, EvalSetConfig())
        given = {f.name: value for f in fields(own) if (value := getattr(own, f.name)) is not None}
        return replace(self, sets={}, **given)
