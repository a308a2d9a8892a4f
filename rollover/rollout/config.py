"""What a user may say about the rollout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rollover.settings.changes import Changeable, Inexact
from rollover.types import UNBOUNDED, SamplingParams

StrategyName = Literal[
    "sync",
    "oversample",
    "april",
    "concurrency",
    "bounded_async",
    "token_budget",
    "sorted",
    "tail_rounds",
    "inflight",
    "threshold",
    "windowed",
    "probe",
    "fast_lane",
    "rollover",
]
_ON_POLICY = ("sync", "probe")
_OVER_SAMPLING = ("april", "oversample", "token_budget", "sorted", "tail_rounds")
_DISCARDING = ("oversample", "tail_rounds")
_OVERLAPPING = ("bounded_async", "inflight", "threshold", "windowed")
_VALID_WITH: dict[str, tuple[str, ...]] = {
    "over_sampling_batch_size": _OVER_SAMPLING,
    "drop_surplus": ("april",),
    "num_running": ("concurrency", "fast_lane", *_OVERLAPPING),
    "tokens_per_round": ("token_budget",),
    "staleness_threshold": ("threshold",),
    "window_groups": ("windowed",),
    "fast_lane_samples": ("fast_lane",),
    "lag_target": ("rollover",),
    "prefill_tokens_per_iteration": ("rollover",),
}
"""Keys that have an effect with these strategies alone."""

MAX_BATCH_SAMPLES = 2**20
"""Bounds what a mistyped number makes the driver hold open before anything else fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Which rollouts are launched, stopped, resumed and trained."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    strategy: StrategyName = "april"
    """`april` (launch more, park the rest and resume them first), `sync`, `oversample` (launch more, discard the rest),
    `concurrency` (a fixed number of samples in flight), `bounded_async` (generation never stops), `token_budget` (so
    many new tokens per sample and round), `sorted` (a pool of several batches, short groups first), `tail_rounds`
    (discard, and run the discarded prompts by themselves), `inflight` (`bounded_async` in order of finishing; weights
    change under running samples), `threshold` (a quota of groups per weight update), `windowed` (`bounded_async` that
    limits overtaking), `probe` (`sync`, longest groups first), `fast_lane` (`concurrency` with the oldest samples on a
    lightly loaded replica) or `rollover` (as many batches from one collection, and as much over-sampling, as
    `lag_target` allows)."""
    rollout_batch_size: int = 32
    """Prompts, and so groups, per training step."""
    group_size: int = 8
    """Samples per prompt."""
    unit: Literal["group", "sample"] = "group"
    """What is trained as soon as it is scored: whole groups, or single samples, which wait for no sibling. `sample`
    needs an advantage that does not compare siblings (`algorithm.advantage = "history"`)."""
    over_sampling_batch_size: int | None = None
    """Groups in flight at the start of a round, for `april`, `oversample`, `token_budget`, `sorted` (its pool) and
    `tail_rounds` (its short rounds); when absent, twice `rollout_batch_size`."""
    drop_surplus: bool = False
    """For `april`: take groups in order of finishing and throw those beyond the batch away, as its released code does,
    to see what that costs."""
    num_running: Inexact[int | None] = None
    """Samples in flight, for `concurrency`, `fast_lane`, `bounded_async`, `inflight`, `threshold` and `windowed`; what
    the engine can run when absent."""
    tokens_per_round: int | None = None
    """New tokens that `token_budget` grants a sample per round; when absent, a quarter of `max_new_tokens`."""
    staleness_threshold: float | None = None
    """Groups that `threshold` opens ahead of a batch, in batches: between two weight updates at most
    `1 + staleness_threshold` batches are open or opened. 0.5 when absent."""
    window_groups: int | None = None
    """How many groups, counted from the oldest, `windowed` may train; `rollout_batch_size` when absent."""
    fast_lane_samples: int | None = None
    """Oldest samples that `fast_lane` runs on the lightly loaded replica; when absent, an eighth of a batch's."""
    lag_target: float | None = None
    """Mean age of trained tokens, in versions, that `rollover` works up to; 1 when absent."""
    prefill_tokens_per_iteration: Inexact[Annotated[float | None, UNBOUNDED]] = None
    """What `rollover` weighs computing caches again with: response tokens that the engine, or all servers together,
    prefill in the time of a decode iteration of few samples. When absent, 20 for the embedded engine on a CPU, 150 for
    it on a GPU and for each server, and `inf`, no weight at all, where `engine.kv_on_update` is `keep`."""
    max_staleness: int | None = None
    """Bound in policy versions: training step minus the version of the oldest token trained in it. When absent, 0 for
    `sync` and `probe`, as many as the over-sampling can need for `oversample` and `tail_rounds`, else 4 or what the
    over-sampling or the threshold needs, whichever is more."""
    max_new_tokens: int = 1024
    """Budget of a whole response, across all resumes."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1, log-probs are those of the truncated distribution and importance ratios are no longer exact."""
    top_k: int = 0
    """0 switches it off; as for `top_p`."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these, beside the tokenizer's end token."""
    save_every_tokens: Changeable[int] = 256
    """A running sample's tokens reach the journal at least this often; a killed process loses no more per sample."""
    stall_timeout_s: Changeable[float] = 600.0
    """With nothing decoded or scored for this long, the run stops and names the samples it waits for."""
    max_retries: Changeable[int] = 3
    """Engine failures in a row, without a token in between, that one sample survives; each time it goes on from its
    last streamed token."""

    def __post_init__(self) -> None:
        for key in (
            *("rollout_batch_size", "group_size", "save_every_tokens", "num_running"),
            *("tokens_per_round", "window_groups", "fast_lane_samples"),
        ):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"rollout.{key} must be at least 1, got {value}")
        if self.rollout_batch_size * self.group_size > MAX_BATCH_SAMPLES:
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
        self._check_strategy()

    def _check_strategy(self) -> None:
        for key, strategies in _VALID_WITH.items():
            if getattr(self, key) not in (None, False) and self.strategy not in strategies:
                raise ValueError(
                    f"rollout.{key} has no effect with strategy {self.strategy!r};"
                    f" remove it, or use {'one of ' * (len(strategies) > 1)}{', '.join(strategies)}"
                )
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            raise ValueError(
                f"rollout.over_sampling_batch_size ({self.over_sampling_batch_size}) must be at least"
                f" rollout.rollout_batch_size ({self.rollout_batch_size})"
            )
        if self.staleness_threshold is not None and not 0 <= self.staleness_threshold < math.inf:
            raise ValueError(f"rollout.staleness_threshold must be at least 0, got {self.staleness_threshold}")
        if self.lag_target is not None and not 0 <= self.lag_target < math.inf:
            raise ValueError(f"rollout.lag_target must be at least 0, got {self.lag_target}")
        if self.prefill_tokens_per_iteration is not None and not self.prefill_tokens_per_iteration > 0:
            raise ValueError(
                f"rollout.prefill_tokens_per_iteration must be above 0, got {self.prefill_tokens_per_iteration}"
            )
        if self.strategy in _ON_POLICY and self.max_staleness:
            raise ValueError(
                f"rollout.max_staleness is {self.max_staleness}, but strategy {self.strategy!r} is always at 0;"
                " remove it, or choose a strategy that carries work over"
            )
        if self.staleness_bound < self.staleness_needed:
            by, key = f"{self.launched_groups} groups in flight", "over_sampling_batch_size"
            if self.strategy == "threshold":
                by, key = f"a threshold of {self.threshold:g}", "staleness_threshold"
            raise ValueError(
                f"rollout.max_staleness ({self.staleness_bound}) is below {self.staleness_needed}, which {by} for"
                f" batches of {self.rollout_batch_size} need{'s' * (self.strategy == 'threshold')};"
                f" raise it, or lower rollout.{key}"
            )

    @property
    def num_siblings(self) -> int:
        """Groups that share a prompt: all its samples where each is trained by itself, else one."""
        return self.group_size if self.unit == "sample" else 1

    @property
    def launched_groups(self) -> int:
        """Groups in flight at the start of a round: N' of APRIL."""
        if self.strategy not in _OVER_SAMPLING:
            return self.rollout_batch_size
        return self.over_sampling_batch_size or 2 * self.rollout_batch_size

    @property
    def round_budget(self) -> int:
        """``tokens_per_round`` with its default filled in."""
        return self.tokens_per_round or -(-self.max_new_tokens // 4)

    @property
    def threshold(self) -> float:
        """``staleness_threshold`` with its default filled in."""
        return 0.5 if self.staleness_threshold is None else self.staleness_threshold

    @property
    def window(self) -> int:
        """``window_groups`` with its default filled in."""
        return (self.window_groups or self.rollout_batch_size) * self.num_siblings

    @property
    def target_lag(self) -> float:
        """``lag_target`` with its default filled in."""
        return 1.0 if self.lag_target is None else self.lag_target

    @property
    def fast_lane(self) -> int:
        """``fast_lane_samples`` with its default filled in."""
        return self.fast_lane_samples or -(-self.rollout_batch_size * self.group_size // 8)

    @property
    def staleness_needed(self) -> int:
        """Least bound that lets in as many groups as the strategy wants open at the same time."""
        if self.strategy == "threshold":
            return math.ceil(self.threshold)
        return -(-self.launched_groups // self.rollout_batch_size) - 1

    @property
    def staleness_bound(self) -> int:
        """``max_staleness`` with its default filled in."""
        if self.max_staleness is not None:
            return self.max_staleness
        if self.strategy in _ON_POLICY:
            return 0
        return self.staleness_needed if self.strategy in _DISCARDING else max(4, self.staleness_needed)

    @property
    def overlaps_training(self) -> bool:
        """Whether generation goes on while the trainer trains."""
        return self.strategy in _OVERLAPPING

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
