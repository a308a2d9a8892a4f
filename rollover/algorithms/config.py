"""The algorithm that a run trains with: the name of a row, and the settings that the run changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from rollover.algorithms.registry import (
    ADVANTAGES,
    ALGORITHMS,
    CORRECTION_BOUNDS,
    OBJECTIVES,
    Advantage,
    Aggregation,
    Algorithm,
    Correction,
    CorrectionLevel,
    GroupFilter,
    KlEstimator,
    KlIn,
    Objective,
    OldPolicy,
    RatioLevel,
)
from rollover.errors import nearest
from rollover.types import UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Names an algorithm of the table. Every other setting has the algorithm's own value where it is left out.
    Raises ``ValueError`` where ``resolve`` would."""

    name: str = "grpo"
    """Names a row of the table of algorithms."""
    advantage: Advantage | None = None
    """``group_std``: reward minus the group's mean, over the group's deviation (GRPO). ``group_mean``:
    without the division (Dr.GRPO). ``leave_one_out``: reward minus the mean of the siblings (RLOO).
    ``whitened``: reward to go per token, whitened over the whole batch (REINFORCE++).
    ``group_mean_whitened``: group mean first. ``history``: what ``group_std`` gives among seven siblings with the
    mean and the deviation of earlier rewards, fixed before the sample began; for samples trained one by one
    (``rollout.unit``). It is below 2.475 for any rewards, and 0 before any reward is known."""
    advantage_eps: float | None = None
    """Added to the deviation that advantages are divided by; 1e-6, as small as keeps 0/0 away."""
    advantage_ddof: int | None = None
    """1: deviation over n - 1, as GRPO trainers do. 0: over n, as REINFORCE++ does."""
    objective: Objective | None = None
    """``ppo_clip``: the clipped surrogate. ``cispo``: log-likelihood times the detached clipped ratio, so
    every token keeps a gradient. ``reinforce``: plain log-likelihood times advantage, no ratio."""
    ratio_level: RatioLevel | None = None
    """``token``; ``sequence``: one geometric-mean ratio per sample (GSPO); ``sequence_token``: the same
    value, gradient per token, for advantages that differ within a sample (GSPO-token)."""
    old: OldPolicy | None = None
    """What the ratio compares the trained policy with. ``proximal``: the policy at the start of this step
    (decoupled PPO; ``correction`` then handles the distance to the data). ``rollout``: the recorded sampling
    log-probs (single-ratio form: stale tokens can be clipped before the first update)."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 - clip_low; 1 switches the lower clip off."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + clip_high; above clip_low it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Bounds the loss of a token with negative advantage at this multiple of its size; 0 is off, 3 is
    usual."""
    aggregation: Aggregation | None = None
    """How token losses become one number; every denominator is a count over the global batch."""
    correction: Correction | None = None
    """What multiplies the loss of a token sampled by an older version, with rho = exp(proximal - rollout).
    ``tis``: rho truncated into ``correction_bounds`` (default: keeps every token, bounded variance).
    ``mis``: rho where it lies within the bounds, 0 elsewhere (IcePop). ``mask_stale``: only tokens of the
    current version train. ``none``: stale tokens pass for fresh ones; a warning and a metric say how
    many."""
    correction_level: CorrectionLevel | None = None
    """What the bounds act on. ``token``: rho of each token. ``sequence``: the product over the sample
    (unbiased without bounds, unusable variance for long responses). ``geometric``: the sample's geometric
    mean (GSPO rows: the level of their ratio). ``tis`` uses the bounded value as weight; ``mis`` weights by
    the token's rho."""
    correction_bounds: Annotated[tuple[float, float] | None, UNBOUNDED] = None
    """(low, high) around 1. Left out: (0, 2) for ``tis``, (0.5, 5) for ``mis``."""
    guard: Annotated[tuple[float, float] | None, UNBOUNDED] = None
    """Drop whole samples whose geometric-mean rho leaves (low, high): a length-neutral test for gross
    mismatch, on top of any correction. Left out: off, since useful bands depend on learning rate and
    kernels."""
    kl_coef: float | None = None
    """Weight of the KL term against the reference policy; 0 loads no reference model."""
    kl_estimator: KlEstimator | None = None
    """With d = trainer - ref: ``k1`` = d (in the reward only), ``k2`` = d^2/2, ``k3`` = exp(-d) - 1 + d,
    ``k3_k2grad``: value of k3 and gradient of k2. ``*_unbiased``: times exp(trainer - rollout), right also
    for stale tokens (detached for k2)."""
    kl_in: KlIn | None = None
    """``loss``: a term beside the objective. ``reward``: subtracted from each token's reward
    (REINFORCE++)."""
    overlong_buffer: float | None = None
    """Last share of the response budget in which a soft punishment falls from 0 to -1 (DAPO; 0.2 is its
    4096 of 20480 tokens); 0 is off."""
    mask_truncated: bool | None = None
    """Do not train samples that were cut by their token budget; they stay in baseline and denominators."""
    group_filter: GroupFilter | None = None
    """``zero_signal``: drop groups whose rewards are all equal and roll out others instead (DAPO's dynamic
    sampling). ``none``: train what comes."""

    def __post_init__(self) -> None:
        resolve(self)


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Return the row that ``config`` names, with its overrides in place. Raises ``ValueError`` for an unknown name, a
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
    objective = OBJECTIVES[row.objective]
    idle: dict[str, tuple[bool, str]] = {
        **dict.fromkeys(
            ("ratio_level", "old", "clip_low", "clip_high"),
            (not objective.has_ratio, f"objective is {row.objective!r}"),
        ),
        "dual_clip": (row.dual_clip > 0 and not objective.has_dual_clip, f"objective is {row.objective!r}"),
        **dict.fromkeys(
            ("correction_bounds", "correction_level"),
            (row.correction in ("none", "mask_stale"), f"correction is {row.correction!r}"),
        ),
        **dict.fromkeys(("kl_estimator", "kl_in"), (row.kl_coef == 0, "kl_coef is 0")),
        **dict.fromkeys(
            ("advantage_eps", "advantage_ddof"),
            (not ADVANTAGES[row.advantage].divides, f"advantage is {row.advantage!r}"),
        ),
    }
    for setting in sorted(given & idle.keys()):
        without_effect, because = idle[setting]
        if without_effect:
            raise ValueError(f"algorithm.{setting} has no effect while {because}: remove it")
