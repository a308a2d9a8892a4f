"""Decides which prompts a run uses, and how they are written out."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rollover.settings.changes import Inexact, OnResume
from rollover.settings.shape import ByKind
from rollover.tasks.sources import SourceConfig

NO_SOURCE = "tasks.train names no source; add one [[tasks.train]] table"


def _stays_skipping(before: Any, after: Any) -> str | None:
    return "prompts have been skipped" if after.tasks.long_prompts == "error" else None


def _stays_given(before: Any, after: Any) -> str | None:
    is_given = [config.tasks.chat_template_file is not None for config in (before, after)]
    return None if all(is_given) else "what the run has learned depends on the template"  # its content is on record


def _stays_held_out(before: Any, after: Any) -> str | None:
    is_kept_out = before.tasks.keep_eval_out or after.tasks.keep_eval_out
    return "its prompts are kept out of training (tasks.keep_eval_out)" if is_kept_out else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Settings of a curriculum: prompts that are always or never solved are drawn less often.

    Example: with ``CurriculumConfig(revisit=0.1)``, a prompt whose responses were all right at two visits is drawn once
    in ten epochs, and one with 6 of 8 right in three of four.
    """

    min_visits: int = 2
    """Number of times that a prompt is drawn before its pass rate decides."""
    revisit: Inexact[float] = 0.1
    """Smallest probability with which a prompt is drawn when its turn comes. With 0, a prompt whose responses were all
    right, or all wrong, is never drawn again."""

    def __post_init__(self) -> None:
        if self.min_visits < 1:
            raise ValueError(f"tasks.curriculum.min_visits must be at least 1, got {self.min_visits}")
        if not 0 <= self.revisit <= 1:
            raise ValueError(f"tasks.curriculum.revisit must lie in [0, 1], got {self.revisit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksConfig:
    """Holds the settings of a run's prompts."""

    train: tuple[Annotated[SourceConfig, ByKind()], ...] = ()
    """Sources of the training mixture."""
    eval: Annotated[
        tuple[Annotated[SourceConfig, ByKind()], ...],
        OnResume(_stays_held_out, "may change on resume, unless `keep_eval_out`"),
    ] = ()
    """Sources for evaluation; their prompts are named ``eval/<name>``."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """``on``: every prompt goes through the tokenizer's chat template. ``off``: plain text, unchanged. ``auto``: the
    template if the tokenizer has one."""
    chat_template_file: Annotated[
        str | None, OnResume(_stays_given, "may change on resume to a place with the same file")
    ] = None
    """File with a chat template that is used in place of the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``{ enable_thinking = false }``. A source's own override them, and so
    does a row's column ``chat_template_kwargs``."""
    chat_template_date: str | None = None
    """Date, as YYYY-MM-DD, for templates that write the date of today."""
    system_prompt: str | None = None
    """System message for prompts that do not have their own; needs a chat template."""
    prompt_suffix: str = ""
    """Appended to the question (or to the last user message), inside the template."""
    max_prompt_tokens: int = 1024
    """Longest admissible prompt, in tokens."""
    long_prompts: Annotated[Literal["skip", "error"], OnResume(_stays_skipping, "may change to `skip` on resume")] = (
        "skip"
    )
    """Longer prompts are skipped, or stop the run at once."""
    keep_eval_out: bool = True
    """Exclude evaluation prompts from training (and warm-up), so that accuracy is measured on unseen ones. The texts
    of all messages but the system's are compared, apart from white space."""
    eval_seed: int = 0
    """Seed of the generated evaluation items and of the environments of evaluation. It is independent of the run's
    seed, so that runs of several seeds are measured on the same items."""
    shuffle: bool = True
    """If true, the rows are reshuffled in every epoch; otherwise they keep the file's order."""
    curriculum: CurriculumConfig | None = None
    """Draws prompts by their pass rate: prompts that are always or never solved are drawn less often. Left out: all
    alike."""

    def __post_init__(self) -> None:
        for role, sources in (("train", self.train), ("eval", self.eval)):
            require_own_names(f"tasks.{role}", sources)
            for number, source in enumerate(sources):
                if source.lacking_reward:
                    raise ValueError(f"{role}.{number}: {source.lacking_reward}")
        for source in self.eval:
            if len(source.rewards) > 1 or any(reward.compares_siblings for reward in source.all_rewards):
                raise ValueError(
                    f"tasks.eval: source {source.name!r} must have one reward, which does not compare siblings: "
                    "accuracy is the share of responses that it passes"
                )
        for key in ("system_prompt", "chat_template_file", "chat_template_date"):
            if self.chat_template == "off" and getattr(self, key) is not None:
                raise ValueError(f"tasks.{key} has no effect with chat_template = 'off': remove one of them")
        if self.chat_template_date is not None:
            try:
                datetime.date.fromisoformat(self.chat_template_date)
            except ValueError:
                raise ValueError(
                    f"tasks.chat_template_date must be a date as YYYY-MM-DD, got {self.chat_template_date!r}"
                ) from None
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise ValueError("tasks.system_prompt is blank; omit it")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"tasks.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.eval_seed < 0:
            raise ValueError(f"tasks.eval_seed must be at least 0, got {self.eval_seed}")


def require_own_names(where: str, sources: Sequence[SourceConfig]) -> None:
    """Raise ``ValueError`` if two sources have one name."""
    names = [source.name for source in sources]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{where}: two sources are called {double[0]!r}; give each its own name")
