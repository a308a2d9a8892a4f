"""The host of a rank: an actor on a node of the cluster that starts the rank there and stands between it and the run.

It is the same rank as on one machine, in a process of its own, and the host passes on messages without reading them. So
it answers even while the rank computes, hangs or is stopped, and can say how it ended. It does not import PyTorch.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollover.cluster.files import SharedFiles
from rollover.trainer.rank_process import END_S, PROGRESS, exit_of, is_stopped, listening, start_rank
from rollover.trainer.staging import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host says this of itself first."""

    node_id: str
    address: str
    """Address of the node."""
    folder: Path
    """The folder of the rank on the node."""
    port: int
    descriptor: int | None
    """The number of the socket that listens at ``port``; only of rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The state of a rank."""

    progress: int
    """The amount of work it has done."""
    message: bytes | None
    """Its answer, pickled."""
    fate: str | None
    """A description of its end; ``None`` while it runs."""
    is_stopped: bool


class RankHost:
    """Starts one rank and speaks with it. Its methods are called from several threads."""

    def __init__(self) -> None:
        self._listener: Any = None
        self._staging: Staging | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._progress: NDArray[np.uint64] | None = None
        self._rank = 0
        self._reading = threading.Lock()

    def node(self) -> str:
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def prepare(self, *, size: int, listens: bool) -> HostFacts:
        """Make room for a rank among ``size``; listen for the others if it is the first."""
        import ray

        address = ray.util.get_node_ip_address()
        self._staging = Staging(0, fallback=Path(tempfile.gettempdir()))
        folder = self._staging.meeting()
        self._progress = np.memmap(folder / PROGRESS, dtype=np.uint64, mode="w+", shape=(size,))
        self._listener = listening(address) if listens else None
        return HostFacts(
            node_id=self.node(),
            address=address,
            folder=folder,
            port=0 if self._listener is None else self._listener.getsockname()[1],
            descriptor=None if self._listener is None else self._listener.fileno(),
        )

    def sees(self, files: SharedFiles) -> bool:
        return files.are_here()

    def start(self, rank: int, task: bytes) -> int:
        """Start the rank with its pickled task; return its process number. Ray keeps what it prints."""
        self._rank = rank
        passed = () if self._listener is None else (self._listener.fileno(),)
        self._popen, self._connection = start_rank(rank, None, passed=passed)
        if self._listener is not None:
            self._listener.close()  # the rank has it now
        with suppress(OSError):  # it has died: that is found out below
            self._connection.send_bytes(task)
        return self._popen.pid

    def tell(self, message: bytes) -> None:
        """Send the rank a pickled command."""
        assert self._connection is not None, "the rank was not started"
        with suppress(OSError):
            self._connection.send_bytes(message)

    def report(self, wait_s: float, progress: Sequence[int]) -> HostReport:
        """Return the rank's answer as soon as it is there, or what else is known after ``wait_s``.

        Args:
            progress: how much each rank has done, as far as the run knows; ranks name the slowest by it.
        """
        assert self._popen is not None and self._connection is not None and self._progress is not None
        for rank, count in enumerate(progress):
            if rank != self._rank:
                self._progress[rank] = count
        message, fate = None, None
        with self._reading:
            try:
                if self._connection.poll(wait_s):
                    message = self._connection.recv_bytes()
            except (EOFError, OSError):
                fate = exit_of(self._popen)
        return HostReport(
            progress=int(self._progress[self._rank]), message=message, fate=fate, is_stopped=is_stopped(self._popen.pid)
        )

    def end(self) -> None:
        """Kill the rank, even if it is stopped, and delete all that was laid down for it."""
        if self._popen is not None:
            self._popen.kill()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_S)
        if self._staging is not None:
            self._staging.close()
