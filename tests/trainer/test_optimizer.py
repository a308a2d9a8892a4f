from __future__ import annotations

import pytest
import torch

from rollover.errors import RolloverError
from rollover.trainer.config import TrainerConfig
from rollover.trainer.optimizer import apply_gradients, build_optimizer, learning_rate
from tests.trainer.builders import make_model


def rates(num_steps: int, **settings: object) -> list[float]:
    config = TrainerConfig(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [round(learning_rate(config, step, num_steps), 4) for step in range(num_steps)]


def test_schedules_follow_their_formulas() -> None:
    assert rates(4) == [1, 1, 1, 1]
    assert rates(5, schedule="linear") == [1, 0.8, 0.6, 0.4, 0.2]
    assert rates(4, schedule="linear", final_lr_ratio=0.2) == [1, 0.8, 0.6, 0.4]
    assert rates(4, schedule="cosine") == [1, 0.8536, 0.5, 0.1464]
    assert rates(5, schedule="linear", warmup_steps=2) == [0.5, 1, 0.75, 0.5, 0.25]
    assert rates(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1]


def test_only_matrices_decay() -> None:
    model = make_model("qwen2")
    optimizer = build_optimizer(model, TrainerConfig(weight_decay=0.5, learning_rate=0.1, max_grad_norm=0))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-15)  # as good as none, beside Adam's epsilon
    apply_gradients(optimizer, TrainerConfig(weight_decay=0.5, max_grad_norm=0), 0.1)
    for name, p in model.named_parameters():
        factor = 1.0 if "norm" in name or "bias" in name else 1 - 0.1 * 0.5
        torch.testing.assert_close(p.detach(), before[name] * factor, msg=name)


def test_the_gradient_is_clipped_and_its_former_norm_is_returned() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    config = TrainerConfig(max_grad_norm=1.0)
    optimizer = build_optimizer(layer, config)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert apply_gradients(optimizer, config, 1e-3) == 5.0
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.6, 0.8]]))


def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_weights() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, TrainerConfig())
    layer.weight.grad = torch.tensor([[float("nan"), 1.0]])
    with pytest.raises(RolloverError, match=r"diverged.*lower trainer\.learning_rate \(now 1e-06\)"):
        apply_gradients(optimizer, TrainerConfig(), 1e-3)
    assert torch.equal(layer.weight, before)
