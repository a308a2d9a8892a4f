"""Ranks of a fleet that start in a fraction of a second: forked from a server that has imported all that they need."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rollover.trainer.rank import serve
from rollover.trainer.ranks import _Process
from tests.trainer.rank_pool import fork_server


def start(rank: int, logs: Path | None, *, prepare: Callable[[int], None] | None = None) -> _Process:
    """Stands in for ``ranks._start``. ``prepare`` is called in the process with its rank, before all else."""
    assert logs is not None
    logs.mkdir(parents=True, exist_ok=True)
    context = fork_server()
    ours, theirs = multiprocessing.Pipe()
    first = None if prepare is None else partial(prepare, rank)
    given = (theirs, str(logs / f"trainer-rank-{rank}.log"), first)
    process = context.Process(target=_main, args=given, daemon=True)
    process.start()
    theirs.close()
    popen: Any = _Forked(process)
    return _Process(rank, popen, ours)


class _Forked:
    """A forked process with what ``Ranks`` uses of ``Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout_s)
        return self._process.exitcode


def _main(connection: Connection, log: str, first: Callable[[], None] | None) -> None:
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if first is not None:
        first()
    serve(connection)
