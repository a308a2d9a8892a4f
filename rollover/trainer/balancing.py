"""Decides which rank trains which part of a batch: the same work for each, and the same number of passes.

A *family* is assigned whole: siblings that share a prompt, which a row of input positions holds once. The costliest
goes first, each to the rank with the least load so far (longest processing time first, Graham 1969: at most 4/3 of the
best possible load). Each rank packs its own into rows. All ranks then make the same number of passes, since every pass
of a sharded model needs all of them: a rank with fewer rows repeats its cheapest, and discards the result.

One family can cost more than a rank's fair share. So assignments are also tried in which families above some limits are
cut into pieces, each of which computes the prompt again, and the one whose busiest rank has the least to do is chosen.

Needs neither torch nor the other ranks: all compute the same assignment from the same batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollover.trainer.packing import TrainingSample, families, first_fit_decreasing, num_positions

_LIMITS = (math.inf, 1.0, 0.75, 0.5)
"""The limits that are tried for the cost of a piece of a family, in shares of a rank; with the first, families stay
whole."""

Row = tuple[tuple[int, ...], ...]
"""Families that share a row: the samples of each, by their index in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedRows:
    """The rows of one rank, the costliest first, and the padding up to the number of passes of the others."""

    rows: tuple[Row, ...]
    padding: Row
    num_padding: int

    def cost(self, samples: Sequence[TrainingSample], quadratic: float) -> float:
        """Return the total cost of its passes, including the cost of padding; see ``family_cost``."""
        own = sum(_row_cost(samples, row, quadratic) for row in self.rows)
        return own + self.num_padding * _row_cost(samples, self.padding, quadratic)


def family_cost(samples: Sequence[TrainingSample], family: Sequence[int], quadratic: float) -> float:
    """Return the cost of a pass over a family, in input positions: ``n + quadratic * sum of L^2`` for ``n`` positions
    and responses that reach back over ``L`` each, prompts included.

    Example: a decoder of width 4096 (see ``attention_share``) spends on one sequence of 16,384 tokens
    16384 + 16384^2 / 49152 = 21,845.
    """
    prompt = len(samples[family[0]].prompt_ids)
    lines = (prompt + len(samples[i].response_ids) - 1 for i in family)
    return num_positions(samples, family) + quadratic * sum(line**2 for line in lines)


def attention_share(hidden_size: int) -> float:
    """Return ``quadratic`` for a decoder: each layer has about 12 d^2 weights and so takes 24 d^2 operations per
    position, and causal attention over L positions takes 2 d L more for each."""
    return 1 / (12 * hidden_size)


def by_longest_first(costs: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign items of these costs. Returns for each rank the indices of its items, in the order in which it got them.

    Example: ``by_longest_first([5, 4, 3, 3, 3], 2)`` is ``((0, 3), (1, 2, 4))``, with loads of 8 and 10.
    """
    loads = [(0.0, rank) for rank in range(num_ranks)]
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        assigned[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return tuple(map(tuple, assigned))


def pieces(
    samples: Sequence[TrainingSample], family: tuple[int, ...], most: float, quadratic: float
) -> tuple[tuple[int, ...], ...]:
    """Cut a family into the fewest pieces that cost at most ``most`` each, with its prompt; or into single samples.

    Example: with ``quadratic = 0``, three responses of 11 tokens to a prompt of 20 cost 50; in two pieces they cost at
    most 40 each.
    """
    costs = [family_cost(samples, (i,), quadratic) for i in family]
    found: tuple[tuple[int, ...], ...] = (family,)
    for num in range(2, len(family) + 1):
        if all(family_cost(samples, piece, quadratic) <= most for piece in found):
            break
        found = tuple(tuple(family[i] for i in sorted(own)) for own in by_longest_first(costs, num) if own)
    return found


def assign_rows(
    samples: Sequence[TrainingSample], members: Sequence[int], *, budget: int, num_ranks: int, quadratic: float
) -> tuple[AssignedRows, ...]:
    """Assign ``members`` of a batch to ranks, packed into rows of at most ``budget`` input positions (a longer sample
    is a row of its own). There must be at least one member.

    Args:
        quadratic: see ``family_cost``.
    """
    whole = families(samples, members, budget)
    share = sum(family_cost(samples, family, quadratic) for family in whole) / num_ranks
    ways = [tuple(p for f in whole for p in pieces(samples, f, limit * share, quadratic)) for limit in _LIMITS]
    assignments = [_assign(samples, parts, budget, num_ranks, quadratic) for parts in dict.fromkeys(ways)]
    return min(assignments, key=lambda assigned: max(own.cost(samples, quadratic) for own in assigned))


def _assign(
    samples: Sequence[TrainingSample], parts: Sequence[tuple[int, ...]], budget: int, num_ranks: int, quadratic: float
) -> tuple[AssignedRows, ...]:
    packed = []
    for assigned in by_longest_first([family_cost(samples, part, quadratic) for part in parts], num_ranks):
        own = families(samples, [i for part in assigned for i in parts[part]], budget)  # reunites pieces of one family
        bins = first_fit_decreasing([num_positions(samples, part) for part in own], budget)
        rows = [tuple(own[i] for i in b) for b in bins]
        packed.append(sorted(rows, key=lambda row: -_row_cost(samples, row, quadratic)))
    num_passes = max(map(len, packed))
    cheapest = min((row for rows in packed for row in rows), key=lambda row: _row_cost(samples, row, quadratic))
    return tuple(
        AssignedRows(rows=tuple(rows), padding=cheapest, num_padding=num_passes - len(rows)) for rows in packed
    )


def _row_cost(samples: Sequence[TrainingSample], row: Row, quadratic: float) -> float:
    return sum(family_cost(samples, part, quadratic) for part in row)
