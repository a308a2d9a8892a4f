"""vLLM servers from a config."""

from __future__ import annotations

import os
from pathlib import Path

from rollover.clock import Clock
from rollover.engine.http.open import ServerKind, open_servers
from rollover.engine.pool import EnginePool
from rollover.engine.vllm.config import VLLMConfig
from rollover.engine.vllm.engine import VLLMEngine

SERVED_NAME = "policy"


async def open_vllm(config: VLLMConfig, folder: Path, *, logs: Path, clock: Clock) -> EnginePool:
    """See ``open_servers``."""
    kind = ServerKind(
        engine=lambda client, process: VLLMEngine(client, config, folder, process=process),
        arguments=lambda port: launch_arguments(config, folder, port),
        env=_environment(config),
        health_path="/health",
    )
    return await open_servers(config, kind, folder, logs=logs, clock=clock)


def launch_arguments(config: VLLMConfig, folder: Path, port: int) -> list[str]:
    """What every server needs to serve ``folder`` for training; ``launch_args`` follow and may overrule."""
    return [
        *("--model", str(folder.resolve())),
        *("--served-model-name", config.served_model or SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-num-seqs", str(config.max_running)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--seed", str(port)),  # two servers must not draw the same noise
        "--enable-prompt-tokens-details",
    ]


def _environment(config: VLLMConfig) -> dict[str, str]:
    key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    return {"VLLM_SERVER_DEV_MODE": "1", **({"VLLM_API_KEY": key} if key else {})}
