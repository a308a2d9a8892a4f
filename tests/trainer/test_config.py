"""Settings of the trainer: what they may be, and what planners are told of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rollover.trainer.config import CheckpointConfig, LoraConfig, ScratchConfig, SFTConfig, TrainerConfig
from rollover.trainer.parallelism import unsupported


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (TrainerConfig, {"learning_rate": 0}, "learning_rate must be above 0, got 0"),
        (TrainerConfig, {"schedule": "linar"}, "schedule 'linar' is unknown; did you mean 'linear'"),
        (TrainerConfig, {"dtype": "bfloat"}, "dtype 'bfloat' is unknown; did you mean 'bfloat16'"),
        (TrainerConfig, {"mini_batches": 0}, "mini_batches must be at least 1, got 0"),
        (TrainerConfig, {"adam_beta2": 1.0}, r"adam_beta2 must be in \[0, 1\), got 1.0"),
        (TrainerConfig, {"offload": True, "lora": LoraConfig()}, r"for full training, and \[trainer.lora\] is set"),
        (SFTConfig, {"num_steps": 0}, "num_steps must be at least 1, got 0"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last must be at least 1, got 0"),
        (ScratchConfig, {"num_kv_heads": 3}, r"num_kv_heads must be a divisor of num_heads \(4\), got 3"),
        (ScratchConfig, {"hidden_size": 20}, r"hidden_size must be a multiple of 2 x num_heads \(4\), got 20"),
        (ScratchConfig, {"vocab_size": 200}, "vocab_size must be at least 258"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(config: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 1, 1, True), None),
        ((1, 1, 1, False), None),
        ((2, 2, 4, True), "only data parallelism, not tensor parallel 2 and pipeline parallel 4"),
        ((2, 1, 1, False), "instead of keeping it whole on each of 2 devices"),
    ],
)
def test_ways_to_divide_a_step_that_are_not_supported(shape: tuple[int, int, int, bool], reason: str | None) -> None:
    dp, tp, pp, sharded = shape
    found = unsupported(dp=dp, tp=tp, pp=pp, sharded=sharded)
    assert found is None if reason is None else found is not None and found.endswith(reason)


def test_the_trainers_settings_offer_no_other_parallelism() -> None:
    """A new way to divide a step must be added to ``unsupported`` too."""
    assert {f.name for f in fields(TrainerConfig) if "parallel" in f.name or "devices" in f.name} == {
        "context_parallel",
        "num_devices",
    }
