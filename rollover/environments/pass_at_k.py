"""Computes accuracy from rewards: pass@1, pass@k and their standard errors. Pure arithmetic.

Samples of one prompt are not independent, so each prompt is one observation: an estimate is the mean over
prompts and its standard error is the standard deviation over prompts divided by the root of their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Holds the rewards of the samples drawn for one prompt, and whether each solved it."""

    source: str
    prompt_id: str
    rewards: tuple[float, ...]
    solved: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """Holds a mean over prompts and its standard error."""

    mean: float
    standard_error: float | None
    """``None`` with fewer than two prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """Holds one line of the table: one dataset, or all of them together."""

    source: str
    num_prompts: int
    num_samples: int
    reward: MeanEstimate
    pass_at: Mapping[int, MeanEstimate]
    """pass@k by k."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Estimate without bias the chance that at least one of ``k`` samples solves the prompt:
    1 - C(n - c, k) / C(n, k), from c solved among n >= k (Chen et al. 2021,
    arXiv 2107.03374, section 2.1)."""
    if not 0 <= num_solved <= num_samples:
        raise ValueError(f"num_solved must lie in [0, {num_samples}], got {num_solved}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= {num_samples}, the number of samples per prompt")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def mean_over_prompts(values: Sequence[float]) -> MeanEstimate:
    """Compute the mean and its standard error, one value per prompt."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return MeanEstimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return MeanEstimate(mean, math.sqrt(variance / count))


def evaluate(prompts: Iterable[ScoredPrompt], ks: Mapping[str, Sequence[int]]) -> tuple[EvalRow, ...]:
    """Compute one row per source in order of appearance and, if there are several, a last row ``"all"`` over all
    prompts.

    ``ks`` gives the values of k for the pass@k of a source; the last row has the values that all sources have. Raises
    ``ValueError`` when there is no prompt, a prompt without samples, or one with fewer samples than some k.
    """
    by_source: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        if not prompt.rewards:
            raise ValueError(f"prompt {prompt.prompt_id} has no scored sample")
        by_source.setdefault(prompt.source, []).append(prompt)
    if not by_source:
        raise ValueError("there is no prompt to evaluate")
    rows = [_row(source, group, ks[source]) for source, group in by_source.items()]
    if len(rows) > 1:
        shared = set.intersection(*(set(ks[source]) for source in by_source))
        everything = [p for group in by_source.values() for p in group]
        rows.append(_row("all", everything, sorted(shared)))
    return tuple(rows)


def _row(name: str, prompts: Sequence[ScoredPrompt], ks: Sequence[int]) -> EvalRow:
    return EvalRow(
        source=name,
        num_prompts=len(prompts),
        num_samples=sum(len(p.rewards) for p in prompts),
        reward=mean_over_prompts([math.fsum(p.rewards) / len(p.rewards) for p in prompts]),
        pass_at={k: mean_over_prompts([pass_at_k(len(p.rewards), sum(p.solved), k) for p in prompts]) for k in ks},
    )
