"""Moments of 8 bits: close to moments of 32 bits, where they are meant to be, and continued bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollover.errors import ModelError
from rollover.trainer.config import LoraConfig, SFTConfig, TrainerConfig
from rollover.trainer.memory import training_memory
from rollover.trainer.optimizer import apply_gradients, build_optimizer
from tests.trainer import builders
from tests.trainer.builders import assert_same, make_batch, make_folder, make_model, make_trainer
from tests.trainer.test_lone_rank import tensors

WIDE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
CONFIG = TrainerConfig(optimizer="adamw_8bit", learning_rate=1e-3, weight_decay=0.1, device="cpu")


def trained(config: TrainerConfig, num_steps: int = 20) -> dict[str, Tensor]:
    """Steps along random gradients; of the embedding, one row in twenty has one."""
    model = make_model("qwen3", **WIDE)
    optimizer, random = build_optimizer(model, config), torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for name, p in model.named_parameters():
            p.grad = 0.01 * torch.randn(p.shape, generator=random)
            if "embed" in name:
                p.grad *= torch.rand(len(p), 1, generator=random) < 0.05
        apply_gradients(optimizer, config, config.learning_rate)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_large_matrices_alone_have_8_bits_and_all_else_is_exact() -> None:
    found, expected, start = trained(CONFIG), trained(replace(CONFIG, optimizer="adamw")), make_model("qwen3", **WIDE)
    moved = {name for name in found if not torch.equal(found[name], expected[name])}
    large = {name for name, p in start.named_parameters() if p.ndim == 2 and p.numel() >= 4096}
    assert moved == large - {"model.embed_tokens.weight"} and "lm_head.weight" in moved
    for name, p in start.named_parameters():
        way = (expected[name] - p).norm()
        assert (found[name] - expected[name]).norm() < 0.03 * way, name
        assert (found[name] - expected[name]).abs().max() < 2 * CONFIG.learning_rate, name


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=64)], ids=["full", "adapters"])
def test_moments_of_8_bits_continue_bit_for_bit(tmp_path: Path, lora: LoraConfig | None) -> None:
    folder = make_folder(tmp_path / "policy", **WIDE)
    settings: dict[str, Any] = {"optimizer": "adamw_8bit", "lora": lora}
    whole = builders.trained(folder, 2, **settings)
    whole.save(tmp_path / "two")
    saved = tensors(tmp_path / "two")
    assert {t.dtype for name, t in saved.items() if ":exp_avg" in name} == {torch.uint8, torch.float32}
    again = make_trainer(folder, resume_from=tmp_path / "two", **settings)
    for trainer, name in ((whole, "whole"), (again, "again")):
        trainer.step(make_batch(step=2))
        trainer.save(tmp_path / name)
    assert_same(tensors(tmp_path / "again"), tensors(tmp_path / "whole"))
    with pytest.raises(ModelError, match=r"trainer\.optimizer = 'adamw_8bit', now it is 'adamw'"):
        make_trainer(folder, resume_from=tmp_path / "two", lora=lora)


@pytest.mark.parametrize("config", [TrainerConfig, SFTConfig])
@pytest.mark.parametrize("settings", [{"offload": True}, {"num_devices": 2}], ids=str)
def test_moments_of_8_bits_are_kept_where_the_weights_are_whole(config: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="trains on one device, with the weights there, and"):
        config(optimizer="adamw_8bit", **settings)


def test_the_estimate_counts_two_bytes_and_scales_of_large_matrices() -> None:
    model = make_model("qwen3", **WIDE)
    optimizer = build_optimizer(model, CONFIG)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    apply_gradients(optimizer, CONFIG, 1e-3)
    held = sum(t.nbytes for state in optimizer.state.values() for name, t in state.items() if name != "step")
    sizes = {"max_prompt_tokens": 4, "max_response_tokens": 8, "batch_samples": 4}
    assert training_memory(CONFIG, model.config.to_dict(), **sizes).optimizer == held
