"""A few processes that score, each of which can be killed.

Consumes jobs, produces replies; a job waits for a free process, then at most its deadline for the reply. A
process that is late, dies or whose caller is cancelled is killed and replaced when next needed. No more than
``size`` run at a time; they start on first use and end with ``close`` or with this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rollover.tasks.rewards import RewardError, RewardSpec

_START_TIMEOUT_S = 120.0
_LINE_LIMIT_BYTES = 2**24


class WorkerPool:
    """Runs jobs for rewards built from ``specs`` in up to ``size`` processes. Belongs to one event loop."""

    def __init__(self, specs: Sequence[RewardSpec], size: int) -> None:
        self._specs = tuple(specs)
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()

    @property
    def num_processes(self) -> int:
        """Processes alive now."""
        return len(self._workers)

    async def run(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The worker's reply. Raises ``TimeoutError`` past the deadline and ``RewardError`` when the process
        dies or cannot start."""
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await worker.ask(job)
            except BaseException:
                await self._discard(worker)
                raise
            self._idle.append(worker)
            return reply

    async def close(self) -> None:
        self._idle.clear()
        for worker in tuple(self._workers):
            await self._discard(worker)

    async def _start(self) -> _Worker:
        worker = await _Worker.spawn()
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                reply = await worker.ask({"specs": [spec.to_json() for spec in self._specs]})
        except TimeoutError:
            await self._discard(worker)
            raise RewardError(f"a reward process was not ready after {_START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await self._discard(worker)
            raise
        if "error" in reply:
            await self._discard(worker)
            raise RewardError(reply["error"])
        return worker

    async def _discard(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        await worker.kill()


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls) -> _Worker:
        # One thread each, since there are many; a session of its own, since Ctrl-C is the parent's to handle.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollover.tasks.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
                limit=_LINE_LIMIT_BYTES,
            )
        )

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            pass
        if not line.endswith(b"\n"):
            code = await self._process.wait()
            raise RewardError(f"the reward process died (exit code {code}); was it out of memory?")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def kill(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.returncode is None:
            self._process.kill()
        self._process.stdin.close()
        await self._process.stdout.read()
        await self._process.wait()
