"""Lays weights out in memory, and does the decoder's arithmetic in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


class Matrix(Protocol):
    """The weights of one or more linear maps with the same input, laid out as their owner multiplies best."""

    def fill(self, first_row: int, weights_OI: Tensor) -> None:
        """Copy ``[out, in]`` weights, as checkpoints have them, to the outputs from ``first_row`` on."""
        ...

    def read(self, first_row: int, num_rows: int) -> Tensor:
        """Give the weights ``[num_rows, in]`` of the outputs from ``first_row`` on, rounded as ``fill`` rounds them."""
        ...


M = TypeVar("M", bound=Matrix)


class Layout(Protocol[M]):
    """``weight_dtype`` is what weights are rounded to, ``dtype`` the number format of activations and cache.

    Example: ``TorchLayout(torch.bfloat16, device).matrix(1024, 4096)`` is a ``TorchMatrix`` for products of
    ``[T, 1024]`` that give ``[T, 4096]``.
    """

    weight_dtype: torch.dtype
    dtype: torch.dtype

    def matrix(self, in_size: int, out_size: int) -> M: ...

    def gated_matrix(self, in_size: int, out_size: int) -> M:
        """Make a matrix of ``out_size`` gates and, after them, as many numbers to be gated."""
        ...

    def tied_matrix(self, embedding_OI: Tensor) -> M:
        """Make the transposed embedding, kept equal to it by ``fill``."""
        ...

    def expert_matrices(self, num: int, in_size: int, out_size: int, *, gated: bool) -> ExpertMatrices[M]:
        """Make a matrix for each expert; ``gated`` as in ``gated_matrix``."""
        ...


class ExpertMatrices(Generic[M]):
    """The same matrix of every expert, filled as one: the outputs of one expert after the outputs of another."""

    def __init__(self, matrices: Sequence[M], num_rows: int, stack_EIO: Tensor | None = None) -> None:
        self.matrices, self._num_rows, self.stack_EIO = matrices, num_rows, stack_EIO

    def fill(self, first_row: int, weights_OI: Tensor) -> None:
        self.matrices[first_row // self._num_rows].fill(first_row % self._num_rows, weights_OI)

    def read(self, first_row: int, num_rows: int) -> Tensor:
        return self.matrices[first_row // self._num_rows].read(first_row % self._num_rows, num_rows)


class TorchMatrix:
    """Keeps weights as ``[in, out]``, which multiplies faster than ``[out, in]`` on a CPU."""

    def __init__(self, weights_IO: Tensor) -> None:
        self._weights_IO = weights_IO

    def fill(self, first_row: int, weights_OI: Tensor) -> None:
        self._weights_IO[:, first_row : first_row + len(weights_OI)].copy_(weights_OI.t())

    def read(self, first_row: int, num_rows: int) -> Tensor:
        return self._weights_IO[:, first_row : first_row + num_rows].t()

    def times(self, x_TI: Tensor) -> Tensor:
        """Compute ``[T, out]``, all outputs."""
        return torch.mm(x_TI, self._weights_IO)

    def float32_times(self, x_TI: Tensor) -> Tensor:
        """Compute ``times`` in float32, whatever the number format."""
        return torch.mm(x_TI.float(), self._weights_IO.float())

    def add_times(self, x_TI: Tensor, sum_TO: Tensor, scale: float) -> None:
        """Add ``scale * times(x)`` to ``sum`` in place."""
        sum_TO.addmm_(x_TI, self._weights_IO, alpha=scale)


class TorchLayout:
    """Keeps matrices as torch multiplies them fastest: inputs by outputs, in one number format."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.weight_dtype = self.dtype = dtype
        self._device = device

    def matrix(self, in_size: int, out_size: int) -> TorchMatrix:
        return TorchMatrix(torch.empty(in_size, out_size, dtype=self.dtype, device=self._device))

    def gated_matrix(self, in_size: int, out_size: int) -> TorchMatrix:
        return self.matrix(in_size, 2 * out_size)

    def tied_matrix(self, embedding_OI: Tensor) -> TorchMatrix:
        return TorchMatrix(embedding_OI.t())

    def expert_matrices(self, num: int, in_size: int, out_size: int, *, gated: bool) -> ExpertMatrices[TorchMatrix]:
        num_rows = 2 * out_size if gated else out_size
        stack_EIO = torch.empty(num, in_size, num_rows, dtype=self.dtype, device=self._device)
        return ExpertMatrices([TorchMatrix(weights_IO) for weights_IO in stack_EIO], num_rows, stack_EIO)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Number formats in which bits are compared, by their size in bytes."""


def same_bits(held: Tensor, given: Tensor) -> bool:
    """Say whether ``held`` is ``given``, rounded to its number format; this includes not-a-numbers and zeros of either
    sign."""
    integers = _INTEGERS[held.element_size()]
    given = given.to(held.device, held.dtype)
    return torch.equal(
        held.contiguous().view(integers), given.contiguous().view(integers)
    )  # strides cost five times it


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Divide ``x`` by the root of the mean square of its last dimension and multiply it by ``weight`` (Zhang &
    Sennrich, arXiv 1910.07467)."""
    if x_TH.is_cuda:
        return F.rms_norm(x_TH, x_TH.shape[-1:], weight_H, eps)
    return unit_rms(x_TH, eps).mul_(weight_H)


def silu_product(gate_up_TF: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[T, F / 2]``, of the two halves."""
    gate, up = gate_up_TF.chunk(2, -1)
    return F.silu(gate).mul_(up)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Divide ``x`` by the root of the mean square of its last dimension."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # F.rms_norm takes three times as long on a CPU
    return x * (norm * norm).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
