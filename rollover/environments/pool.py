"""Runs a few scoring processes, each of which can be killed along with everything that it started.

Consumes jobs, produces replies; a job waits for a free process, then at most its deadline for the reply. A
process that is late, dies or whose caller is cancelled is killed and replaced when next needed. No more than
``size`` run at a time; they start on first use and end with ``close`` or with this process. A reply counts only for the
request with the same number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from rollover.environments.keeper import describe_exit, environment
from rollover.environments.rewards.base import RewardSpec
from rollover.errors import DataError, RewardError

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
"""Seconds that the keeper of a process has to clean up before it is killed itself."""
_LINE_LIMIT_BYTES = 2**20


class WorkerPool:
    """Runs jobs for rewards built from ``specs`` in up to ``size`` processes. Belongs to one event loop."""

    def __init__(self, specs: Sequence[RewardSpec], size: int) -> None:
        self._specs = tuple(specs)
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._closed = False

    @property
    def num_processes(self) -> int:
        """Return the number of processes that are alive now."""
        return len(self._workers)

    async def run(self, job: dict[str, Any], begin: Callable[[], float]) -> dict[str, Any]:
        """Run one job and return the worker's reply. ``begin`` is called when it is the job's turn; it returns the
        deadline in seconds, or raises what the caller receives.

        Raises ``TimeoutError`` after the deadline, ``RewardError`` when the process dies or cannot start, and
        ``DataError`` when it says that the rewards cannot be built.
        """
        async with self._slots:
            self._require_open()
            timeout_s = begin()
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                self._require_open()
                async with asyncio.timeout(timeout_s):
                    reply = await worker.ask(job)
            except BaseException:
                await self._discard(worker)
                raise
            self._idle.append(worker)
            return reply

    async def close(self) -> None:
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(self._discard(worker) for worker in tuple(self._workers)))

    async def _start(self) -> _Worker:
        try:
            worker = await _Worker.spawn()
        except OSError as error:  # too many processes or open files
            raise RewardError(f"a reward process cannot be started: {error.strerror}") from None
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.greet({"specs": [asdict(spec) for spec in self._specs]})
        except TimeoutError:
            await self._discard(worker)
            raise RewardError(f"a reward process was not ready after {_START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await self._discard(worker)
            raise
        return worker

    async def _discard(self, worker: _Worker) -> None:
        ending = worker.end()
        ending.add_done_callback(lambda _: self._workers.discard(worker))
        await asyncio.shield(ending)

    def _require_open(self) -> None:
        if self._closed:
            raise RewardError("scoring has ended")


class _Worker:
    """Holds one process, its keeper and the connection to it."""

    def __init__(
        self, keeper: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._keeper = keeper
        self._reader = reader
        self._writer = writer
        self._numbers = count()
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_LIMIT_BYTES)
            try:
                keeper = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "rollover.environments.worker",
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
        return cls(keeper, reader, writer)

    async def greet(self, message: dict[str, Any]) -> None:
        """Send the first message. Raises ``DataError`` when the worker refuses it."""
        reply = await self._exchange(message)
        if "error" in reply:
            raise DataError(reply["error"])

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        reply = await self._exchange({"id": number, **job})
        if (answered := reply.pop("id", None)) != number:
            raise RewardError(f"the reward process answered request {answered!r} when asked {number}")
        return reply

    def end(self) -> asyncio.Task[None]:
        """Start killing its processes; the task is done when they are gone. Later calls return the same task."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return self._ending

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        line = b""
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        except ConnectionError:
            pass
        except ValueError:  # a line without end
            raise _garbled() from None
        if self._ending is not None:
            raise RewardError("scoring has ended")
        if not line.endswith(b"\n"):
            raise RewardError(f"the reward process {describe_exit(await self._keeper.wait())}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise _garbled() from None
        if not isinstance(reply, dict):
            raise _garbled()
        return reply

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


def _garbled() -> RewardError:
    return RewardError("the reward process sent something other than replies; does the function write to its sockets?")
