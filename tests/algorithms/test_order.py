"""Of several batches trained from one collection, what their order by length does to the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from rollover.algorithms.registry import Aggregation
from tests.algorithms.batches import denominators, gradient, random_batch, row, take

LENGTHS = (40, 36, 30, 33, 6, 9, 5, 8, 3, 2, 4, 3, 28, 25, 31, 27)
"""Of eight groups of two."""
LONGEST_FIRST = ((0, 1, 6, 7), (2, 3, 4, 5))
MIXED = ((0, 2, 4, 6), (1, 3, 5, 7))


def summed(aggregation: str, batches: Sequence[Sequence[int]]) -> Tensor:
    """Gradient with respect to the log-prob of every token, summed over ``batches`` of groups."""
    pool = replace(random_batch(5, LENGTHS, num_groups=8), group_B=torch.arange(16) // 2)
    pool = replace(pool, loss_mask_T=torch.ones_like(pool.loss_mask_T))
    algorithm = row("grpo", aggregation=aggregation, correction="none")
    total_T = torch.zeros(len(pool.sample_T), dtype=torch.float64)
    for groups in batches:
        tokens, places_T = take(pool, [i for g in groups for i in (2 * g, 2 * g + 1)])
        tokens = replace(tokens, group_B=torch.arange(len(groups)).repeat_interleave(2))
        total_T = total_T.index_add(0, places_T, gradient(algorithm, tokens, denominators(tokens)))
    return total_T


@pytest.mark.parametrize("aggregation", sorted({*get_args(Aggregation)} - {"token-mean"}))
def test_order_is_irrelevant_if_responses_or_groups_weigh_the_same(aggregation: str) -> None:
    torch.testing.assert_close(summed(aggregation, LONGEST_FIRST), summed(aggregation, MIXED))


def test_a_token_mean_of_batches_by_length_favours_short_responses() -> None:
    """Exactly by the tokens of the batches: each token is divided by the tokens of its own batch."""
    ordered_T, mixed_T = summed("token-mean", LONGEST_FIRST), summed("token-mean", MIXED)
    assert torch.linalg.norm(ordered_T - mixed_T) > 0.3 * torch.linalg.norm(mixed_T)
    sample_T = torch.repeat_interleave(torch.arange(16), torch.tensor(LENGTHS))
    tokens = {g: sum(LENGTHS[2 * g : 2 * g + 2]) for g in range(8)}

    def size_of(batches: Sequence[Sequence[int]]) -> Tensor:
        found = {g: sum(tokens[k] for k in batch) for batch in batches for g in batch}
        return torch.tensor([found[int(i) // 2] for i in sample_T], dtype=torch.float64)

    torch.testing.assert_close(ordered_T * size_of(LONGEST_FIRST), mixed_T * size_of(MIXED))
    short_T = torch.tensor([LENGTHS[int(i)] < 10 for i in sample_T])
    assert ordered_T[short_T].abs().sum() > 3 * mixed_T[short_T].abs().sum()
