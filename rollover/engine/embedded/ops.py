"""What the decoder computes between its matrix products, in PyTorch's operations."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Zhang & Sennrich, arXiv 1910.07467."""
        ...

    def silu_product(self, gate_up_TF: Tensor) -> Tensor:
        """``silu(gate) * up``, ``[T, F / 2]``, of the two halves."""
        ...


class TorchOps:
    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return unit_rms(x_TH, eps).mul_(weight_H)

    def silu_product(self, gate_up_TF: Tensor) -> Tensor:
        gate, up = gate_up_TF.chunk(2, -1)
        return F.silu(gate).mul_(up)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """``x`` over the root of the mean square of its last dimension."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # F.rms_norm takes three times as long on a CPU
    return x * (norm * norm).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
