"""Mixtures of experts in PyTorch's operations: a router chooses the experts of each token, and their outputs are added.

Shapes: T tokens, E experts, K experts per token, H hidden size, F inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from rollover.engine.embedded.ops import ExpertMatrices, M, TorchMatrix, silu_product
from rollover.hf.architecture import ExpertShape


@dataclass(slots=True)
class Experts(Generic[M]):
    """Holds the weights of the experts of a layer."""

    shape: ExpertShape
    router: M
    gate_up: ExpertMatrices[M]
    down: ExpertMatrices[M]


ApplyExperts = Callable[[Experts[TorchMatrix], Tensor, Tensor, Tensor], Tensor]
"""Computes the outputs ``[T, H]`` of experts, given them, their inputs ``[T, H]``, and weights and ids ``[T, K]`` of
the experts of each token."""


def choose(experts: Experts[TorchMatrix], x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights, float32, and ids of the experts of each token, ``[T, K]``, the best one first. Of equal scores,
    the lower id comes first: ``topk`` would take any. Routers compute in float32, as the trainer's do."""
    shape = experts.shape
    probs_TE = experts.router.float32_times(x_TH).softmax(-1)
    sorted_TE, ids_TE = probs_TE.sort(dim=-1, descending=True, stable=True)
    weights_TK = sorted_TE[:, : shape.per_token]
    if shape.is_normalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, ids_TE[:, : shape.per_token]


def apply_by_expert(experts: Experts[TorchMatrix], x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Compute one expert after the other, each for its tokens alone; waits for the device."""
    ids_N = ids_TK.reshape(-1)
    order_N = ids_N.argsort(stable=True)
    inputs_NH = x_TH[order_N // ids_TK.shape[1]]
    outputs_NH, start = torch.empty_like(inputs_NH), 0
    for expert, count in enumerate(torch.bincount(ids_N, minlength=experts.shape.num).tolist()):
        if count:
            part = slice(start, start + count)
            gated_TF = silu_product(experts.gate_up.matrices[expert].times(inputs_NH[part]))
            outputs_NH[order_N[part]] = experts.down.matrices[expert].times(gated_TF)
            start += count
    return weighted(outputs_NH.view(*ids_TK.shape, -1), weights_TK)


def apply_to_all(experts: Experts[TorchMatrix], x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Compute all experts for all tokens: more work, but its sizes do not depend on what was chosen."""
    assert experts.gate_up.stack_EIO is not None and experts.down.stack_EIO is not None
    outputs_ETH = silu_product(x_TH @ experts.gate_up.stack_EIO) @ experts.down.stack_EIO
    tokens_T1 = torch.arange(len(x_TH), device=x_TH.device).unsqueeze(1)
    return weighted(outputs_ETH[ids_TK, tokens_T1], weights_TK)


def weighted(outputs_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    return (outputs_TKH.float() * weights_TK.unsqueeze(2)).sum(1).to(outputs_TKH.dtype)
