"""Models with random weights and loads of requests, the same for every contender.

A load is a JSON file: model folder, dtype, prompts as token ids, how many tokens each request decodes (none ends
before), how many run at the same time. Contenders read it and print one JSON line (``contenders``).
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path

SHAPES: dict[str, dict[str, int]] = {
    "3M": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "28M": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "100M": {
        "vocab_size": 16384,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
"""Qwen3 architecture, heads of 64, tied embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    model: str
    dtype: str
    prompts: list[list[int]]
    num_new_tokens: list[int]
    max_running: int
    max_context_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


def read_load(path: str) -> Load:
    return Load(**json.loads(Path(path).read_text()))


def make_model(shape: str, folder: Path, dtype: str, seed: int = 0) -> Path:
    """A Hugging Face folder with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3",
        **SHAPES[shape],
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def lognormal_lengths(num: int, median: float, cap: int, seed: int = 0) -> list[int]:
    """``p99 = 10 x median``: the 0.99 quantile of the standard normal is 2.326."""
    rng, sigma = random.Random(seed), math.log(10) / 2.326
    return [max(1, min(cap, round(median * math.exp(sigma * rng.gauss(0, 1))))) for _ in range(num)]


def make_load(name: str, folder: Path, *, small: bool = False) -> Load:
    """``fixed``: 64 requests of 256 tokens; ``tail``: 512 requests of lognormal length over 64 slots; ``large``: 64
    requests of 64 tokens of the 100 M model in bfloat16. ``small`` shrinks all to try the benchmark out."""
    shape, dtype = ("100M", "bfloat16") if name == "large" else ("3M", "float32")
    lengths = {
        "fixed": [8] * 4 if small else [256] * 64,
        "tail": lognormal_lengths(12, 8, 60) if small else lognormal_lengths(512, 100, 1984),
        "large": [3] * 4 if small else [64] * 64,
    }[name]
    rng = random.Random(1)
    model = folder / shape
    if not model.exists():
        make_model(shape, model, dtype)
    return Load(
        name=name,
        model=str(model),
        dtype=dtype,
        prompts=[[rng.randrange(2, 2000) for _ in range(32)] for _ in lengths],
        num_new_tokens=lengths,
        max_running=64,
        max_context_tokens=2048,
    )
