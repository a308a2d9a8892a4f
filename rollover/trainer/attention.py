"""Causal attention over packed rows, as an attention implementation of transformers.

Everything else in a decoder works token by token and takes a packed row as it is. Attention must not look
across samples: a dense block-diagonal mask would cost the square of the row's length, so samples of similar
length are gathered into blocks ``[S, L]``, attended causally, and scattered back. A mask is used only for layers that
see less than the whole past (sliding windows, chunks), and it is the model's. Attention with other arguments than
transformers' usual ones (soft caps, sinks) is computed by the model's own eager function, block by block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from rollover.trainer.packing import PackedRow

PACKED_ATTENTION = "rollover_packed"
"""Value of ``attn_implementation`` for models that run packed rows, and only those."""


_USUAL = frozenset({"dropout", "is_causal", "position_ids", "sliding_window", "cache_position", "logits_to_keep"})
"""Arguments that change nothing here: windows are in the mask, and dropout is off."""


@dataclass(eq=False, slots=True)
class PackedMask:
    """Says which earlier positions of its sample a layer's query sees.

    Example: with a window of 2, ``block(3, query)`` is ``[[1, 0, 0], [1, 1, 0], [0, 1, 1]]``; without one it is None.
    """

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """transformers' function of the indices of batch, head, query and key."""
    _found: dict[int, Tensor | None] = field(default_factory=dict)

    def block(self, length: int, query: Tensor) -> Tensor | None:
        """Return the mask ``[L, L]`` of samples of this length; ``None`` if it is causal."""
        if length not in self._found:
            with unset_fake_temporarily():
                place_L, zero = torch.arange(length), torch.tensor(0)
                seen_LL = self.rule(zero, zero, place_L[:, None], place_L[None, :]).expand(length, length)
                is_causal = bool((seen_LL == torch.ones_like(seen_LL).tril()).all())
            if is_causal:
                self._found[length] = None
            elif isinstance(query, FakeTensor):  # its values do not matter
                self._found[length] = torch.empty(length, length, dtype=torch.bool, device=query.device)
            else:
                self._found[length] = seen_LL.to(query.device)
        return self._found[length]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | None,
    *,
    scaling: float,
    packed_row: PackedRow,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend within samples. ``query [1, H, N, D]``, ``key`` and ``value [1, K, N, D]``; returns ``[1, N, H, D]``. If
    several ranks share the row, N counts the positions of this one."""
    rows: Sequence[Tensor] = [x[0].transpose(0, 1) for x in (query, key, value)]
    share = packed_row.share
    if share is not None:
        rows = share.whole_rows(rows)
    grouped = query.shape[1] != key.shape[1]
    own = {k: v for k, v in arguments.items() if k not in _USUAL and v is not None and not isinstance(v, bool)}
    outputs = []
    for positions_SL in packed_row.buckets:
        q, k, v = (x.index_select(0, positions_SL.view(-1)).unflatten(0, positions_SL.shape) for x in rows)
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        length = positions_SL.shape[1]
        seen_LL = None if attention_mask is None else attention_mask.block(length, query)
        if own:
            outputs.append(_eager(module, heads, seen_LL, scaling, own).flatten(0, 1))
            continue
        block_SHLD = F.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], seen_LL, is_causal=seen_LL is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(block_SHLD.transpose(1, 2).flatten(0, 1))
    output_NHD = torch.cat(outputs).index_select(0, packed_row.unpad_N)
    return (output_NHD if share is None else share.own_positions(output_NHD))[None], None


def _eager(
    module: nn.Module, heads: Sequence[Tensor], seen_LL: Tensor | None, scaling: float, arguments: dict[str, Any]
) -> Tensor:
    """Attend as the model's own module does. Returns ``[S, L, H, D]``."""
    query = heads[0]
    length = query.shape[2]
    if seen_LL is None:
        seen_LL = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    mask_LL = torch.zeros_like(seen_LL, dtype=query.dtype).masked_fill(~seen_LL, torch.finfo(query.dtype).min)
    attend = sys.modules[type(module).__module__].eager_attention_forward
    output: Tensor = attend(module, *heads, mask_LL[None, None], scaling=scaling, dropout=0.0, **arguments)[0]
    return output


def _packed_mask(*, mask_function: Any, **_: Any) -> PackedMask | None:
    return None if mask_function is causal_mask_function else PackedMask(mask_function)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)
