"""Inference servers as child processes: started, waited for, stopped, never left behind.

Invariants: a server ends with this process, however this process ends (see ``supervisor``); its output is
in a log file, whose end is part of every message about a server that did not come up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollover.engine.background import attempt
from rollover.engine.servers.config import ServerConfig
from rollover.errors import EngineError, EngineTimeout
from rollover.privacy import Redactor, make_private

_PROGRAM = Path(__file__).with_name("supervisor.py")
_TAIL_LINES = 25
_POLL_S = 0.5


class ServerProcess:
    """A server that runs as a child process. ``start`` may be called again after it has exited.

    Args:
        ready: raises ``EngineError`` while the server does not answer.
        env: added to this process's environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        ready: Callable[[], Awaitable[object]],
        config: ServerConfig,
    ) -> None:
        self._command = list(command)
        self._added_env = dict(env)
        self._log = log
        self._ready = ready
        self._start_timeout_s = config.launch_timeout_s
        self._stop_timeout_s = config.stop_timeout_s
        self._supervisor: asyncio.subprocess.Process | None = None

    @property
    def exited(self) -> bool:
        return self._supervisor is not None and self._supervisor.returncode is not None

    async def start(self) -> None:
        """Start it and return when it is ready.

        Raises ``EngineError`` when it exits before, ``EngineTimeout`` when it takes too long; it is stopped then.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        make_private(self._log)  # servers print their arguments
        with self._log.open("ab") as log:
            self._supervisor = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_PROGRAM),
                str(self._stop_timeout_s),
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._added_env},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._answers()
        except TimeoutError:
            await self.stop()
            raise EngineTimeout(
                f"the server did not answer within {self._start_timeout_s:g} s (engine.launch_timeout_s):"
                f" {self.story()}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ask it to stop, kill it if it does not; return when it is gone."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        if supervisor.stdin is not None:
            supervisor.stdin.close()
        await attempt(supervisor.wait(), self._stop_timeout_s + 5.0)
        with suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        await supervisor.wait()

    async def _answers(self) -> None:
        while True:
            try:
                await self._ready()
                return
            except EngineError:
                if self.exited:
                    raise EngineError(f"the server did not start: {self.story()}") from None
            await asyncio.sleep(_POLL_S)

    def story(self) -> str:
        """Return its command and the end of its log, without secrets."""
        redactor = Redactor({"launch_env": self._added_env}, self._command)
        lines = redactor.text(self._log.read_text(errors="replace")).splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f"{' '.join(redactor.value(self._command))}\nthe end of its log {self._log}:\n{tail}"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of one of this machine's addresses on which no program listens now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
