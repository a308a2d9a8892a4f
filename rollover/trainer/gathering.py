"""Combines the results of the ranks for a batch: losses add up, and metrics merge as between micro-batches.

The drift compares tokens that were sampled with the weights at the start of the step and a cache of the same weights:
there, engine and trainer computed the same number, and differ only by rounding. A response with replayed routes counts
if all of it was sampled so: the trainer computes its older tokens with the experts of their versions, and the engine
computed them again with the weights of the newest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.algorithms.metrics import LossMetrics
from rollover.batch import Drift
from rollover.trainer.world import World
from rollover.types import Trajectory


def gathered_losses(world: World, losses: Sequence[Tensor], metrics: LossMetrics) -> tuple[float, LossMetrics]:
    """Return the loss and the metrics of a mini-batch, the same on all ranks, given this rank's share of them."""
    if world.size == 1:
        return float(sum(losses)), metrics
    own_K = _flat(sum(losses, torch.zeros((), device=metrics.maxima_3.device)), metrics)
    shares = [_of_flat(share_K, metrics) for share_K in world.gather(own_K, "losses")]
    return float(sum(loss for loss, _ in shares)), reduce(LossMetrics.merge, [part for _, part in shares])


def of_nothing(metrics: LossMetrics) -> LossMetrics:
    """Return the metrics of no tokens, in the form of ``metrics``: merged into others, they change nothing."""
    return replace(
        metrics,
        token_sums_L={name: torch.zeros_like(sums) for name, sums in metrics.token_sums_L.items()},
        sample_sums_2=torch.zeros_like(metrics.sample_sums_2),
        maxima_3=torch.zeros_like(metrics.maxima_3),
        log_weight_sums_2=torch.full_like(metrics.log_weight_sums_2, -math.inf),
        untrained_C=torch.zeros_like(metrics.untrained_C),
    )


def gathered_tokens(world: World, measured_KT: Tensor) -> Tensor:
    """Return what the ranks have measured at a batch's tokens in one tensor; NaN if none has. No two measure the
    same token."""
    if world.size == 1:
        return measured_KT
    known_2KT = torch.stack([measured_KT.nan_to_num(0.0), (~measured_KT.isnan()).double()])
    sum_KT, count_KT = world.sum(known_2KT, "measurements at tokens")
    return sum_KT.masked_fill(count_KT == 0, math.nan)


def _flat(loss: Tensor, metrics: LossMetrics) -> Tensor:
    return torch.cat([loss.double()[None], *_fields(metrics)])


def _of_flat(values_K: Tensor, like: LossMetrics) -> tuple[Tensor, LossMetrics]:
    """Invert ``_flat``, for metrics of the same form as ``like``."""
    loss, *parts = values_K.split([1, *(len(field) for field in _fields(like))])
    *columns, sample_sums_2, maxima_3, log_weight_sums_2, untrained_C = parts
    return loss[0], replace(
        like,
        token_sums_L=dict(zip(like.token_sums_L, columns, strict=True)),
        sample_sums_2=sample_sums_2,
        maxima_3=maxima_3,
        log_weight_sums_2=log_weight_sums_2,
        untrained_C=untrained_C,
    )


def _fields(metrics: LossMetrics) -> list[Tensor]:
    sums = [*metrics.token_sums_L.values(), metrics.sample_sums_2, metrics.maxima_3]
    return [*sums, metrics.log_weight_sums_2, metrics.untrained_C]


ENDS = (0, 16, 64, 256)
"""Numbers of tokens before the end of a response at which ranges begin, for entropies by position."""


def entropy_metrics(lengths_B: NDArray[np.int64], entropy_T: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean of the measured entropies, in nats, and by their distance from the end of the response:
    ``entropy/end_16`` is the mean over the tokens that 16 to 63 tokens follow.

    Args:
        entropy_T: of each token of the responses, one after the other; NaN if it was not measured, or is masked.
    """
    following_T = np.repeat(np.cumsum(lengths_B), lengths_B) - 1 - np.arange(len(entropy_T))
    range_T = np.where(np.isnan(entropy_T), -1, np.digitize(following_T, ENDS) - 1)
    found = {f"entropy/end_{first}": entropy_T[range_T == i] for i, first in enumerate(ENDS)}
    found["entropy"] = entropy_T[range_T >= 0]
    return {name: float(np.mean(values)) for name, values in found.items() if len(values)}


def measured_drift(
    trajectories: Sequence[Trajectory], distance_T: NDArray[np.float64], *, step: int
) -> dict[str, Drift]:
    """Return the drift of each engine that has such tokens.

    Args:
        distance_T: of each token, in the order of ``trajectories``; NaN if the trainer has not computed it under the
            weights at the start of the step.
    """
    by_engine: dict[str, list[NDArray[np.float64]]] = {}
    start = 0
    for trajectory in trajectories:
        is_replayed = any(segment.routes for segment in trajectory.segments)
        is_same = not is_replayed or trajectory.oldest_version == step
        for segment in trajectory.segments:
            end = start + len(segment.token_ids)
            if is_same and segment.policy_version == segment.kv_version == step:
                by_engine.setdefault(segment.engine, []).append(distance_T[start:end])
            start = end
    drift = {}
    for engine, parts in sorted(by_engine.items()):
        distances = np.concatenate(parts)
        if num_tokens := np.count_nonzero(~np.isnan(distances)):
            drift[engine] = Drift(int(num_tokens), float(np.nanmean(distances)))
    return drift
