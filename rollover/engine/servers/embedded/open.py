"""Servers of the embedded engine from a config."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.embedded.config import KEY_VARIABLE, EmbeddedServerConfig
from rollover.engine.servers.embedded.dialect import EmbeddedServerDialect
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.open import ServerKind, open_servers
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.start.places import ServerProgram
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.errors import require

OURS = ("rollover", "serve")
"""The command that stands for the program of this environment, which need not be on the path."""


async def open_embedded_servers(config: EmbeddedServerConfig, setup: EngineSetup) -> EnginePool:
    """See ``open_servers``."""
    model, terms = ModelFolder.read(setup.folder), WeightTerms(device=setup.device)
    if setup.longest_tokens is not None:
        config = config.fitted(setup.longest_tokens, model.max_context_tokens)

    def kind_for(config: EmbeddedServerConfig) -> ServerKind:
        return ServerKind(
            name="Rollover",
            dialect=lambda client: EmbeddedServerDialect(client, config, model, terms),
            program=ServerProgram(
                command=config.launch_command,
                arguments=lambda host, port: launch_arguments(config, setup.folder, port, host),
                more=config.launch_args,
                env={KEY_VARIABLE: os.environ.get(config.api_key_env, "") if config.api_key_env else ""},
                key_env=KEY_VARIABLE,
            ),
        )

    return await open_servers(with_program(config), setup, model, kind_for)


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
    engine = replace(engine, command_timeout_s=max(engine.command_timeout_s, config.load_timeout_s))
    changed = {f.name: value for f in fields(EmbeddedConfig) if (value := getattr(engine, f.name)) != f.default}
    return [
        str(folder.resolve()),
        *("--host", host, "--port", str(port)),
        *(part for key, value in changed.items() for part in (f"--{key}", str(value))),
    ]
