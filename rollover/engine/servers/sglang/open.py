"""SGLang servers from a config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollover.clock import Clock
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.open import ServerKind, open_servers
from rollover.engine.servers.pool import EnginePool
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.dialect import SGLangDialect
from rollover.engine.servers.sglang.router import worker_urls
from rollover.errors import EngineError


async def open_sglang(config: SGLangConfig, folder: Path, *, run: str, logs: Path, clock: Clock) -> EnginePool:
    """See ``open_servers``; routers among the urls are replaced by their workers."""
    if config.urls:
        workers = await _workers(config)
        if workers != config.urls and not isinstance(config.max_running, int):
            raise EngineError(
                "engine.max_running lists a number for each url, and one of the urls is a router of several servers:"
                " give one number for all, or the servers' own urls"
            )
        config = replace(config, urls=workers)
    model = ModelFolder.read(folder)
    kind = ServerKind(
        dialect=lambda client: SGLangDialect(client, config, model),
        arguments=lambda port: launch_arguments(config, folder, port),
        env={},
        health_path="/health",
        program="SGLang",
    )
    return await open_servers(config, kind, model, run=run, logs=logs, clock=clock)


async def _workers(config: SGLangConfig) -> tuple[str, ...]:
    clients = [HTTPClient(url, config) for url in config.urls]
    try:
        return await worker_urls(clients)
    finally:
        for client in clients:
            await client.close()


def launch_arguments(config: SGLangConfig, folder: Path, port: int) -> list[str]:
    """Give the arguments with which a server serves ``folder`` for training; ``launch_args`` may overrule them."""
    return [
        *("--model-path", str(folder.resolve())),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", ModelFolder.read(folder).dtype or "auto"),  # "auto" would halve float32
        *("--max-running-requests", str(config.running())),
        "--incremental-streaming-output",
        "--sleep-on-idle",
    ]
