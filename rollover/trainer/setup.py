"""The settings under which batches or examples become weights, and whether a checkpoint can be resumed under them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.algorithms.registry import Algorithm
from rollover.errors import ModelError
from rollover.hf.companions import Companions
from rollover.trainer.checkpoint import CheckpointManifest, check_identity, read_manifest, verify_files
from rollover.trainer.config import SFTConfig, TrainerConfig
from rollover.trainer.policy import check_kind
from rollover.types import is_moderate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Everything that determines what is learned, apart from the batches and the model.

    Example: two trainers with the setup ``TrainingSetup(config=TrainerConfig(), algorithm=ALGORITHMS["grpo"],
    temperature=1.0, max_response_tokens=1024, num_steps=200)`` that begin with one model and get the same batches have
    the same weights, except for rounding.
    """

    config: TrainerConfig
    algorithm: Algorithm
    temperature: float
    """Sampling temperature, at which log-probs are computed."""
    max_response_tokens: int
    """The response budget (overlong punishment, Dr.GRPO's divisor)."""
    num_steps: int
    """Batches in the run, where the ``linear`` and ``cosine`` schedules end."""
    seed: int = 0
    """Shuffles the groups of a batch over its mini-batches. (Dropout is off: nothing else is random.)"""
    deterministic: bool = False
    """Refuse kernels whose result varies between runs: on one machine with one thread count and one number of devices
    a step is then a function of (state, batch), bit for bit."""
    companions: Companions = field(default_factory=dict)
    """Files of its checkpoints that take the place of the initial model's, by name."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be above 0 for training, got {self.temperature}: greedy decoding gives its tokens no"
                " probabilities to learn from"
            )
        if not is_moderate(self.temperature):
            raise ValueError(f"temperature must be between 1e-30 and 1e30, got {self.temperature:g}")

    def identity(self) -> dict[str, Any]:
        """Return the settings under which a checkpoint can be resumed, by their keys."""
        settings = {f"trainer.{k}": v for k, v in self.config.identity().items()}
        settings |= {f"algorithm.{k}": v for k, v in self.algorithm.settings().items()}
        settings |= {"seed": self.seed, "temperature": self.temperature}
        settings["max_response_tokens"] = self.max_response_tokens
        if self.config.schedule != "constant":
            settings["num_steps"] = self.num_steps
        return settings

    def manifest(self, version: int, *, num_threads: int, num_ranks: int = 1, extra: Any = None) -> CheckpointManifest:
        """Return the manifest of a checkpoint of ``version``; ``extra`` is the caller's JSON."""
        return CheckpointManifest(
            version=version,
            identity=self.identity(),
            num_threads=num_threads,
            num_ranks=num_ranks,
            extra=dict(extra or {}),
        )

    def check_resumable(self, checkpoint: Path, initial: Path, *, num_threads: int, num_ranks: int = 1) -> int:
        """Read all of a checkpoint and return its version. Raises an error unless training can continue from it.

        Args:
            initial: the model that the run began with.
            num_threads: CPU threads of each process of the trainer that would continue.
            num_ranks: its processes.

        Raises:
            ModelError: the settings, the model or, if bits matter, threads or devices differ from those it was written
                with.
            DamagedCheckpoint: it differs from what was written.
        """
        manifest = read_manifest(checkpoint)
        verify_files(checkpoint, manifest)
        check_identity(checkpoint, manifest, self.identity())
        if self.deterministic and manifest.num_ranks != num_ranks:
            raise ModelError(
                f"checkpoint {str(checkpoint)!r} was written with trainer.num_devices = {manifest.num_ranks}, now it is"
                f" {num_ranks}: restore the setting, or set deterministic = false"
            )
        if self.deterministic and manifest.num_threads != num_threads:
            raise ModelError(
                f"checkpoint {str(checkpoint)!r} was written with {manifest.num_threads} threads, "
                f"now there are {num_threads}: set OMP_NUM_THREADS={manifest.num_threads * num_ranks} (on a cluster, "
                f"cluster.trainer_resources.CPU = {manifest.num_threads}), "
                "or deterministic = false"
            )
        check_kind(self.config, checkpoint, initial)
        return manifest.version


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSetup:
    """Everything that determines what a warm-up learns, apart from its examples."""

    config: SFTConfig
    deterministic: bool = False
    companions: Companions = field(default_factory=dict)
    """Files of the model that take the place of the files of the model it begins with, by name."""
