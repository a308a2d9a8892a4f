"""AdamW whose moments of matrices have 8 bits: bitsandbytes computes the steps of these, PyTorch all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from rollover.errors import require

_BLOCK = 256
"""Values that share a scale, in bitsandbytes."""
_SMALLEST = 4096
"""Values of the smallest matrix whose moments have 8 bits."""
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
"""Names of the scales in the state of a quantised matrix: the largest absolute value in each block of a moment."""


def quantised(model: Any, trained: Iterable[Tensor]) -> set[Tensor]:
    """Return which of the trained parameters have moments of 8 bits: large matrices, but not the embedding. Most of its
    rows have no gradient in a step; their small moments, in a block with large ones, would become 0, and a
    division by them would move a weight far."""
    embedding = model.get_input_embeddings().weight
    return {p for p in trained if p.ndim >= 2 and p.numel() >= _SMALLEST and p is not embedding}


def scales_shape(parameter: Tensor) -> tuple[int]:
    """Return the shape of the scales of one moment."""
    return (-(-parameter.numel() // _BLOCK),)


def moment_bytes(trained: Collection[Tensor], in_8_bits: Collection[Tensor]) -> int:
    """Return the size of both moments of all trained parameters."""
    whole = sum(8 * p.numel() for p in trained if p not in in_8_bits)
    return whole + sum(2 * p.numel() + 8 * scales_shape(p)[0] for p in in_8_bits)


class AdamW8bit(AdamW):
    """Takes the steps of ``AdamW``, with moments of 8 bits for the parameters ``in_8_bits``.

    Example: of 7.6e9 parameters outside the embedding it keeps 15.5 GB of moments instead of 61 GB.
    """

    def __init__(self, in_8_bits: Collection[Tensor], groups: list[dict[str, Any]], **settings: Any) -> None:
        require("bitsandbytes", purpose='optimizer = "adamw_8bit"')
        from bitsandbytes import functional

        super().__init__(groups, **settings)
        self.in_8_bits = in_8_bits
        self._step_in_8_bits: Callable[..., Any] = functional.optimizer_update_8bit_blockwise
        self._maps = {is_signed: functional.create_dynamic_map(signed=is_signed) for is_signed in (True, False)}
        """The numbers that the 256 values of a moment stand for, of the first and of the second moment."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. ``closure`` is not supported."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [
            {**group, "params": [p for p in group["params"] if p not in self.in_8_bits]} for group in groups
        ]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for parameter in group["params"]:
                if parameter in self.in_8_bits and parameter.grad is not None:
                    self._step_of(parameter, group)

    @torch.no_grad()
    def _step_of(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment, scale in zip(("exp_avg", "exp_avg_sq"), SCALES, strict=True):
                state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[scale] = torch.zeros(scales_shape(parameter), device=parameter.device)
        state["step"] += 1
        assert parameter.grad is not None
        beta1, beta2 = group["betas"]
        first_map, second_map = (self._maps[is_signed].to(parameter.device) for is_signed in (True, False))
        self._step_in_8_bits(
            "adam",
            parameter.grad.contiguous(),
            parameter,
            state["exp_avg"],
            state["exp_avg_sq"],
            beta1,
            beta2,
            0.0,
            0.0,
            group["eps"],
            int(state["step"]),
            group["lr"],
            first_map,
            second_map,
            *(state[scale] for scale in SCALES),
            group["weight_decay"],
        )
