"""The kinds of engine whose servers are spoken to over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollover.engine.embedded.kind import check_embedded
from rollover.engine.kind import EngineFacts, EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from rollover.engine.servers.pool.pool import EnginePool


async def _open_vllm(config: VLLMConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.vllm.open import open_vllm

    return _opened(await open_vllm(config, setup), config)


async def _open_sglang(config: SGLangConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.sglang.open import open_sglang

    return _opened(await open_sglang(config, setup), config)


async def _open_embedded(config: EmbeddedServerConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.servers.embedded.open import open_embedded_servers

    return _opened(await open_embedded_servers(config, setup), config)


def _opened(pool: EnginePool, config: ServerConfig) -> OpenedEngine:
    sleeper = pool if config.colocated else None
    return OpenedEngine(engine=pool, weights=pool, trust=pool, sleeper=sleeper, until_up=pool.until_up)


def _check_servers(config: ServerConfig, facts: EngineFacts) -> Sequence[str]:
    """Return where on a cluster the servers will go. Raises ``ConfigError`` if weights cannot be sent to them, or the
    cluster has no room for them."""
    if config.weight_transfer == "nccl":
        _check_nccl(config, facts)
    return () if facts.places is None else facts.places(config)


def _check_nccl(config: ServerConfig, facts: EngineFacts) -> None:
    """Raise ``ConfigError`` if weights cannot be sent over NCCL.

    This process sends the first ones, even if the trainer's ranks on a cluster send the others, and NCCL refuses a
    group that has two members on one GPU.
    """
    from rollover.weights.groups import check_nccl

    try:
        check_nccl()
    except EngineError as error:
        raise ConfigError(str(error)) from None
    if config.colocated:
        raise ConfigError(
            "engine.weight_transfer 'nccl' connects different GPUs only, but with engine.colocated = true servers and"
            " trainer have the same ones: set engine.weight_transfer to 'folder'"
        )
    for number in range(config.num_servers if config.launch and facts.places is None else 0):
        if facts.sender in config.devices_of(number):
            raise ConfigError(
                f"engine.weight_transfer 'nccl' connects different GPUs only, but server {number} is started on"
                f" {facts.sender}, from which the trainer sends: give the servers other GPUs with"
                " engine.launch_devices, or set engine.weight_transfer to 'folder'"
            )


def _check_embedded_servers(config: EmbeddedServerConfig, facts: EngineFacts) -> Sequence[str]:
    from rollover.engine.servers.embedded.open import with_program

    lines = _check_servers(config, facts)
    if config.launch:
        check_embedded(with_program(config).embedded(), facts)
    return lines


VLLM = EngineKind(config=VLLMConfig, open=_open_vllm, preflight=_check_servers)
SGLANG = EngineKind(config=SGLangConfig, open=_open_sglang, preflight=_check_servers)
EMBEDDED_SERVERS = EngineKind(config=EmbeddedServerConfig, open=_open_embedded, preflight=_check_embedded_servers)
