"""A small model with a tokenizer, as a real server loads it."""

from __future__ import annotations

from pathlib import Path

import torch

from rollover.trainer.config import ScratchConfig
from rollover.trainer.models import load_policy, save_model
from rollover.trainer.scratch import build_scratch_model, build_tokenizer

SHAPE = ScratchConfig(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, max_position=512)


def real_model(folder: Path, *, seed: int = 0, sharpness: float = 6.0) -> Path:
    """``sharpness`` scales the last norm, so that the next token has favourites."""
    plain = folder.with_name(f"{folder.name}-plain")
    tokenizer = build_tokenizer(["the quick brown fox jumps over 12 lazy dogs"] * 4)
    build_scratch_model(plain, tokenizer, SHAPE, seed=seed)
    model = load_policy(plain)
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness / 2)
    folder.mkdir(parents=True)
    save_model(model, folder, files_from=plain)
    return folder


def logprobs(folder: Path, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float) -> list[float]:
    """By transformers' own forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / temperature, -1)
    return [float(row[token]) for row, token in zip(table, response, strict=True)]
