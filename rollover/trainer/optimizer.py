"""One optimizer step: AdamW, the learning rate as a pure function of the step, the gradient clip."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from rollover.errors import RolloverError
from rollover.trainer.config import StepConfig
from rollover.trainer.eight_bits import AdamW8bit, quantised


def learning_rate(config: StepConfig, step: int, num_steps: int) -> float:
    """Compute the learning rate of step ``step`` (from 0) in a run of ``num_steps``: linear warm-up that reaches the
    peak at step ``warmup_steps - 1``, then the schedule, which would reach ``final_lr_ratio`` at step ``num_steps``."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    first = max(config.warmup_steps - 1, 0)
    progress = min((step - first) / max(num_steps - first, 1), 1.0)
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * remaining)


def build_optimizer(model: Any, config: StepConfig) -> AdamW:
    """Build AdamW over all parameters with a gradient; matrices decay, norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    make = AdamW if config.optimizer == "adamw" else partial(AdamW8bit, quantised(model, parameters))
    return make(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def apply_gradients(optimizer: AdamW, config: StepConfig, rate: float) -> float:
    """Clip, step with learning rate ``rate``, and return the gradient norm before the clip.

    A gradient that is exactly 0 takes no step: neither the momentum of earlier batches nor weight decay moves the
    weights because of a batch without information, and the optimizer's state stays as it was.

    Raises ``RolloverError`` when the norm is not finite, with the weights untouched, and when the step produced a
    weight that is not finite.
    """
    remedy = (
        f"start a new run, perhaps with a checkpoint as its model.path, with a lower {config.section}.learning_rate"
        f" (now {config.learning_rate:g})"
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    grad_norm = float(norm)
    if not math.isfinite(grad_norm):
        raise RolloverError(f"training diverged: the gradient norm is {grad_norm}; {remedy}")
    if grad_norm == 0:
        return grad_norm
    if config.max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    if not math.isfinite(float(torch.nn.utils.get_total_norm([p.detach() for p in parameters]))):
        raise RolloverError(
            f"training diverged: a step with learning rate {rate:g} made weights that are not finite; {remedy}"
        )
    return grad_norm
