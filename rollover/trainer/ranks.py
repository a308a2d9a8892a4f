"""The processes of a sharded trainer, as the process of the run sees them: started, asked, watched and ended.

What it keeps true: every wait has a deadline; of several failures the first is named, and by then no rank is left
running. The deadline is one of progress: ranks count what they do, and are given up when none of them does anything for
so long, however long a whole command takes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollover import errors
from rollover.errors import RolloverError
from rollover.trainer.messages import PROGRESS, Done, Failed, RankTask

_COLLECTIVE_MARGIN = 2.0
"""Collectives in a rank wait so many times longer than the process of the run, which can name whom they wait for."""
_POLL_S = 0.2
_START_S = 120.0
"""Importing PyTorch takes its time, and shows no progress."""
_GRACE_S = 3.0
"""After the first failure, others have so long to show that they came before it."""
_END_S = 10.0
"""A process that is not gone so long after SIGKILL hangs in the kernel and is left to it."""


def collective_timeout_s(timeout_s: float) -> float:
    """Return the deadline of each collective of ranks that are given up after ``timeout_s``.

    Example: 1200 s where ranks are given up after 600 s, and 240 s after 5 s, since they may start for 120 s.
    """
    return _COLLECTIVE_MARGIN * max(timeout_s, _START_S)


class RankLost(RolloverError, RuntimeError):
    """A rank that died, hangs, or failed in a way that nobody has foreseen; the others have been ended.

    Example: ``rank 1 of 2 was killed (SIGKILL) in step 7``
    """


@dataclass(slots=True)
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    connection: Connection
    answer: Done | Failed | None = None
    is_gone: bool = False
    """It has closed its end of the connection."""


class Ranks:
    """The processes of all ranks, from their start to their end.

    Args:
        task: of rank 0; the others are told the same, but for their rank and device.
        devices: of each rank.
        logs: the folder of ``trainer-rank-0.log`` and so on; without, the standard error of this process.

    Raises ``RankLost`` or the error of a rank that cannot load what it shall train.

    Example: ``Ranks(task, ["cpu", "cpu"], timeout_s=600.0).ask("step 7", "step", batch=path)`` returns two results.
    """

    def __init__(self, task: RankTask, devices: Sequence[str], *, timeout_s: float, logs: Path | None = None) -> None:
        self._timeout_s = timeout_s
        self._progress = np.memmap(task.folder / PROGRESS, dtype=np.uint64, mode="w+", shape=(len(devices),))
        self._processes: list[_Process] = []
        try:
            for rank, device in enumerate(devices):
                self._processes.append(_start(rank, logs))
                self._processes[-1].connection.send(replace(task, rank=rank, device=device))
            self.facts: dict[str, Any] = self._answers("loading")[0]
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise RankLost(f"a rank cannot be started: {error}") from error
            raise

    @property
    def size(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.popen.pid for process in self._processes]

    def ask(self, doing: str, command: str, **arguments: Any) -> list[Any]:
        """Have all ranks carry out a command, and return the result of each.

        Args:
            doing: what that is, for messages.

        Raises ``RankLost``, or the error that a rank has met; the ranks have been ended then.
        """
        try:
            for process in self._processes:
                process.answer = None
                with suppress(OSError):  # it has died: that is found out below
                    process.connection.send((command, arguments))
            return self._answers(doing)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill all ranks. Does nothing the second time."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.popen.kill()
        for process in processes:
            process.connection.close()
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(_END_S)

    def _answers(self, doing: str) -> list[Any]:
        seen, active_s = self._progress.copy(), time.monotonic()
        while waiting := [p for p in self._processes if p.answer is None and not p.is_gone]:
            if self._collect(waiting, _POLL_S):
                active_s = time.monotonic()
            if any(not isinstance(p.answer, Done | None) or p.is_gone for p in self._processes):
                self._fail(doing)
            if not np.array_equal(self._progress, seen):
                seen, active_s = self._progress.copy(), time.monotonic()
            elif time.monotonic() - active_s >= (limit_s := self._limit_s(doing, waiting)):
                raise RankLost(self._hanging(doing, waiting, limit_s))
        if any(not isinstance(p.answer, Done) for p in self._processes):
            self._fail(doing)
        return [p.answer.result for p in self._processes if isinstance(p.answer, Done)]

    def _limit_s(self, doing: str, waiting: Sequence[_Process]) -> float:
        """Return for how long ranks may show no progress: for longer while they start, unless one was stopped."""
        return self._timeout_s if doing != "loading" or _stopped(waiting) else max(self._timeout_s, _START_S)

    def _collect(self, waiting: Sequence[_Process], timeout_s: float) -> bool:
        """Take the answers that are there; wait a little for the first. Returns whether there were any."""
        ready = wait([p.connection for p in waiting], timeout_s)
        for process in waiting:
            if process.connection in ready:
                try:
                    process.answer = process.connection.recv()
                except (EOFError, OSError):
                    process.is_gone = True
        return bool(ready)

    def _fail(self, doing: str) -> None:
        """Raise for the first failure, once it is known which that is."""
        deadline_s = time.monotonic() + _GRACE_S
        while waiting := [p for p in self._processes if p.answer is None and not p.is_gone]:
            if (rest_s := deadline_s - time.monotonic()) <= 0 or self._found_first():
                break
            self._collect(waiting, min(rest_s, _POLL_S))
        died = [p for p in self._processes if p.is_gone and p.answer is None]
        if died:
            raise RankLost(f"rank {died[0].rank} of {self.size} {_exit_of(died[0].popen)} in {doing}")
        refusals = [(p, p.answer) for p in self._processes if isinstance(p.answer, Failed)]
        process, first = min(refusals, key=lambda pair: (pair[1].is_secondary, pair[1].at_s))
        if first.kind and not first.is_secondary:
            raise getattr(errors, first.kind)(first.message)
        raise RankLost(f"rank {process.rank} of {self.size} failed in {doing}: {first.message}")

    def _found_first(self) -> bool:
        """Say whether a failure is known that was certainly not caused by another."""
        foreseen = (p.answer for p in self._processes if isinstance(p.answer, Failed))
        return any(p.is_gone and p.answer is None for p in self._processes) or any(
            answer.kind and not answer.is_secondary for answer in foreseen
        )

    def _hanging(self, doing: str, waiting: Sequence[_Process], limit_s: float) -> str:
        stopped = _stopped(waiting)
        least = min(self._progress[p.rank] for p in waiting)
        behind = [p for p in waiting if self._progress[p.rank] == least]
        names = ", ".join(f"rank {p.rank}" for p in stopped or behind)
        has = "it was stopped (SIGSTOP)" if stopped else "the others wait for it" if len(behind) == 1 else "they hang"
        return f"{names} of {self.size} did nothing for {limit_s:g} s (trainer.rank_timeout_s) in {doing}: {has}"


def _start(rank: int, logs: Path | None) -> _Process:
    ours, theirs = socket.socketpair()
    log: IO[bytes] | None = None
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        log = (logs / f"trainer-rank-{rank}.log").open("ab")
    try:
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-m", "rollover.trainer.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,
                stderr=None if log is None else log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
    except BaseException:
        ours.close()
        raise
    finally:
        if log is not None:
            log.close()
    return _Process(rank, popen, Connection(ours.detach()))


def _exit_of(popen: subprocess.Popen[bytes]) -> str:
    try:
        code = popen.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"ended (exit code {code})"
    return f"was killed ({signal.Signals(-code).name})" + ("; was it out of memory?" if code == -9 else "")


def _stopped(processes: Sequence[_Process]) -> list[_Process]:
    return [p for p in processes if _state(p.popen.pid) in ("T", "t")]


def _state(pid: int) -> str:
    """Return the state of a process as Linux writes it: "T" for one that is stopped; "" where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
