"""Ranks for tests: processes that have met, and call functions of tests on demand. Starting some takes seconds, so the
tests of a module share them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rollover.trainer.world import World

_DEADLINE_S = 120.0


class RankPool:
    """``size`` ranks over gloo. ``call(function, **arguments)`` calls ``function(world, **arguments)`` on each and
    returns what each returns."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((function, arguments))
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_DEADLINE_S):
                raise AssertionError(f"rank {rank} did not answer within {_DEADLINE_S:.0f} s")
            error, result = pickle.loads(connection.recv_bytes())
            if error is not None:
                raise AssertionError(f"rank {rank}: {error}")
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
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
