"""The ranks of a sharded trainer as processes of this machine (``rank``), which the process of the run starts and ends.

They share memory: values too large for a message are in files there, and each rank counts its progress in one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rollover.trainer.config import StepConfig
from rollover.trainer.devices import rank_devices
from rollover.trainer.leading import LedRanks, RankLost, RankProcess
from rollover.trainer.messages import Done, Failed, RankTask
from rollover.trainer.rank_process import END_S, PROGRESS, exit_of, is_stopped, start_rank


@dataclass(slots=True)
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    connection: Connection
    answer: Done | Failed | None = None
    is_gone: bool = False
    """True if it has closed its end of the connection."""

    def fate(self) -> str:
        return exit_of(self.popen)

    def is_stopped(self) -> bool:
        return is_stopped(self.popen.pid)


class LocalLauncher:
    """Starts ranks on the devices of this machine. Implements ``RankLauncher``.

    Args:
        timeout_s: ranks that do nothing for this long are ended.
        logs: the folder of ``trainer-rank-0.log`` and so on; without it, output goes to the standard error of this
            process.

    Raises ``ConfigError`` for devices that do not exist.
    """

    is_remote = False

    def __init__(self, config: StepConfig, *, timeout_s: float, logs: Path | None = None) -> None:
        self.devices = rank_devices(config)
        self.num_threads = max(1, torch.get_num_threads() // len(self.devices))
        self._timeout_s = timeout_s
        self._logs = logs

    def launch(self, task: RankTask) -> LedRanks:
        """Implement ``RankLauncher.launch``."""
        return Ranks(task, self.devices, timeout_s=self._timeout_s, logs=self._logs)


class Ranks(LedRanks):
    """The processes of all ranks, from their start to their end.

    Args:
        task: of rank 0; the others get the same, except for their rank and device.
        devices: of each rank.
        logs: see ``LocalLauncher``.

    Raises ``RankLost`` or the error of a rank that cannot load its model.
    """

    def __init__(self, task: RankTask, devices: Sequence[str], *, timeout_s: float, logs: Path | None = None) -> None:
        super().__init__(task.folder, timeout_s=timeout_s)
        self._progress = np.memmap(task.folder / PROGRESS, dtype=np.uint64, mode="w+", shape=(len(devices),))
        self._processes: list[_Process] = []
        try:
            for rank, device in enumerate(devices):
                self._processes.append(_start(rank, logs))
                self._processes[-1].connection.send(replace(task, rank=rank, device=device))
            self.facts = self._answers("loading")[0]
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise RankLost(f"a rank cannot be started: {error}") from error
            raise

    @property
    def members(self) -> Sequence[RankProcess]:
        return self._processes

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    @property
    def progress(self) -> NDArray[np.uint64]:
        return self._progress

    def end(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.popen.kill()
        for process in processes:
            process.connection.close()
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, message: bytes) -> None:
        for process in self._processes:
            with suppress(OSError):  # it has died, which is noticed when its answer is awaited
                process.connection.send_bytes(message)

    def _collect(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        connections = {process.connection: process for process in self._processes if process in waiting}
        ready = wait([*connections], timeout_s)
        for connection, process in connections.items():
            if connection in ready:
                try:
                    process.answer = connection.recv()
                except (EOFError, OSError):
                    process.is_gone = True
        return bool(ready)


def _start(rank: int, logs: Path | None) -> _Process:
    popen, connection = start_rank(rank, logs)
    return _Process(rank, popen, connection)
