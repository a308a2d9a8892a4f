"""Where prompts come from and how answers are scored."""

from rollover.errors import RewardError
from rollover.tasks.config import RewardConfig, SourceConfig, TasksConfig
from rollover.tasks.evaluate import Estimate, EvalRow, ScoredPrompt, evaluate, pass_at_k
from rollover.tasks.mixture import PromptSource
from rollover.tasks.scorer import Scorer, ScorerStats
from rollover.tasks.source import eval_sources, train_source

__all__ = [
    "Estimate",
    "EvalRow",
    "PromptSource",
    "RewardConfig",
    "RewardError",
    "ScoredPrompt",
    "Scorer",
    "ScorerStats",
    "SourceConfig",
    "TasksConfig",
    "eval_sources",
    "evaluate",
    "pass_at_k",
    "train_source",
]
