"""Ranks for tests: processes that have met, and call functions of tests on demand.

They are forked from a server that has imported PyTorch and all else that they need, and shared by the tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from rollover.trainer.world import World
from tests.speed import within

_DEADLINE_S = within(120.0)
_ROOT = Path(__file__).parents[2]


def fork_server() -> ForkServerContext:
    """Return the server, started if it is not there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with contextlib.chdir(_ROOT):  # where it finds what it imports
        forkserver.ensure_running()
    return context


class RankPool:
    """``size`` ranks over gloo. ``call(function, **arguments)`` calls ``function(world, **arguments)`` on each and
    returns what each returns. They are started by the first call, and by the next one after a call that failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def call(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send((function, arguments))
            return [self._answer(rank) for rank in range(self.size)]
        except BaseException:
            self.close()  # they may be in the middle of something
            raise

    def _start(self) -> None:
        context = fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = (rank, self.size, self._folder.name, theirs)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def _answer(self, rank: int) -> Any:
        connection = self._connections[rank]
        if not connection.poll(_DEADLINE_S):
            raise AssertionError(f"rank {rank} did not answer within {_DEADLINE_S:.0f} s")
        error, result = pickle.loads(connection.recv_bytes())
        if error is not None:
            raise AssertionError(f"rank {rank}: {error}")
        return result

    def close(self) -> None:
        processes, self._processes = self._processes, []
        connections, self._connections = self._connections, []
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, connection: Connection) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=timedelta(seconds=_DEADLINE_S))
    world = World(rank, size, mesh=init_device_mesh("cpu", (size,)))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = None, function(world, **arguments)
        except Exception:
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))  # tensors by value: the sender may end before they are read
