"""vLLM engines before scripted servers, in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.dialect import VLLMDialect
from rollover.engine.servers.weights.ownership import Ownership
from rollover.types import AdapterShape
from tests.engine.servers.scripted_server import CONTEXT, VOCAB, ScriptedTransport, ScriptedVLLM

RUN = "ours"
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


def settings(url: str = "http://one", **changes: Any) -> VLLMConfig:
    return replace(VLLMConfig(urls=(url,), stream_interval_tokens=1), **changes)


def engine_over(
    client: HTTPClient,
    config: VLLMConfig,
    folder: Path,
    ownership: Ownership | None = None,
    adapters: AdapterShape | None = None,
    device: str | None = None,
) -> ServerEngine:
    model = ModelFolder.read(folder)
    dialect = VLLMDialect(client, config, model, None, adapters, device)
    return ServerEngine(client, config, model, dialect, ownership=ownership or Ownership("any"))


def make_engine(
    server: ScriptedVLLM,
    folder: Path,
    url: str = "http://one",
    *,
    ownership: Ownership | None = None,
    adapters: AdapterShape | None = None,
    device: str | None = None,
    **changes: Any,
) -> ServerEngine:
    config = settings(url, **changes)
    client = HTTPClient(url, config, transport=ScriptedTransport({url.removeprefix("http://"): server}))
    return engine_over(client, config, folder, ownership or Ownership(RUN), adapters, device)


@asynccontextmanager
async def opened(server: ScriptedVLLM, folder: Path, **changes: Any) -> AsyncIterator[ServerEngine]:
    engine = make_engine(server, folder, **changes)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()
