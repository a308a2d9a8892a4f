"""Causal attention over packed rows, as an attention implementation of transformers.

Everything else in a decoder works token by token and takes a packed row as it is. Attention must not look
across samples: a dense block-diagonal mask would cost the square of the row's length, so samples of similar
length are gathered into blocks ``[S, L]``, attended causally without any mask, and scattered back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rollover.trainer.packing import PackedRow

PACKED_ATTENTION = "rollover_packed"
"""Value of ``attn_implementation`` for models that run packed rows, and only those."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed_row: PackedRow,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within samples. ``query [1, H, N, D]``, ``key`` and ``value [1, K, N, D]``; returns ``[1, N, H, D]``. If
    several ranks share the row, N counts the positions of this one."""
    rows: Sequence[Tensor] = [x[0].transpose(0, 1) for x in (query, key, value)]
    share = packed_row.share
    if share is not None:
        rows = share.whole_rows(rows)
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for positions_SL in packed_row.buckets:
        q, k, v = (x.index_select(0, positions_SL.view(-1)).unflatten(0, positions_SL.shape) for x in rows)
        block_SHLD = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(block_SHLD.transpose(1, 2).flatten(0, 1))
    output_NHD = torch.cat(outputs).index_select(0, packed_row.unpad_N)
    return (output_NHD if share is None else share.own_positions(output_NHD))[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask, since the packed row determines which positions attend to which."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
