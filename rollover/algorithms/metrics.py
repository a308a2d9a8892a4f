"""Statistics of a policy loss about its batch, as sums and maxima that merge exactly.

Merging the metrics of all micro-batches (and ranks) gives the metrics of the whole batch, whatever the split.
Everything stays on the device until ``finalize``, which synchronises once.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from rollover.algorithms.batch import TokenBatch, TokenLosses
from rollover.algorithms.corrections import CorrectionFactors
from rollover.algorithms.kl import k3
from rollover.algorithms.registry import OBJECTIVES, Algorithm
from rollover.batch import WasteCause

CAUSES = (
    WasteCause.MASKED_TRUNCATED,
    WasteCause.MASKED_STALE,
    WasteCause.REJECTED_WEIGHT,
    WasteCause.REJECTED_SAMPLE,
    WasteCause.ONLY_CHOICE,
    WasteCause.ZERO_ADVANTAGE,
)
"""Reasons, found in its data, why the loss has no gradient at a token. A token whose ratio is clipped counts as
trained, since training moved it to where the clip stops it."""


def untrained_causes(algorithm: Algorithm, tokens: TokenBatch, correction: CorrectionFactors) -> Tensor:
    """Return each token's index in ``CAUSES``, ``[T]``, or -1 if it is trained. Of several causes the first in this
    order counts: mask, guard, correction, only choice, advantage."""
    masked_T, rejected_T, guarded_T = tokens.loss_mask_T == 0, correction.rejected_T > 0, correction.guarded_T > 0
    by_correction = WasteCause.MASKED_STALE if algorithm.correction == "mask_stale" else WasteCause.REJECTED_WEIGHT
    causes_T = torch.full_like(tokens.sample_T, CAUSES.index(WasteCause.ZERO_ADVANTAGE))
    has_gradient_T = _has_gradient(algorithm, tokens, ~(masked_T | rejected_T))
    if tokens.is_only_choice_T is not None:
        causes_T[tokens.is_only_choice_T] = CAUSES.index(WasteCause.ONLY_CHOICE)
        has_gradient_T = has_gradient_T & ~tokens.is_only_choice_T
    causes_T[rejected_T] = CAUSES.index(by_correction)
    causes_T[guarded_T] = CAUSES.index(WasteCause.REJECTED_SAMPLE)
    causes_T[masked_T] = CAUSES.index(WasteCause.MASKED_TRUNCATED)
    return causes_T.masked_fill(has_gradient_T, -1)


def _has_gradient(algorithm: Algorithm, tokens: TokenBatch, admitted_T: Tensor) -> Tensor:
    """Return for each token ``[T]`` whether the loss has a slope at its log-prob. ``admitted_T``: neither masked nor
    rejected."""
    by_reward_T = admitted_T & (tokens.advantages_T != 0)
    if algorithm.ratio_level == "sequence" and OBJECTIVES[algorithm.objective].trains_ratio:
        # One ratio for the whole sample: each of its admitted tokens moves the loss of all the others.
        by_reward_B = tokens.sum_per_sample(by_reward_T.to(tokens.loss_mask_T.dtype)) > 0
        by_reward_T = admitted_T & by_reward_B[tokens.sample_T]
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        return admitted_T | by_reward_T
    return by_reward_T


LAGS = ("0", "1", "2", "3plus")
"""Bins of staleness, in policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Statistics of one or more micro-batches; float64. Ranks combine by sum, sum, max and log-sum-exp."""

    token_sums_L: dict[str, Tensor]
    """Quantities summed over the unmasked tokens, per lag bin; ``trained`` counts tokens with a gradient."""
    sample_sums_2: Tensor
    """Samples with a trained token, and how many of these have every trained token rejected."""
    maxima_3: Tensor
    """Ratio, importance weight, staleness."""
    log_weight_sums_2: Tensor
    """Log of the sums over samples of w and w squared, w the product of a sample's importance weights."""
    untrained_C: Tensor
    """Tokens without a gradient, by the causes of ``CAUSES``."""
    capped: bool
    """True if the clip caps weights and zeroes no gradient (``cispo``)."""
    uncorrected: bool
    """True if the algorithm trains stale tokens as fresh ones."""

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        tokens: TokenBatch,
        correction: CorrectionFactors,
        now: TokenLosses,
        start: TokenLosses,
    ) -> LossMetrics:
        mask_T, rho_T = tokens.loss_mask_T, correction.rho_T
        cause_T = untrained_causes(algorithm, tokens, correction)
        log_rho_T = tokens.proximal_logprobs_T - tokens.rollout_logprobs_T
        columns = {
            "tokens": torch.ones_like(rho_T),
            "trained": cause_T < 0,
            "surprise": -tokens.trainer_logprobs_T,
            "ratio": now.ratio_T,
            "clip_low": now.low_T,
            "clip_high": now.high_T,
            "clip_dual": now.dual_T,
            "clip_at_start": start.low_T | start.high_T | start.dual_T,
            "is_weight": rho_T,
            "is_weight_squared": rho_T**2,
            "truncated": correction.truncated_T,
            "rejected": correction.rejected_T,
            "rollout_proximal_k1": -log_rho_T,
            "rollout_proximal_k3": k3(-log_rho_T),
            "proximal_k3": k3(tokens.proximal_logprobs_T - tokens.trainer_logprobs_T),
            "abs_advantage": tokens.advantages_T.abs(),
        }
        if tokens.ref_logprobs_T is not None:
            columns["ref_k3"] = k3(tokens.trainer_logprobs_T - tokens.ref_logprobs_T)
        values_TK = torch.stack([c.double() for c in columns.values()], dim=1) * mask_T.double()[:, None]
        lag_T = tokens.staleness_T.clamp(max=len(LAGS) - 1)
        trained_B = tokens.sum_per_sample(mask_T)
        kept_B = tokens.sum_per_sample(mask_T * (1 - correction.rejected_T))
        log_weight_B = correction.log_weight_B.double().masked_fill(trained_B == 0, -math.inf)
        sums_LK = values_TK.new_zeros(len(LAGS), len(columns)).index_add(0, lag_T, values_TK)
        return cls(
            token_sums_L=dict(zip(columns, sums_LK.unbind(1), strict=True)),
            sample_sums_2=torch.stack([trained_B > 0, (trained_B > 0) & (kept_B == 0)]).double().sum(1),
            maxima_3=torch.stack([x.double() * mask_T for x in (now.ratio_T, rho_T, tokens.staleness_T)]).amax(1),
            log_weight_sums_2=torch.stack([log_weight_B, 2 * log_weight_B]).logsumexp(1),
            untrained_C=torch.stack([(cause_T == i).sum() for i in range(len(CAUSES))]).double(),
            capped=algorithm.objective == "cispo",
            uncorrected=algorithm.ignores_staleness,
        )

    def merge(self, other: LossMetrics) -> LossMetrics:
        """Return the metrics of both parts together."""
        return LossMetrics(
            token_sums_L={name: sums_L + other.token_sums_L[name] for name, sums_L in self.token_sums_L.items()},
            sample_sums_2=self.sample_sums_2 + other.sample_sums_2,
            maxima_3=torch.maximum(self.maxima_3, other.maxima_3),
            log_weight_sums_2=torch.logaddexp(self.log_weight_sums_2, other.log_weight_sums_2),
            untrained_C=self.untrained_C + other.untrained_C,
            capped=self.capped,
            uncorrected=self.uncorrected,
        )

    def untrained(self) -> dict[WasteCause, int]:
        """Return the number of tokens without a gradient, by cause; causes without any are left out."""
        counts = zip(CAUSES, self.untrained_C.tolist(), strict=True)
        return {cause: int(count) for cause, count in counts if count}

    def finalize(self) -> dict[str, float]:
        """Compute means, shares and maxima by slash-separated name; ``lag_*`` names repeat some per staleness bin.

        ``clip/*`` are shares of tokens whose gradient the clip zeroes, ``cap/*`` of tokens whose weight it
        caps (CISPO). ESS is the effective share ``(sum w)^2 / (n sum w^2)`` before any bound. Warns when
        stale tokens were trained without correction: their ratio reads 1 and no other metric would show it.
        """
        parts = (*self.token_sums_L.values(), self.sample_sums_2, self.maxima_3, self.log_weight_sums_2)
        flat = iter(torch.cat(parts).tolist())
        by_name = {name: list(islice(flat, len(LAGS))) for name in self.token_sums_L}
        bins = [dict(zip(by_name, values, strict=True)) for values in zip(*by_name.values(), strict=True)]
        samples, samples_rejected, *maxima, log_w, log_w2 = flat
        total = {name: sum(values) for name, values in by_name.items()}
        stale = total["tokens"] - bins[0]["tokens"]
        clip = "cap" if self.capped else "clip"
        out = {
            "tokens/trained": total["trained"],
            "surprise": _share(total, "surprise"),
            "ratio/mean": _share(total, "ratio"),
            "ratio/max": maxima[0],
            f"{clip}/low": _share(total, "clip_low"),
            f"{clip}/high": _share(total, "clip_high"),
            f"{clip}/at_start": _share(total, "clip_at_start"),
            "is_weight/mean": _share(total, "is_weight"),
            "is_weight/max": maxima[1],
            "is_weight/truncated": _share(total, "truncated"),
            "is_weight/rejected": _share(total, "rejected"),
            "is_weight/rejected_samples": samples_rejected / max(samples, 1),
            "ess/token": _ess(total),
            "ess/sample": math.exp(2 * log_w - log_w2) / samples if samples else 0.0,
            "kl/rollout_proximal_k1": _share(total, "rollout_proximal_k1"),
            "kl/rollout_proximal_k3": _share(total, "rollout_proximal_k3"),
            "kl/proximal": _share(total, "proximal_k3"),
            "advantage/abs_mean": _share(total, "abs_advantage"),
            "staleness/off_policy_tokens": stale / max(total["tokens"], 1),
            "staleness/max": maxima[2],
        }
        if "ref_k3" in total:
            out["kl/ref"] = _share(total, "ref_k3")
        if not self.capped:
            out["clip/dual"] = _share(total, "clip_dual")
        for lag, sums in zip(LAGS, bins, strict=True):
            out[f"lag_{lag}/tokens"] = sums["tokens"]
            if not sums["tokens"]:
                continue
            out |= {
                f"lag_{lag}/is_weight": _share(sums, "is_weight"),
                f"lag_{lag}/truncated": _share(sums, "truncated"),
                f"lag_{lag}/rejected": _share(sums, "rejected"),
                f"lag_{lag}/ess": _ess(sums),
                f"lag_{lag}/abs_advantage": _share(sums, "abs_advantage"),
            }
        if self.uncorrected and stale:
            out["warning/stale_uncorrected"] = stale / total["tokens"]
            warnings.warn(
                "stale tokens are trained as if the current policy had sampled them (algorithm.correction is "
                "'none'); metric warning/stale_uncorrected has their share",
                stacklevel=2,
            )
        return out


def _share(sums: dict[str, float], name: str) -> float:
    return sums[name] / max(sums["tokens"], 1)


def _ess(sums: dict[str, float]) -> float:
    if not sums["tokens"]:
        return 0.0
    return sums["is_weight"] ** 2 / (sums["tokens"] * sums["is_weight_squared"])
