"""A training step's demand, made from the response lengths that a user names.

Lengths are cut into buckets at quantiles, with the longest of each group and batch beside. A group is admitted and
consumed as one, so what holds it in flight is its longest response. Siblings that a record lacks repeat its others,
which makes the longest shorter than it is. A flat sample has no siblings and is taken as independent, which makes the
longest longer than it is if a prompt's difficulty is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollover.devices.records import LengthBucket, WorkloadSpec
from rollover.errors import DataError, PlanError
from rollover.workload.source import Lengths
from rollover.workload.trace import Trace

Floats = npt.NDArray[np.float64]

SAMPLED_PROMPTS = 2048
"""Groups whose lengths are cut into buckets."""
_MOST_SIBLINGS = 4096


def specify(name: str, lengths: Lengths, *, num_groups: int, group_size: int, **settings: Any) -> WorkloadSpec:
    """Take ``SAMPLED_PROMPTS`` groups of ``lengths`` and cut them into buckets. Those of a longer trace are spread over
    all of it, since prompts may be sorted and lengths grow during a run; its longest prompt and response are kept.

    ``settings`` are further fields of ``WorkloadSpec``. Raises ``PlanError`` if one is out of range.
    """
    _check({"num_groups": num_groups, "group_size": group_size, **settings})
    workload, recorded = lengths.workload(0), lengths.prompts if isinstance(lengths, Trace) else ()
    step = max(1.0, len(recorded) / SAMPLED_PROMPTS)
    drawn = [int(place * step) for place in range(SAMPLED_PROMPTS)]
    buckets = length_buckets(
        np.array([workload.group_lengths(index, group_size) for index in drawn]),
        group_size=group_size,
        num_groups=num_groups,
    )
    longest = max((n for prompt in recorded for n in prompt.lengths), default=0)
    prompts = [workload.prompt_tokens(index) for index in drawn]
    return WorkloadSpec(
        name=name,
        num_groups=num_groups,
        group_size=group_size,
        prompt_tokens=float(np.mean(prompts)),
        longest_prompt_tokens=max(*prompts, *(prompt.prompt_tokens for prompt in recorded)),
        buckets=(*buckets[:-1], replace(buckets[-1], max_tokens=max(longest, buckets[-1].max_tokens))),
        **settings,
    )


def _check(settings: Mapping[str, Any]) -> None:
    for key in ("num_groups", "group_size"):
        if settings[key] < 1:
            raise PlanError(f"{key} must be at least 1, got {settings[key]}")
    if settings["group_size"] > _MOST_SIBLINGS:
        raise PlanError(f"group_size must be at most {_MOST_SIBLINGS}, got {settings['group_size']}")
    for key in ("reward_s", "held_s", "pause_s"):
        if settings.get(key, 0.0) < 0:
            raise PlanError(f"{key} must be at least 0 seconds, got {settings[key]:g}")


# --- Length buckets ---------------------------------------------------------------------------------------------------


def length_buckets(
    lengths: Sequence[int] | npt.NDArray[np.integer] | Sequence[Sequence[int]],
    *,
    group_size: int,
    num_groups: int,
    num_buckets: int = 8,
) -> tuple[LengthBucket, ...]:
    """Sort ``lengths`` into buckets: all samples in one row (n,), or a row for each prompt's siblings (prompts,
    siblings).

    Shares are equal except at the long end, which is cut finer: each further bucket there has half the share. Lengths
    that fill several buckets share one. The longest of k is distributed as the k-th power of the lengths' distribution
    function; of rows of siblings, the longest of each row is taken as it is.
    """
    sample = np.asarray(lengths, dtype=np.float64)
    if sample.ndim not in (1, 2) or sample.size == 0:
        raise DataError("a length sample needs at least one response")
    if not np.all(np.isfinite(sample)) or sample.min() < 1:
        raise DataError(f"response lengths must be at least 1 token, got {sample.min():g}")
    flat = np.sort(sample, axis=None)
    edges = _edges(flat, num_buckets)
    if sample.ndim == 2 and sample.shape[1] > 1:
        longest = np.sort(sample.max(axis=1))
        of_group, of_batch = _of_longest(longest, edges, 1), _of_longest(longest, edges, num_groups)
    else:
        of_group = _of_longest(flat, edges, group_size)
        of_batch = _of_longest(flat, edges, group_size * num_groups)
    shares = _of_longest(flat, edges, 1)
    return tuple(
        LengthBucket(
            share=float(share),
            tokens=float(tokens),
            max_tokens=int(edge),
            group_share=float(group[0]),
            group_tokens=float(group[1]),
            batch_share=float(batch[0]),
            batch_tokens=float(batch[1]),
        )
        for edge, (share, tokens), group, batch in zip(edges, shares, of_group, of_batch, strict=True)
    )


def _edges(flat: Floats, num_buckets: int) -> Floats:
    """Return the longest length of each bucket: equal shares, the last one halved again and again."""
    even = max(1, num_buckets // 2)
    fractions = [(i + 1) / even for i in range(even - 1)]
    fractions += [1 - 1 / even / 2 ** (i + 1) for i in range(num_buckets - even)]
    ranks = [min(flat.size, max(1, round(fraction * flat.size))) - 1 for fraction in [*fractions, 1.0]]
    return np.unique(flat[ranks])


def _of_longest(flat: Floats, edges: Floats, count: int) -> list[tuple[float, float]]:
    """Return for each bucket the probability that the longest of ``count`` draws falls there, and its mean then."""
    ranks = np.arange(flat.size + 1) / flat.size
    probability = np.diff(ranks**count)
    buckets = []
    start = 0
    for edge in edges:
        end = int(np.searchsorted(flat, edge, side="right"))
        share = float(probability[start:end].sum())
        mean = float(probability[start:end] @ flat[start:end]) / share if share > 0 else float(edge)
        buckets.append((share, mean))
        start = end
    return buckets
