"""A trainer of TRL over a tiny model, watched: what it was given of each batch, and what it made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from trl import GRPOConfig

from rollover.batch import Batch
from rollover.integrations.trl import GRPOTrainer
from rollover.integrations.trl.answers import Answers
from rollover.rollout.events import CheckpointSaved
from rollover.rollout.journal import read_events
from rollover.rollout.state import RolloutState
from tests.runs import LETTERS
from tests.segments import batch_of

PROMPTS, GENERATIONS = 4, 4
"""Of a batch."""
APRIL = {"rollout": {"strategy": {"kind": "april", "over_sampling_batch_size": 8}, "max_staleness": 2}}


def share(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """The share of the response that is the letter asked for."""
    return [text.count(letter) / max(1, len(text)) for text, letter in zip(completions, answer, strict=True)]


def letters() -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{"prompt": f"{i}{letter}=", "answer": letter} for i, letter in enumerate(LETTERS * 2)]
    )


def arguments(folder: Path, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": 60,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 3,
        "seed": 11,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    return GRPOConfig(**(settings | changes))


def rollover(asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of a small engine that compiles nothing."""
    engine = {"kv_cache_bytes": 4194304, "block_size_tokens": 4, "stream_interval_tokens": 2, "cpu_kernels": "torch"}
    asked = dict(asked or APRIL)
    if "kind" in asked.get("engine", {}):
        return asked
    return {**asked, "engine": {**engine, **asked.get("engine", {})}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One batch, between TRL's preparation and its loss."""

    batch: Batch
    answers: Answers
    output: Mapping[str, Any]
    account: Mapping[str, float]


class WatchedTrainer(GRPOTrainer):
    """Keeps what it sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[Seen] = []
        super().__init__(*args, **kwargs)

    def _look_at(self, output: Mapping[str, Any], answers: Answers, batch: Batch) -> None:
        super()._look_at(output, answers, batch)
        assert self._rollouts is not None
        kept = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in output.items()}
        self.seen.append(Seen(batch=batch, answers=answers, output=kept, account=self._rollouts.feed.account()))


def trainer(
    model: Any,
    folder: Path,
    *,
    asked: Mapping[str, Any] | None = None,
    reward: Callable[..., Any] = share,
    made_by: type[GRPOTrainer] = WatchedTrainer,
    dataset: datasets.Dataset | None = None,
    eval_dataset: Any = None,
    peft_config: Any = None,
    observer: Callable[[Any], None] = lambda event: None,
    **changes: Any,
) -> Any:
    return made_by(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward,
        args=arguments(folder, **changes),
        train_dataset=dataset or letters(),
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        rollover=rollover(asked),
        observer=observer,
    )


def rows(seen: Seen, name: str) -> list[list[float]]:
    """A tensor of TRL's, without its padding."""
    lengths = map(len, seen.answers.completion_ids)
    return [row[:n].tolist() for row, n in zip(seen.output[name], lengths, strict=True)]


def distances(seen: Sequence[Seen]) -> tuple[list[float], list[float]]:
    """TRL's log-prob minus the engine's, of tokens of the current weights and of older ones."""
    fresh, old = [], []
    for one in seen:
        columns = (rows(one, "old_per_token_logps"), rows(one, "sampling_per_token_logps"), one.answers.fresh)
        for ours, theirs, are_fresh in zip(*columns, strict=True):
            for a, b, is_fresh in zip(ours, theirs, are_fresh, strict=True):
                (fresh if is_fresh else old).append(a - b)
    return fresh, old


def lags(batch: Batch) -> list[int]:
    """The lag of each token."""
    return [batch.step - version for t in batch.trajectories for version in t.policy_versions]


def journaled(folder: Path) -> list[Batch]:
    """The batches as they stand in the journal of a run in ``folder``."""
    events = [event for _, event in read_events(folder / "out" / "_rollover" / "journal.sqlite", effective=True)]
    folded = RolloutState(event for event in events if not isinstance(event, CheckpointSaved))
    folded.ledger.check()
    return [batch_of(folded, step) for step in sorted(folded.ledger.batches)]


def logged(trained: Any, name: str) -> list[float]:
    return [row[name] for row in trained.state.log_history if name in row]
