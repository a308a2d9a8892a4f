"""Start servers on this machine, or wherever else they can be started for us.

A ``ServerProgram`` says what to run at an address; ``ServerPlaces`` find an address and run it there. A server that is
started again may come up at another address, to which its client has then moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.start.launch import ServerProcess, free_port

C = TypeVar("C", bound=ServerConfig)

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """The command that serves the model at a given address.

    Example: ``program.command_at("10.0.0.5", 8000)`` is ``["vllm", "serve", "/models/policy", "--host", "10.0.0.5",
    "--port", "8000"]``.
    """

    command: Sequence[str]
    arguments: Callable[[str, int], list[str]]
    """Arguments with which the command serves the model at an address of its machine and a port."""
    more: Sequence[str]
    """Further arguments, which may overrule those."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that its environment needs."""
    key_env: str | None = None
    """The environment variable from which it takes its API key; ``None`` if there is none."""

    def command_at(self, host: str, port: int) -> list[str]:
        """Return the whole command line; it holds no secret."""
        return [*self.command, *self.arguments(host, port), *self.more]


class StartedServer(Protocol):
    """Stands for a server that we start, and start again when it is gone."""

    @property
    def client(self) -> HTTPClient: ...

    async def start(self) -> None:
        """Return when ready. Raises ``EngineError`` if it exits, ``EngineTimeout`` if late; it is stopped then."""
        ...

    async def gone(self) -> bool:
        """Tell whether it has exited, with whatever weights it had. Returns within a deadline of its own."""
        ...

    async def stop(self) -> None:
        """Ask it to stop, kill it if it does not; return when it is gone."""
        ...


class ServerPlaces(Protocol):
    """Finds places for servers to be started."""

    def configs(self, config: C) -> Sequence[C]:
        """Return the config of each server, which may differ in ``max_running`` and ``launch_args``."""
        ...

    def server(self, number: int, program: ServerProgram, config: ServerConfig) -> StartedServer:
        """Return server ``number``, which is yet to be started."""
        ...


class ThisMachine:
    """Implements ``ServerPlaces``: child processes that listen on the loopback interface.

    Args:
        logs: the folder of their logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def configs(self, config: C) -> Sequence[C]:
        return [config] * config.num_servers

    def server(self, number: int, program: ServerProgram, config: ServerConfig) -> StartedServer:
        devices = {"CUDA_VISIBLE_DEVICES": config.launch_devices[number]} if config.launch_devices else {}
        program = replace(program, env={**program.env, **devices, **config.launch_env})
        return _ChildServer(program, config, self._logs / f"server-{number}.log")


class _ChildServer(ServerProcess):
    """Implements ``StartedServer``. It keeps its port when it is started again."""

    def __init__(self, program: ServerProgram, config: ServerConfig, log: Path) -> None:
        port = free_port()
        self.client = client = HTTPClient(f"http://{_LOOPBACK}:{port}", config)
        super().__init__(
            program.command_at(_LOOPBACK, port),
            env=program.env,
            log=log,
            ready=lambda: client.call("GET", "/health", timeout_s=config.health_timeout_s),
            config=config,
        )

    async def gone(self) -> bool:
        return self.exited
