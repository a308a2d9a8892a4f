"""A small model with a tokenizer, as a real server loads it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollover.engine.logprob_check import Reference, check_prompts
from rollover.hf.companions import read_companions
from rollover.trainer.config import ScratchConfig
from rollover.trainer.models import open_model, save_model
from rollover.trainer.scratch import build_scratch_model, build_tokenizer

TOLERANCE = 1e-4
"""Between a server's log-probs and transformers', both float32; nats."""
SHAPE = ScratchConfig(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, max_position=512, tie_embeddings=False
)


def real_model(folder: Path, *, seed: int = 0, sharpness: float = 3.0, **shape: Any) -> Path:
    """``sharpness`` scales the last norm, so that the next token has favourites."""
    plain = folder.with_name(f"{folder.name}-plain")
    tokenizer = build_tokenizer(["the quick brown fox jumps over 12 lazy dogs"] * 4)
    build_scratch_model(plain, tokenizer, replace(SHAPE, **shape), seed=seed)
    model = open_model(plain)
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness)
    folder.mkdir(parents=True)
    save_model(model, folder, companions=read_companions(plain))
    return folder


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def spelling(folder: Path, ids: tuple[int, ...]) -> str:
    return str(_tokenizer(folder).decode(ids))


@functools.cache
def _transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(folder: Path, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float) -> list[float]:
    """By transformers' own forward pass."""
    with torch.no_grad():
        logits = _transformers_model(folder)(input_ids=torch.tensor([prompt + response])).logits
    table = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / temperature, -1)
    return [float(row[token]) for row, token in zip(table, response, strict=True)]


def reference(folder: Path) -> Reference:
    """What transformers says of the token after each of the proving prompts."""
    model = _transformers_model(folder)
    prompts = check_prompts(model.config.vocab_size, model.config.max_position_embeddings)
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts]
    return Reference(version=0, prompts=prompts, logits_PV=np.stack(rows))
