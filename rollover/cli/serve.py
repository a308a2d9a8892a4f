"""``rollover serve``."""

from __future__ import annotations

import asyncio
import os

import click

from rollover.cli.command import OVERRIDES, ConfiguredCommand
from rollover.errors import ConfigError, require
from rollover.privacy import Redactor
from rollover.run.signals import Stopped, handled, stop


class ServeCommand(ConfiguredCommand):
    """Takes the config keys of the embedded engine, not of a run."""

    examples = ("--max_running 64", "--kv_cache_bytes 4_294_967_296")

    def keys(self) -> list[str]:
        from dataclasses import fields

        from rollover.engine.embedded.config import EmbeddedConfig

        return [f.name for f in fields(EmbeddedConfig) if f.name not in _OF_A_RUN]


_OF_A_RUN = ("kind", "kv_on_update", "logprob_tolerance", "colocated")
"""Keys of the embedded engine that the run decides, whatever server it uses."""


@click.command("serve", cls=ServeCommand)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="Require of each request the key in this variable; by default that in ROLLOVER_API_KEY, if it is set.",
)
@click.pass_context
def command(ctx: click.Context, model: str, host: str, port: int, api_key_env: str | None) -> None:
    """Serve a model with the embedded engine, for runs on this machine or others.

    A run uses such servers with engine.kind = "embedded_server", and loads its own weights into them. MODEL is a folder
    or a name on the Hugging Face hub. Anyone who can reach the port can have any folder loaded: keep it on the loopback
    interface or a private network, or require a key.

    \b
    CUDA_VISIBLE_DEVICES=0 rollover serve Qwen/Qwen3-0.6B --port 8000 --max_context_tokens 4096
    CUDA_VISIBLE_DEVICES=1 rollover serve Qwen/Qwen3-0.6B --port 8001 --max_context_tokens 4096
    """
    require("torch", "safetensors", "starlette", "uvicorn", purpose=ctx.command_path)
    from rollover.engine.embedded.config import EmbeddedConfig
    from rollover.engine.servers.embedded.serve import EngineServer
    from rollover.hf.hub import resolve_model
    from rollover.settings.overrides import parse_overrides
    from rollover.settings.schema import build
    from rollover.settings.toml import Document

    config = build(EmbeddedConfig, Document(name="command line", data={}), parse_overrides(ctx.meta[OVERRIDES]))
    server = EngineServer((host, port), _key(api_key_env, ctx.find_object(Redactor)))
    signals: list[int] = []

    def on_signal(number: int) -> None:
        if signals or not server.is_running:
            stop(number)
        signals.append(number)
        server.stop()

    with handled(on_signal):
        asyncio.run(
            server.run(resolve_model(model), config, lambda url: click.echo(f"serving {model} on {url}", err=True))
        )
    if signals:
        raise Stopped(signals[0])


def _key(name: str | None, redactor: Redactor | None) -> str | None:
    """Read the API key, which messages never show. Raises ``ConfigError`` when the variable does not hold one."""
    from rollover.engine.servers.embedded.config import KEY_VARIABLE

    variable = name or KEY_VARIABLE
    key = os.environ.get(variable, "")
    if name is None and not key:
        return None
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            f"--api-key-env: the environment variable {variable} must hold the API key (printable characters, no spaces"
            " around it)"
        )
    if redactor is not None:
        redactor.value(key, "api_key")
    return key
