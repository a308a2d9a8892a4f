"""vLLM engines before scripted servers, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.dialect import VLLMDialect
from tests.engine.servers.kit import RUN, Kit
from tests.engine.servers.scripted_server import CONTEXT, VOCAB, ScriptedVLLM

Server = ScriptedVLLM


def label(version: int, run: str = RUN) -> str:
    """What the weights of a version are called on a server."""
    return f"rollover:{run}:{version}"


def model_folder(folder: Path, *, hidden: int = 4, vocab: int = VOCAB, **config: Any) -> Path:
    """A folder that looks like a model's, small enough to make for every test."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {
        "model.embed_tokens.weight": np.zeros((vocab, hidden), np.float32),
        "lm_head.weight": np.zeros((vocab, hidden), np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


_kit = Kit(VLLMConfig, VLLMDialect, ScriptedVLLM)
settings, engine_over, make_engine = _kit.settings, _kit.engine_over, _kit.make_engine
opened, serving, refused = _kit.opened, _kit.serving, _kit.refused
