"""Open the trainer that a config asks for: everything that trains goes through this one function."""

from __future__ import annotations

from pathlib import Path

from rollover.algorithms.registry import Algorithm
from rollover.trainer.base import Trainer
from rollover.trainer.config import TrainerConfig


def open_trainer(
    config: TrainerConfig,
    algorithm: Algorithm,
    model: str | Path,
    *,
    temperature: float,
    max_response_tokens: int,
    num_steps: int,
    seed: int = 0,
    deterministic: bool = False,
    resume_from: Path | None = None,
) -> Trainer:
    """Return a trainer of ``model``, or one that goes on from a checkpoint; ``LocalTrainer`` explains the arguments.

    Raises:
        ModelError: the model cannot be trained, or the checkpoint does not match it or the settings.
        ConfigError: the device is not there.
    """
    from rollover.trainer.local import LocalTrainer

    return LocalTrainer(
        config,
        algorithm,
        model,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        num_steps=num_steps,
        seed=seed,
        deterministic=deterministic,
        resume_from=resume_from,
    )
