"""What a user may say about the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.types import SamplingParams

StrategyName = Literal["sync", "oversample", "april", "concurrency", "bounded_async"]
_OVER_SAMPLING = ("oversample", "april")
_FIXED_CONCURRENCY = ("concurrency", "bounded_async")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Which rollouts are launched, stopped, resumed and trained."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    strategy: StrategyName = "april"
    """`sync`, `oversample` (launch more, discard the rest), `april` (launch more, park the rest and resume them
    first), `concurrency` (a fixed number of samples in flight) or `bounded_async` (generation never stops)."""
    rollout_batch_size: int = 32
    """Prompts, and so groups, per training step."""
    group_size: int = 8
    """Samples per prompt."""
    over_sampling_batch_size: int | None = None
    """Groups in flight at the start of a round, for `oversample` and `april`; when absent, twice
    `rollout_batch_size`."""
    num_running: int | None = None
    """Samples in flight, for `concurrency` and `bounded_async`; what the engine can run when absent."""
    max_staleness: int | None = None
    """Bound in policy versions: training step minus the version of the oldest token trained in it. When absent, 0 for
    `sync`, as many as its over-sampling can need for `oversample`, else 4."""
    max_new_tokens: int = 1024
    """Budget of a whole response, across all resumes."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1, log-probs are those of the truncated distribution and importance ratios are no longer exact."""
    top_k: int = 0
    """0 switches it off; as for `top_p`."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these, beside the tokenizer's end token."""
    save_every_tokens: int = 256
    """A running sample's tokens reach the journal at least this often; a killed process loses no more per sample."""
    stall_timeout_s: float = 600.0
    """With nothing decoded or scored for this long, the run stops and names the samples it waits for."""
    max_retries: int = 3
    """Engine failures in a row, without a token in between, that one sample survives; each time it goes on from its
    last streamed token."""

    def __post_init__(self) -> None:
        for key in ("rollout_batch_size", "group_size", "save_every_tokens", "num_running"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"rollout.{key} must be at least 1, got {value}")
        if self.stall_timeout_s <= 0:
            raise ValueError(f"rollout.stall_timeout_s must be above 0 seconds, got {self.stall_timeout_s}")
        if self.max_retries < 0:
            raise ValueError(f"rollout.max_retries must be at least 0, got {self.max_retries}")
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature must be above 0 to train (no density at 0), got {self.temperature}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"rollout.max_staleness must be at least 0, got {self.max_staleness}")
        self.sampling()
        self._check_strategy()

    def _check_strategy(self) -> None:
        if self.over_sampling_batch_size is not None:
            if self.strategy not in _OVER_SAMPLING:
                raise ValueError(
                    f"rollout.over_sampling_batch_size has no effect with strategy {self.strategy!r};"
                    f" remove it, or use one of {', '.join(_OVER_SAMPLING)}"
                )
            if self.over_sampling_batch_size < self.rollout_batch_size:
                raise ValueError(
                    f"rollout.over_sampling_batch_size ({self.over_sampling_batch_size}) must be at least"
                    f" rollout.rollout_batch_size ({self.rollout_batch_size})"
                )
        if self.num_running is not None and self.strategy not in _FIXED_CONCURRENCY:
            raise ValueError(
                f"rollout.num_running has no effect with strategy {self.strategy!r};"
                f" remove it, or use one of {', '.join(_FIXED_CONCURRENCY)}"
            )
        if self.strategy == "sync" and self.max_staleness:
            raise ValueError(
                f"rollout.max_staleness is {self.max_staleness}, but strategy 'sync' is always at 0;"
                " remove it, or choose a strategy that carries work over"
            )
        if self.strategy in _OVER_SAMPLING and self.staleness_bound < self.staleness_needed:
            raise ValueError(
                f"rollout.max_staleness ({self.staleness_bound}) is below {self.staleness_needed}, which"
                f" {self.launched_groups} groups in flight for batches of {self.rollout_batch_size} need;"
                " raise it, or lower rollout.over_sampling_batch_size"
            )

    @property
    def launched_groups(self) -> int:
        """Groups in flight at the start of a round: N' of APRIL."""
        if self.strategy not in _OVER_SAMPLING:
            return self.rollout_batch_size
        return self.over_sampling_batch_size or 2 * self.rollout_batch_size

    @property
    def staleness_needed(self) -> int:
        """Least bound under which ``launched_groups`` can be admitted at once."""
        return -(-self.launched_groups // self.rollout_batch_size) - 1

    @property
    def staleness_bound(self) -> int:
        """``max_staleness`` with its default filled in."""
        if self.max_staleness is not None:
            return self.max_staleness
        return {"sync": 0, "oversample": self.staleness_needed}.get(self.strategy, max(4, self.staleness_needed))

    @property
    def overlaps_training(self) -> bool:
        """Whether generation goes on while the trainer trains."""
        return self.strategy == "bounded_async"

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            stop_strings=self.stop_strings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how often the driver puts up with trouble."""

    save_every_tokens: int = 256
    stall_timeout_s: float = 600.0
    abort_timeout_s: float = 60.0
    max_retries: int = 3
    max_failed_batches: int = 2
    max_filtered_batches: int = 32

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Limits:
        return cls(
            save_every_tokens=config.save_every_tokens,
            stall_timeout_s=config.stall_timeout_s,
            max_retries=config.max_retries,
        )
