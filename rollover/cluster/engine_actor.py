"""An engine server's keeper on its node: starts the server's process there and watches it.

Ray ends the actor with the process of the run, and the server ends with the actor's process, however that ends.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollover.cluster.files import SharedFiles
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.start.launch import ServerProcess, free_port
from rollover.trainer.staging import clear_left_behind, held_folder

_MAX_LOG_BYTES = 1 << 18
"""Maximum number of bytes of the server's log in one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A server as its keeper sees it."""

    exited: bool
    story: str
    """The end of its log, for a message."""
    log: bytes
    """Its log from the caller's position on, or a part of it."""


class EngineKeeper:
    """Keeps one server, in a worker process of Ray on the node where it has its place."""

    def __init__(self, *, stop_timeout_s: float) -> None:
        self._config = ServerConfig(launch=True, stop_timeout_s=stop_timeout_s)
        root = Path(tempfile.gettempdir())
        clear_left_behind(root)
        self._folder, self._lock = held_folder(root)
        self._log = self._folder / "server.log"
        self._process: ServerProcess | None = None

    async def where(self) -> str:
        """Return the node's address within the cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def port(self) -> int:
        """Return a port of that address that is free."""
        import ray

        return free_port(ray.util.get_node_ip_address())

    async def launch(self, command: Sequence[str], env: Mapping[str, str], *, python: str) -> None:
        """Start the server. Whether it comes up is for others to see.

        Args:
            python: the caller's interpreter; if it is the command, this node's command is meant.
        """
        if command[0] == python:
            command = [sys.executable, *command[1:]]
        self._process = ServerProcess(command, env=env, log=self._log, ready=_at_once, config=self._config)
        await self._process.start()

    async def look(self, log_from: int) -> Look:
        process = self._process
        exited = process is not None and process.exited
        log = b""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(log_from)
            log = file.read(_MAX_LOG_BYTES)
        story = process.story() if process is not None and exited else ""
        return Look(exited=exited, story=story, log=log)

    async def sees(self, files: SharedFiles) -> bool:
        return files.are_here()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _at_once() -> None:
    """Take a process for started as soon as it exists."""
