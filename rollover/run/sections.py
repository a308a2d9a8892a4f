"""The sections of a run's config that belong to no other package: the model, the warm-up and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rollover.settings.changes import Changeable, Fixed
from rollover.settings.schema import ByKind
from rollover.tasks.sources import SourceConfig
from rollover.trainer.config import ScratchConfig, SFTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: an existing model, or one built from scratch. Give exactly one of the two."""

    path: Changeable[str | None] = None
    """Hugging Face folder or hub id of a Llama, Qwen2 or Qwen3 model. A resumed run may load it from another place."""
    scratch: ScratchConfig | None = None
    """A small decoder with random weights, and a tokenizer trained for the tasks."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.scratch is None):
            seen = "neither" if self.path is None else "both"
            raise ValueError(f"give either model.path or a table model.scratch, got {seen}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig(SFTConfig):
    """Supervised fine-tuning on worked solutions: before the first step, or alone with ``rollover sft``."""

    sources: tuple[Annotated[SourceConfig, ByKind()], ...] = ()
    """Sources of the worked solutions; `tasks.train` when left out."""
    bare_answers: float = 0.0
    """Share of the examples that show only the last line of the solution. The model then learns to guess as well as to
    work things out, which leaves reinforcement learning something to choose between."""

    def __post_init__(self) -> None:
        SFTConfig.__post_init__(self)
        if not 0 <= self.bare_answers < 1:
            raise ValueError(f"sft.bare_answers must lie in [0, 1), got {self.bare_answers}")


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
    max_new_tokens: int | None = None
    """Token budget of a response; `rollout.max_new_tokens` when left out."""

    def __post_init__(self) -> None:
        for key, least in (
            ("every_steps", 0),
            ("num_prompts", 1),
            ("samples_per_prompt", 1),
            ("temperature", 0),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"eval.{key} must be at least {least}, got {getattr(self, key)}")
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
