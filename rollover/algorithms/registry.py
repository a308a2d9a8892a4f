"""An algorithm is a row: algorithms differ by columns, not by classes.

The table is data and needs no torch. The functions behind a column's values live in ``advantages``,
``losses``, ``corrections``, ``kl`` and ``filters``, each in a dictionary keyed by that value.

Papers: GRPO (arXiv 2402.03300), DAPO (2503.14476), GSPO (2507.18071), Dr.GRPO (2503.20783), RLOO
(2402.14740), REINFORCE++ (2501.03262), CISPO (2506.13585), decoupled PPO (2110.00641).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from rollover.errors import nearest

if TYPE_CHECKING:
    from rollover.algorithms.config import AlgorithmConfig

Advantage = Literal["group_std", "group_mean", "leave_one_out", "whitened", "group_mean_whitened", "history"]
Objective = Literal["ppo_clip", "cispo", "reinforce"]
RatioLevel = Literal["token", "sequence", "sequence_token"]
OldPolicy = Literal["proximal", "rollout"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "group-token-mean"
]
Correction = Literal["none", "mask_stale", "tis", "mis"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3", "k3_k2grad", "k1_unbiased", "k2_unbiased", "k3_unbiased"]
KlIn = Literal["loss", "reward"]
GroupFilter = Literal["none", "zero_signal"]

CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "mask_stale": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "mis": (0.5, 5.0),
}
"""Bounds a correction has when none are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One resolved row. The columns' meanings stand in ``AlgorithmConfig``; raises ``ValueError`` for a
    combination that means nothing."""

    name: str
    advantage: Advantage
    advantage_eps: float = 1e-6
    advantage_ddof: int = 1
    objective: Objective = "ppo_clip"
    ratio_level: RatioLevel = "token"
    old: OldPolicy = "proximal"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    aggregation: Aggregation = "seq-mean-token-mean"
    correction: Correction = "tis"
    correction_level: CorrectionLevel = "token"
    correction_bounds: tuple[float, float] = CORRECTION_BOUNDS["tis"]
    guard: tuple[float, float] | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: KlIn = "loss"
    overlong_buffer: float = 0.0
    mask_truncated: bool = False
    group_filter: GroupFilter = "none"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        if self.old == "rollout" and self.correction in ("tis", "mis"):
            raise ValueError(
                f"algorithm.correction {self.correction!r} with algorithm.old 'rollout' would count the "
                "distance to the sampling policy twice: set correction to 'none' or 'mask_stale', or old to "
                "'proximal'"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "algorithm.kl_estimator 'k1' in the loss has expected gradient 0 and regularises nothing: "
                "use 'k2', 'k3' or 'k1_unbiased', or set kl_in to 'reward'"
            )
        if self.kl_coef > 0 and self.kl_in == "reward" and (self.advantage != "whitened" or self.kl_estimator != "k1"):
            raise ValueError(
                "algorithm.kl_in 'reward' needs advantage 'whitened' and kl_estimator 'k1', got "
                f"advantage {self.advantage!r} and kl_estimator {self.kl_estimator!r}"
            )

    @property
    def needs_ref(self) -> bool:
        """Whether ``ref_logprobs`` must be computed."""
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether ``proximal_logprobs`` enter the loss. If not, the trainer may hand in its detached current
        log-probs in their place; they then serve metrics alone."""
        ratio = self.objective != "reinforce" and self.old == "proximal"
        kl = self.kl_coef > 0 and self.kl_in == "reward"
        return ratio or kl or self.correction in ("tis", "mis") or self.guard is not None

    @property
    def ignores_staleness(self) -> bool:
        """Whether tokens of older versions are trained as if the current policy had sampled them."""
        sees_rollout = self.old == "rollout" and self.objective != "reinforce"
        return self.correction == "none" and not sees_rollout


def _check_choices(row: Algorithm) -> None:
    for column, hint in get_type_hints(Algorithm).items():
        choices, value = get_args(hint), getattr(row, column)
        if choices and all(isinstance(c, str) for c in choices) and value not in choices:
            raise ValueError(f"algorithm.{column} has no value {value!r}{nearest(str(value), choices)}")


def _check_ranges(row: Algorithm) -> None:
    low, high = row.correction_bounds
    guard_low, guard_high = row.guard or (0.0, math.inf)
    rules: tuple[tuple[str, bool, str], ...] = (
        ("advantage_eps", row.advantage_eps > 0, "be above 0"),
        ("advantage_ddof", row.advantage_ddof in (0, 1), "be 0 or 1"),
        ("clip_low", 0 <= row.clip_low <= 1, "lie in [0, 1]"),
        ("clip_high", row.clip_high >= 0, "be at least 0"),
        ("dual_clip", row.dual_clip == 0 or row.dual_clip > 1, "be above 1, or 0 for off"),
        ("correction_bounds", 0 <= low <= 1 <= high, "hold low <= 1 <= high"),
        ("guard", 0 <= guard_low <= 1 <= guard_high, "hold low <= 1 <= high"),
        ("kl_coef", row.kl_coef >= 0, "be at least 0"),
        ("overlong_buffer", 0 <= row.overlong_buffer <= 1, "lie in [0, 1]"),
    )
    for column, holds, rule in rules:
        if not holds:
            raise ValueError(f"algorithm.{column} must {rule}, got {getattr(row, column)}")


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(name="grpo", advantage="group_std"),
        Algorithm(
            name="dapo",
            advantage="group_std",
            clip_high=0.28,
            aggregation="token-mean",
            overlong_buffer=0.2,
            group_filter="zero_signal",
        ),
        Algorithm(
            name="gspo",
            advantage="group_std",
            ratio_level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            correction_level="geometric",
        ),
        Algorithm(
            name="gspo-token",
            advantage="group_std",
            ratio_level="sequence_token",
            clip_low=3e-4,
            clip_high=4e-4,
            correction_level="geometric",
        ),
        Algorithm(name="dr-grpo", advantage="group_mean", aggregation="seq-mean-token-sum-norm"),
        Algorithm(name="rloo", advantage="leave_one_out", objective="reinforce", aggregation="seq-mean-token-sum"),
        Algorithm(
            name="reinforce++",
            advantage="whitened",
            advantage_ddof=0,
            aggregation="token-mean",
            kl_coef=0.01,
            kl_estimator="k1",
            kl_in="reward",
        ),
        Algorithm(
            name="reinforce++-baseline",
            advantage="group_mean_whitened",
            advantage_ddof=0,
            aggregation="token-mean",
            kl_coef=0.01,
            kl_estimator="k2",
        ),
        Algorithm(
            name="cispo",
            advantage="group_std",
            objective="cispo",
            clip_low=1.0,
            clip_high=4.0,
            aggregation="token-mean",
        ),
    )
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The row named by ``config`` with its overrides in place. Raises ``ValueError`` for an unknown name, a
    combination that means nothing, or an override that would have no effect."""
    if config.name not in ALGORITHMS:
        raise ValueError(f"algorithm.name has no value {config.name!r}{nearest(config.name, ALGORITHMS)}")
    overrides: dict[str, Any] = {
        f.name: value for f in fields(config) if f.name != "name" and (value := getattr(config, f.name)) is not None
    }
    given = frozenset(overrides)
    if "correction" in given:
        overrides.setdefault("correction_bounds", CORRECTION_BOUNDS.get(overrides["correction"], (0.0, math.inf)))
    algorithm = replace(ALGORITHMS[config.name], **overrides)
    _check_effect(algorithm, given)
    return algorithm


def _check_effect(row: Algorithm, given: frozenset[str]) -> None:
    """Refuse an override that the rest of the row leaves without effect."""
    idle: dict[str, tuple[bool, str]] = {
        **dict.fromkeys(
            ("ratio_level", "old", "clip_low", "clip_high"),
            (row.objective == "reinforce", "objective is 'reinforce'"),
        ),
        "dual_clip": (row.dual_clip > 0 and row.objective != "ppo_clip", f"objective is {row.objective!r}"),
        **dict.fromkeys(
            ("correction_bounds", "correction_level"),
            (row.correction in ("none", "mask_stale"), f"correction is {row.correction!r}"),
        ),
        **dict.fromkeys(("kl_estimator", "kl_in"), (row.kl_coef == 0, "kl_coef is 0")),
        **dict.fromkeys(
            ("advantage_eps", "advantage_ddof"),
            (row.advantage in ("group_mean", "leave_one_out"), f"advantage is {row.advantage!r}"),
        ),
    }
    for column in sorted(given & idle.keys()):
        without_effect, because = idle[column]
        if without_effect:
            raise ValueError(f"algorithm.{column} has no effect while {because}: remove it")
