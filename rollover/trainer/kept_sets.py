"""Kept sets of response tokens as tensors: the tokens among which each one was drawn (``rollover.kept``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.kept_codec import decode_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSets:
    """The kept sets of T tokens, in compressed rows.

    Example: for tokens drawn from {3, 200}, from the whole vocabulary and from {7}, ``counts_T`` is ``(2, 0, 1)``,
    ``starts_T`` is ``(0, 2, 2)`` and ``ids_N`` is ``(3, 200, 7)``.
    """

    counts_T: Tensor
    """Sizes of the sets; 0 for the whole vocabulary."""
    starts_T: Tensor
    """Index of the first id of each set in ``ids_N``."""
    ids_N: Tensor
    """int32: there may be hundreds for each token."""

    @classmethod
    def of(cls, kept: Sequence[bytes], put: Callable[[NDArray[Any]], Tensor]) -> KeptSets:
        """Build the tensors, placed by ``put``."""
        counts_T, ids_N = decode_kept(kept)
        starts_T = np.cumsum(counts_T) - counts_T
        return cls(counts_T=put(counts_T), starts_T=put(starts_T), ids_N=put(ids_N.astype(np.int32)))

    def chosen(self, index_S: Tensor | slice) -> KeptSets:
        """Return the sets of some of the tokens."""
        return KeptSets(counts_T=self.counts_T[index_S], starts_T=self.starts_T[index_S], ids_N=self.ids_N)

    def left(self, logits_TV: Tensor) -> Tensor:
        """Return the logits of the kept tokens, ``[T, K]``, with minus infinity if a set has less than K."""
        longest = max(1, int(self.counts_T.max())) if len(self.counts_T) else 1
        columns_K = torch.arange(longest, device=logits_TV.device)
        is_in_TK = columns_K < self.counts_T[:, None]
        ids_TK = self.ids_N[(self.starts_T[:, None] + columns_K).where(is_in_TK, 0)].long()
        if bool((self.counts_T > 0).all()):
            return logits_TV.gather(1, ids_TK).masked_fill(~is_in_TK, -torch.inf)
        is_kept_TV = (self.counts_T == 0)[:, None].repeat(1, logits_TV.shape[1])
        rows_N = torch.arange(len(ids_TK), device=logits_TV.device)[:, None].expand_as(ids_TK)[is_in_TK]
        is_kept_TV[rows_N, ids_TK[is_in_TK]] = True
        return logits_TV.masked_fill(~is_kept_TV, -torch.inf)
