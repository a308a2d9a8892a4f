"""What the user says about tasks: where prompts come from, how they are written out, how answers are scored.

Every combination that could not have an effect is refused here, before a dataset is opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rollover.environments.config import RewardConfig
from rollover.settings.changes import Changeable, OnResume

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One place prompts come from."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["reasoning_gym", "jsonl", "parquet", "hf"]
    """``reasoning_gym``: generated without end. ``jsonl``, ``parquet``: a file. ``hf``: a dataset of the hub,
    or a folder written by ``save_to_disk``."""
    name: str
    """Names the source in prompt ids and metrics."""
    dataset: str | None = None
    """Name of the reasoning-gym dataset. Unset: ``name``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Parameters of the reasoning-gym dataset, by the library's names."""
    path: Changeable[str | None] = None
    """File (jsonl, parquet); hub id or folder (hf)."""
    split: str | None = None
    """Split of a ``hf`` dataset. Unset: ``train``."""
    subset: str | None = None
    """Configuration name of a ``hf`` dataset."""
    prompt_column: str | None = None
    """Column of the prompt, text or messages; dots go into structures. Unset: the one column among ``prompt,
    question, input, messages``. An assistant's turn that ends the messages is no part of the prompt: it is what
    supervised fine-tuning teaches, and the reference answer where there is no answer column."""
    answer_column: str | None = None
    """Column of the reference answer. Unset: the one among ``answer, label, ground_truth, solution,
    reward_model.ground_truth, reward_spec.ground_truth``, or else the assistant's turn that ends the messages, which
    reward functions get as ``answer``. The name of the prompt column asks for that turn also where there are others."""
    keep_columns: tuple[str, ...] | None = None
    """Columns that travel with the prompt (to the reward function and into the journal). Unset: all."""
    limit: int | None = None
    """Use the first so many rows only. Unset: all; a reasoning-gym source then never repeats an item."""
    weight: float = 1.0
    """Share in the training mixture, relative to the other sources; without meaning in evaluation."""
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"source name must be letters, digits, '_', '-' and '.', got {self.name!r}")
        gym = self.kind == "reasoning_gym"
        idle = ("path", "split", "subset", "prompt_column", "answer_column", "keep_columns")
        idle = idle if gym else ("dataset", "config", *(() if self.kind == "hf" else ("split", "subset")))
        for key in idle:
            if getattr(self, key):
                raise ValueError(f"source {self.name!r}: {key} has no effect with kind {self.kind!r}: leave it out")
        if not gym and not self.path:
            raise ValueError(f"source {self.name!r}: kind {self.kind!r} needs a path")
        if not gym and self.reward.kind == "verifier":
            raise ValueError(
                f"source {self.name!r}: reward kind 'verifier' belongs to reasoning_gym; "
                "set reward.kind to 'exact', 'math_verify' or 'function'"
            )
        for key in {"seed", "size"} & self.config.keys():
            mend = "use seed and tasks.eval_seed" if key == "seed" else "use limit"
            raise ValueError(f"source {self.name!r}: config.{key} is set by the run; {mend}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"source {self.name!r}: limit must be at least 1, got {self.limit}")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"source {self.name!r}: weight must be above 0 and finite, got {self.weight}")

    @property
    def gym_dataset(self) -> str:
        return self.dataset or self.name


def _stays_skipping(before: Any, after: Any) -> str | None:
    return "prompts have been skipped" if after.tasks.long_prompts == "error" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksConfig:
    """The prompts of a run."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    train: tuple[SourceConfig, ...] = ()
    """Sources of the training mixture."""
    eval: tuple[SourceConfig, ...] = ()
    """Sources that measure; their prompts are named ``eval/<name>``."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """``on``: every prompt goes through the tokenizer's chat template. ``off``: plain text as it stands.
    ``auto``: the template when the tokenizer has one."""
    system_prompt: str | None = None
    """Put before the messages that do not bring a system message; needs a chat template."""
    prompt_suffix: str = ""
    """Appended to the question (or to the last user message), inside the template."""
    max_prompt_tokens: int = 1024
    """Longest admissible prompt, in tokens."""
    long_prompts: Annotated[Literal["skip", "error"], OnResume(_stays_skipping, "may change to `skip` on resume")] = (
        "skip"
    )
    """Longer prompts are left out and counted, or stop the run at once."""
    keep_eval_out: bool = True
    """Leave prompts out of training (and warm-up) that are also evaluation prompts, so that accuracy is measured on
    what was never shown. Compared by their text; they count as skipped."""
    eval_seed: int = 0
    """Draws the generated evaluation items; not the run's seed, so that runs of several seeds are measured
    on the same ones."""
    shuffle: bool = True
    """New order of the rows in every epoch; otherwise file order."""

    def __post_init__(self) -> None:
        for role, sources in (("train", self.train), ("eval", self.eval)):
            names = [source.name for source in sources]
            if double := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"tasks.{role}: two sources are called {double[0]!r}; give each its own name")
        if self.chat_template == "off" and self.system_prompt is not None:
            raise ValueError("tasks.system_prompt has no effect with chat_template = 'off': leave one of them out")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"tasks.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.eval_seed < 0:
            raise ValueError(f"tasks.eval_seed must be at least 0, got {self.eval_seed}")
