"""The settings of a rollout that all strategies share. ``RolloutConfig`` adds the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.kept import DEFAULT_KEPT, MAX_KEPT
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
    """Nucleus sampling: draw from the most probable tokens that together have at least this probability. 1 disables it.
    If it or `top_k` or `min_p` leaves tokens out, the engine returns the tokens among which each token was drawn, and
    log-probs are normalised over these (see "Truncated sampling" in docs/engines.md)."""
    top_k: int = 0
    """Draw from this number of most probable tokens, at most 4,096. 0 disables it, but with `top_p` or `min_p` it is
    then 512, so that what is stored with a token is bounded."""
    min_p: float = 0.0
    """Leave out tokens that are less probable than this share of the most probable one. 0 disables it."""
    accept_truncation_bias: Changeable[bool] = False
    """Train as if tokens had been drawn from the whole vocabulary although `top_p`, `top_k` or `min_p` leaves some out.
    Every importance ratio and the gradient are then biased. For engines that cannot return the tokens among which they
    drew."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings, or with the tokenizer's end token."""
    save_every_tokens: Changeable[int] = 256
    """A running sample's tokens are written to the journal at least this often; a killed process loses no more than
    this per sample."""
    stall_timeout_s: Changeable[float] = 600.0
    """Time without any token after which the run stops and names the samples it is waiting for. The time that
    environments and rewards take does not count: they have deadlines of their own. The longest wait for servers that
    are all out (`engine.all_down_timeout_s`, `engine.launch_timeout_s` if they are started), or for the workers of a
    swarm (`engine.away_timeout_s`), is added."""
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
        if self.accept_truncation_bias and not self.is_cut:
            raise ValueError(
                "rollout.accept_truncation_bias has no effect, since no tokens are left out: set rollout.top_p, top_k"
                " or min_p, or leave it out"
            )
        if self.replays_truncation and self.top_k > MAX_KEPT:
            raise ValueError(
                f"rollout.top_k must be at most {MAX_KEPT:,}, got {self.top_k:,}: the tokens among which each token was"
                " drawn are stored with it; set top_k = 0 to draw from the whole vocabulary"
            )
        if self.replays_truncation and self.top_k == 1:
            raise ValueError("rollout.top_k is 1: each token would be the only choice, and there is nothing to train")
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

    @property
    def is_cut(self) -> bool:
        """Return whether ``top_p``, ``top_k`` or ``min_p`` leaves tokens out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def replays_truncation(self) -> bool:
        """Return whether the tokens among which each one was drawn are recorded, for the trainer."""
        return self.is_cut and not self.accept_truncation_bias

    @property
    def max_kept(self) -> int:
        """Return the largest number of tokens among which a token is drawn if that is recorded."""
        return self.top_k or DEFAULT_KEPT

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.max_kept if self.replays_truncation else self.top_k,
            min_p=self.min_p,
            returns_kept=self.replays_truncation,
            stop_token_ids=stop_token_ids,
            stop_strings=self.stop_strings,
        )
