"""Servers of the embedded engine from a config."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path

from rollover.clock import Clock
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.embedded.config import KEY_VARIABLE, EmbeddedServerConfig
from rollover.engine.servers.embedded.dialect import EmbeddedServerDialect
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.open import ServerKind, open_servers
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.start.places import ServerPlaces
from rollover.engine.servers.weights.read_back import FolderDigests
from rollover.errors import require

OURS = ("rollover", "serve")
"""The command that stands for the program of this environment, which need not be on the path."""


async def open_embedded_servers(
    config: EmbeddedServerConfig,
    folder: Path,
    *,
    run: str,
    places: ServerPlaces,
    clock: Clock,
    device: str | None = None,
) -> EnginePool:
    """See ``open_servers``. Raises ``MissingExtra`` when servers cannot be started from this environment."""
    model, folders = ModelFolder.read(folder), FolderDigests()

    def kind_for(config: EmbeddedServerConfig) -> ServerKind:
        return ServerKind(
            dialect=lambda client: EmbeddedServerDialect(client, config, model, folders, device),
            arguments=lambda host, port: launch_arguments(config, folder, port, host),
            env={KEY_VARIABLE: os.environ.get(config.api_key_env, "") if config.api_key_env else ""},
            program="Rollover",
            key_env=KEY_VARIABLE,
        )

    return await open_servers(with_program(config), kind_for, model, run=run, places=places, clock=clock)


def with_program(config: EmbeddedServerConfig) -> EmbeddedServerConfig:
    """Name the program that starts servers by this interpreter, if the config leaves it out. Raises ``MissingExtra``
    when it lacks what a server needs."""
    if not config.launch or config.launch_command != OURS:
        return config
    require("torch", "safetensors", "starlette", "uvicorn", purpose="engine.kind 'embedded_server' with launch = true")
    return replace(config, launch_command=(sys.executable, "-m", *OURS))


def launch_arguments(config: EmbeddedServerConfig, folder: Path, port: int, host: str = "127.0.0.1") -> list[str]:
    """Give the arguments with which a server serves ``folder`` for training; ``launch_args`` may overrule them."""
    engine = config.embedded()
    changed = {f.name: value for f in fields(EmbeddedConfig) if (value := getattr(engine, f.name)) != f.default}
    return [
        str(folder.resolve()),
        *("--host", host, "--port", str(port)),
        *(part for key, value in changed.items() for part in (f"--{key}", str(value))),
    ]
