"""vLLM servers from a config."""

from __future__ import annotations

import math
import os
from pathlib import Path

from rollover.engine.kind import EngineSetup
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.open import ServerKind, open_servers
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.start.places import ServerProgram
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.dialect import VLLMDialect
from rollover.engine.servers.vllm.weights import served_rank
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.types import AdapterShape

SERVED_NAME = "policy"
_RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_MAX_CPU_CACHE_SHARE = 0.4
"""Largest share of the machine's memory for the caches of all servers that are started on it."""
_GIB = 2**30
_REMEDIES = {
    "Sleep mode is not supported": "engine.colocated = true needs a GPU: leave it out, and vLLM keeps its memory"
}


async def open_vllm(config: VLLMConfig, setup: EngineSetup) -> EnginePool:
    """See ``open_servers``."""
    model, adapters = ModelFolder.read(setup.folder), setup.adapters
    terms = WeightTerms(adapters=adapters, device=setup.device)

    def kind_for(config: VLLMConfig) -> ServerKind:
        return ServerKind(
            name="vLLM",
            dialect=lambda client: VLLMDialect(client, config, model, terms),
            program=ServerProgram(
                command=config.launch_command,
                arguments=lambda host, port: [
                    *launch_arguments(config, setup.folder, port, host),
                    *adapter_arguments(adapters),
                ],
                more=config.launch_args,
                env={**launch_environment(config, setup.folder), **({_RUNTIME_ADAPTERS: "1"} if adapters else {})},
                key_env="VLLM_API_KEY",
            ),
            remedies=_REMEDIES,
        )

    return await open_servers(config, setup, model, kind_for)


def launch_arguments(config: VLLMConfig, folder: Path, port: int, host: str = "127.0.0.1") -> list[str]:
    """Give the arguments with which a server serves ``folder`` for training; ``launch_args`` may overrule them."""
    return [
        *(() if "serve" in config.launch_command else ("--model",)),  # which the old entry point asks for
        str(folder.resolve()),
        *("--served-model-name", config.served_model or SERVED_NAME),
        *("--host", host, "--port", str(port)),
        *("--dtype", ModelFolder.read(folder).dtype or "auto"),  # "auto" would halve float32
        *("--max-num-seqs", str(config.running())),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--seed", str(port)),  # two servers must not draw the same noise
        "--enable-prompt-tokens-details",
        *(("--enable-sleep-mode",) if config.colocated else ()),
        *(("--weight-transfer-config", '{"backend": "nccl"}') if config.weight_transfer == "nccl" else ()),
    ]


def adapter_arguments(adapters: AdapterShape | None) -> list[str]:
    """Give the arguments for a server of adapters. Raises ``ConfigError`` for a rank that vLLM does not serve."""
    if adapters is None:
        return []
    return ["--enable-lora", "--max-lora-rank", str(served_rank(adapters.rank)), "--max-loras", "1"]


def launch_environment(config: VLLMConfig, folder: Path) -> dict[str, str]:
    """Return the environment of a server: it enables the control calls, and keeps a server that runs on the CPU from
    taking this machine for itself: by default it binds its threads to cores and claims nine tenths of the memory. On a
    GPU those two have no effect."""
    key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(_cpu_cache_gib(config, ModelFolder.read(folder))),
        "VLLM_MAX_STOP_STRINGS": "64",
        "VLLM_API_KEY": key,  # also without one: this process may have one for other servers
    }


def _cpu_cache_gib(config: VLLMConfig, model: ModelFolder) -> int:
    """Compute the cache that ``max_running`` samples of the longest context need, as far as there is memory."""
    bytes_per_number = 2 if model.dtype in ("bfloat16", "float16") else 4
    needed = config.running() * model.max_context_tokens * model.cache_numbers_per_token * bytes_per_number
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(math.ceil(needed / _GIB), int(_MAX_CPU_CACHE_SHARE * memory / config.num_servers / _GIB)))
