"""The settings of a rollout that all strategies share. ``RolloutConfig`` adds the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.settings.changes import Changeable
from rollover.types import SamplingParams

MAX_BATCH_SAMPLES = 2**20
"""Limits how many samples the driver would hold open because of a mistyped number before anything else fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """The size of a batch, its staleness bound, the sampling of responses, and the tolerance of failures.

    Example:
        ``SharedConfig(rollout_batch_size=4, group_size=8)`` trains 4 groups of 8 samples, 32 responses, per step.
    """

    rollout_batch_size: int = 32
    """Prompts, and therefore groups, per training step."""
    group_size: int = 8
    """Samples per prompt."""
    unit: Literal["group", "sample"] = "group"
    """Unit of training: whole groups, or single samples, which wait for no siblings and are trained as soon as they
    have been scored. `sample` needs an advantage that does not compare siblings (`algorithm.advantage = "history"`)."""
    max_staleness: int | None = None
    """Staleness bound in policy versions: training step minus the version of the oldest token trained in it. When left
    out: 0 for on-policy strategies; as many as the over-sampling can need for strategies that discard; otherwise 4 or
    as many as the strategy's options need, whichever is more."""
    max_new_tokens: int = 1024
    """Token budget of a whole response, across all resumes."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1, log-probs belong to the truncated distribution, and importance ratios are no longer exact."""
    top_k: int = 0
    """0 disables it; otherwise the remark about `top_p` applies here too."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings, or with the tokenizer's end token."""
    save_every_tokens: Changeable[int] = 256
    """A running sample's tokens are written to the journal at least this often; a killed process loses no more than
    this per sample."""
    stall_timeout_s: Changeable[float] = 600.0
    """Time without any token or reward after which the run stops and names the samples it is waiting for."""
    max_retries: Changeable[int] = 3
    """Consecutive engine failures, without a token in between, that one sample survives; each time it resumes from its
    last streamed token."""

    def __post_init__(self) -> None:
        for key in ("rollout_batch_size", "group_size", "save_every_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"rollout.{key} must be at least 1, got {getattr(self, key)}")
        if self.num_samples > MAX_BATCH_SAMPLES:
            raise ValueError(
                f"rollout.rollout_batch_size ({self.rollout_batch_size}) times rollout.group_size ({self.group_size})"
                f" is above {MAX_BATCH_SAMPLES:,} samples, more than a batch can hold: lower one of the two"
            )
        if self.stall_timeout_s <= 0:
            raise ValueError(f"rollout.stall_timeout_s must be above 0 seconds, got {self.stall_timeout_s}")
        if self.max_retries < 0:
            raise ValueError(f"rollout.max_retries must be at least 0, got {self.max_retries}")
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature must be above 0 to train (no density at 0), got {self.temperature}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"rollout.max_staleness must be at least 0, got {self.max_staleness}")
        self.sampling()

    @property
    def num_samples(self) -> int:
        """Return the number of responses per training step."""
        return self.rollout_batch_size * self.group_size

    @property
    def num_siblings(self) -> int:
        """Return the number of groups that share a prompt: all its samples when each is trained by itself, otherwise
        one."""
        return self.group_size if self.unit == "sample" else 1

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            stop_strings=self.stop_strings,
        )
