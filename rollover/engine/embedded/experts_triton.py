"""Products of rows with the matrices of their experts, as a Triton kernel.

Sizes of the launch depend on the number of tokens alone: the rows of an expert are found on the device, so a recorded
launch serves whatever experts are chosen. Shapes as in ``experts``; N = T * K choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollover.engine.embedded.experts import Experts, weighted
from rollover.engine.embedded.ops import ExpertMatrices, TorchMatrix

_COLUMNS = 64
"""Columns that a program computes."""
_DEPTH = 32
"""Numbers of a row that are multiplied at a time."""


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x, weights, out, order, starts, in_size, out_size,
    SHARED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the products of an expert. Program (e, block of columns). Choice n reads row n // SHARED
    of x and writes row n of out; of a gated matrix, silu(gate) * value."""
    e, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = out_size * 2 if GATED else out_size
    matrix = weights + e * in_size * width
    end = tl.load(starts + e + 1)
    for first in range(tl.load(starts + e), end, ROWS):
        rows = first + tl.arange(0, ROWS)
        choices = tl.load(order + rows, mask=rows < end, other=0)
        sums, values = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, in_size, DEPTH):
            d = depth + tl.arange(0, DEPTH)
            mine = (rows[:, None] < end) & (d[None, :] < in_size)
            part = tl.load(x + (choices // SHARED)[:, None] * in_size + d[None, :], mask=mine, other=0.0)
            inside = (d[:, None] < in_size) & (c[None, :] < out_size)
            cells = matrix + d[:, None] * width + c[None, :]
            sums += tl.dot(part, tl.load(cells, mask=inside, other=0.0), input_precision="ieee")
            if GATED:
                values += tl.dot(part, tl.load(cells + out_size, mask=inside, other=0.0), input_precision="ieee")
        if GATED:
            sums = sums / (1 + tl.exp(-sums)) * values
        to = out + choices[:, None] * out_size + c[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=(rows[:, None] < end) & (c[None, :] < out_size))


def apply_with_triton(experts: Experts[TorchMatrix], x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Compute experts as ``experts.ApplyExperts`` says, without waiting for the device."""
    ids_N = ids_TK.reshape(-1)
    sorted_N, order_N = ids_N.sort(stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(experts.shape.num + 1, device=x_TH.device))
    inner_NF = _launch(experts.gate_up, x_TH, order_N, starts, experts.shape.intermediate_size, ids_TK.shape[1], True)
    outputs_NH = _launch(experts.down, inner_NF, order_N, starts, x_TH.shape[1], 1, False)
    return weighted(outputs_NH.view(*ids_TK.shape, -1), weights_TK)


def _launch(
    matrices: ExpertMatrices[TorchMatrix],
    x: Tensor,
    order_N: Tensor,
    starts: Tensor,
    out_size: int,
    shared: int,
    gated: bool,
) -> Tensor:
    assert matrices.stack_EIO is not None
    num = len(starts) - 1
    rows = 16 if len(order_N) <= 16 * num else 64
    out = x.new_empty(len(order_N), out_size)
    _products[num, triton.cdiv(out_size, _COLUMNS)](
        *(x.contiguous(), matrices.stack_EIO, out, order_N, starts, x.shape[1], out_size),
        **{"SHARED": shared, "GATED": gated, "ROWS": rows, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH},
    )
    return out
