"""The configs of all kinds of engines; ``open`` has a row for each of them too. Torch-free."""

from __future__ import annotations

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig

AnyEngineConfig = EmbeddedConfig | VLLMConfig | SGLangConfig | EmbeddedServerConfig
"""Configs are told apart by ``kind``; the first is used when it is left out."""
