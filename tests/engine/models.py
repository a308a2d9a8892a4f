"""Tiny random Hugging Face models with a clear favourite among the next tokens, so that rounding flips
none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 64
EXPERTS: dict[str, Any] = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "num_hidden_layers": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe, a dense layer, a window": (
        "qwen3_moe",
        {**EXPERTS, **WINDOW, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2 with a window in one layer": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen3 with yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama with yarn's other keys": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 8}},
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3 with a window": ("smollm3", {**WINDOW, "no_rope_layers": [1, 0]}),
    "granite": ("granite", {**SCALES, "attention_bias": True}),
    "glm4": ("glm4", {}),
    "glm4 with yarn": ("glm4", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
}
"""Families beside Llama, Qwen2 and Qwen3, and what these have rarely: transformers' model type, and settings."""


def tiny_model(kind: str = "qwen3", *, seed: int = 0, sharpness: float = 8.0, **config: Any) -> PreTrainedModel:
    """``kind`` is transformers' model type; ``sharpness`` scales the logits."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8 if kind == "qwen2" else 16,  # Qwen2 has no other head size than hidden / heads
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | config))).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        model.lm_head.weight.mul_(sharpness)
    return model


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def greedy(model: Any, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """transformers' own continuation."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0
) -> list[float]:
    """``log_softmax(logits / temperature)`` at each response token, by transformers' forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    table = torch.log_softmax(logits / temperature, -1)
    return [float(row[token]) for row, token in zip(table, response, strict=True)]
