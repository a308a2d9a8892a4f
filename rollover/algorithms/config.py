"""The algorithm of a run: the name of a row in the table, and the settings that the run overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    Weights,
)
from rollover.errors import nearest
from rollover.types import UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Names an algorithm of the table. Every other setting keeps the algorithm's own value when it is left out. Raises
    ``ValueError`` if ``resolve`` would."""

    name: str = "grpo"
    """Name of a row in the table of algorithms."""
    advantage: Advantage | None = None
    """``group_std``: reward minus the group's mean, divided by the group's standard deviation (GRPO). ``group_mean``:
    without the division (Dr.GRPO). ``leave_one_out``: reward minus the mean of the siblings (RLOO). ``whitened``:
    reward to go per token, whitened over the whole batch (REINFORCE++). ``group_mean_whitened``: the group's mean is
    subtracted first. ``component_std``: each component of the reward minus its mean in the group, divided by its
    standard deviation there, weighted and summed up; a punishment for length is added without the division; the sums
    are divided by their root mean square over the batch (GDPO, arXiv 2601.05242). For sources with ``rewards``.
    ``turn_std``: for each turn of an episode, the rewards of this and all later turns, minus their mean in the group (0
    for siblings that had ended), divided by the root mean square of these distances; reward that no turn has earned
    counts for the last. ``history``: the value that ``group_std`` would give among seven siblings with the mean and
    standard deviation of earlier rewards, fixed before the sample began; for samples that are trained one by one
    (``rollout.unit``). It is below 2.475 for any rewards, and 0 before any reward is known."""
    advantage_eps: float | None = None
    """Added to the standard deviation that advantages are divided by; 1e-6 is just large enough to prevent 0/0."""
    advantage_ddof: int | None = None
    """1: divide by n - 1 in the standard deviation, as GRPO trainers do. 0: divide by n, as REINFORCE++ does."""
    objective: Objective | None = None
    """``ppo_clip``: the clipped surrogate. ``cispo``: log-likelihood times the detached clipped ratio, so that every
    token keeps a gradient. ``reinforce``: plain log-likelihood times advantage, without a ratio."""
    ratio_level: RatioLevel | None = None
    """``token``: one ratio per token. ``sequence``: one geometric-mean ratio per sample (GSPO). ``sequence_token``: the
    same value with a gradient per token, for advantages that differ within a sample (GSPO-token)."""
    old: OldPolicy | None = None
    """Policy with which the ratio compares the trained policy. ``proximal``: the policy at the start of this step
    (decoupled PPO; ``correction`` then handles the distance to the data). ``rollout``: the recorded sampling log-probs
    (single-ratio form: stale tokens can be clipped before the first update)."""
    clip_low: float | None = None
    """The ratio is clipped from below at 1 - clip_low; 1 disables the lower clip."""
    clip_high: float | None = None
    """The ratio is clipped from above at 1 + clip_high; a value above clip_low is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Bounds the loss of a token with a negative advantage at this multiple of the advantage's magnitude; 0 disables
    it, 3 is usual."""
    aggregation: Aggregation | None = None
    """Rule that combines token losses into one number; every denominator is a count over the global batch."""
    correction: Correction | None = None
    """Weight of the loss of a token that was sampled by an older version, with rho = exp(proximal - rollout). ``tis``:
    rho truncated to ``correction_bounds`` (the default: keeps every token, bounded variance). ``mis``: rho if it
    lies within the bounds, 0 elsewhere (IcePop). ``mask_stale``: only tokens of the current version train. ``none``:
    stale tokens are treated as fresh; a warning and a metric say how many there are. The weight also multiplies the KL
    term, unless ``kl_estimator`` is ``*_unbiased``; a token of weight 0 has no KL term either."""
    correction_level: CorrectionLevel | None = None
    """Quantity that the bounds apply to. ``token``: rho of each token. ``sequence``: the product over the sample
    (unbiased without bounds; the variance makes it unusable for long responses). ``geometric``: the sample's geometric
    mean (used by the GSPO rows, as it is the level of their ratio). ``tis`` uses the bounded value as the weight;
    ``mis`` uses the token's own rho."""
    correction_bounds: Annotated[tuple[float, float] | None, UNBOUNDED] = None
    """(low, high) around 1. When left out: (0, 2) for ``tis``, (0.5, 5) for ``mis``."""
    guard: Annotated[tuple[float, float] | None, UNBOUNDED] = None
    """Drops whole samples whose geometric-mean rho lies outside (low, high): a length-neutral test for gross
    mismatch, in addition to any correction. Off when left out, because useful bounds depend on the learning rate and
    the kernels."""
    kl_coef: float | None = None
    """Weight of the KL term against the reference policy; with 0 no reference model is loaded."""
    kl_estimator: KlEstimator | None = None
    """With d = trainer - ref: ``k1`` = d (only in the reward), ``k2`` = d^2/2, ``k3`` = exp(-d) - 1 + d, ``k3_k2grad``:
    the value of k3 with the gradient of k2. ``*_unbiased``: multiplied by exp(trainer - rollout), whatever
    ``correction`` is, and therefore unbiased for stale tokens too (detached for k2); nothing bounds this ratio."""
    kl_in: KlIn | None = None
    """``loss``: a separate term next to the objective. ``reward``: subtracted from each token's reward
    (REINFORCE++)."""
    overlong_buffer: float | None = None
    """Final share of the response budget over which a soft penalty falls from 0 to -1 (DAPO; 0.2 is its 4096 of 20480
    tokens); 0 disables it. Of an episode, the observed tokens count too, as for the budget."""
    mask_truncated: bool | None = None
    """Do not train samples that were cut off by their token budget; they still count in the baseline and the
    denominators."""
    group_filter: GroupFilter | None = None
    """``zero_signal``: drop groups whose rewards are all equal and roll out others instead (DAPO's dynamic sampling).
    ``none``: train every group."""

    def __post_init__(self) -> None:
        resolve(self)


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Return the row that ``config`` names, with its overrides applied. Raises ``ValueError`` for an unknown name, a
    meaningless combination, or an override that would have no effect."""
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


def algorithm(
    name: str,
    *,
    reward_weights: Weights | None = None,
    turn_weights: Mapping[str, float] | None = None,
    **settings: Any,
) -> Algorithm:
    """Create an algorithm for a trainer.

    Args:
        name: a row of the table of algorithms, such as ``"grpo"`` or ``"dapo"``.
        reward_weights: for ``advantage="component_std"``, the weights of the rewards of each source, by their names.
        turn_weights: for ``advantage="turn_std"``, the weight of an environment's rewards by source; 1 for others.
        settings: overrides of the row's own values, by their names in the section ``[algorithm]`` of a run's config.

    Raises:
        ValueError: there is no such algorithm, or a value that cannot work or has no effect.

    Examples:
        >>> algorithm("grpo", clip_high=0.28).clip_high
        0.28
    """
    row = resolve(AlgorithmConfig(name=name, **settings))
    return replace(row, reward_weights=reward_weights or {}, turn_weights=turn_weights or {})


def _check_effect(row: Algorithm, given: frozenset[str]) -> None:
    """Refuse an override that has no effect because of the rest of the row."""
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
