"""A process that runs users' code, seen from the run: it is started, gets messages, answers them, and is killed along
with everything that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from typing import Any

from rollover.environments.keeper import describe_exit, environment
from rollover.errors import DataError, RewardError

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
"""Seconds that the keeper of a process has to clean up before it is killed itself."""
_LINE_LIMIT_BYTES = 2**24


class Child:
    """Holds one process, its keeper and the connection to it. Messages are JSON, one per line."""

    def __init__(
        self, name: str, keeper: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._name = name
        self._keeper = keeper
        self._reader = reader
        self._writer = writer
        self._ending: asyncio.Task[None] | None = None
        self._unsent: list[str] = []

    @classmethod
    async def start(cls, module: str, greeting: dict[str, Any], name: str) -> Child:
        """Start a module, give it the first message and wait until it is ready. ``name`` is its name in messages.

        Raises ``RewardError`` when it cannot be started, and ``DataError`` when it refuses the message.
        """
        try:
            child = await cls._spawn(module, name)
        except OSError as error:  # too many processes or open files
            raise RewardError(f"a {name} cannot be started: {error.strerror}") from None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                child.send(greeting)
                reply = await child.receive()
            if "error" in reply:
                raise DataError(reply["error"])
        except TimeoutError:
            await child.end()
            raise RewardError(f"a {name} was not ready after {_START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await asyncio.shield(child.end())
            raise
        return child

    @classmethod
    async def _spawn(cls, module: str, name: str) -> Child:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_LIMIT_BYTES)
            try:
                keeper = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the working directory comes last
                    "-m",
                    module,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.PIPE,  # never written to: the keeper ends when it is closed
                    stdout=2,
                    env=environment(),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
            except BaseException:
                writer.close()
                raise
        return cls(name, keeper, reader, writer)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, with all others of this turn of the event loop. ``receive`` reports a process that is
        gone."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(json.dumps(message) + "\n")

    def _send_all(self) -> None:
        content, self._unsent = "".join(self._unsent), []
        if self._ending is None:
            self._writer.write(content.encode())

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises ``RewardError`` when the process has died, was ended, or sends something
        else."""
        line = b""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            pass
        except ValueError:  # a line without end
            raise self._garbled() from None
        if self._ending is not None:
            raise RewardError(f"the {self._name} was ended")
        if not line.endswith(b"\n"):
            raise RewardError(f"the {self._name} {describe_exit(await self._keeper.wait())}")
        try:
            message = json.loads(line)
        except ValueError:
            raise self._garbled() from None
        if not isinstance(message, dict):
            raise self._garbled()
        return message

    async def exit_code(self) -> int:
        """Wait until its work has ended, and return the exit code."""
        return await self._keeper.wait()

    def end(self) -> asyncio.Task[None]:
        """Start killing its processes; the task is done when they are gone. Later calls return the same task."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return self._ending

    async def _end(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._writer.transport.abort()  # unsent data no longer matters
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await self._keeper.wait()
                return
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()  # the process that it keeps dies with it

    def _garbled(self) -> RewardError:
        problem = "sent something other than replies; does the function write to its sockets?"
        return RewardError(f"the {self._name} {problem}")
