"""The process of one rank, from the viewpoint of the process that starts it. Needs no PyTorch, which the rank imports
itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

PROGRESS = "progress"
"""The file in the folder of the ranks that records how much each has done."""
END_S = 10.0
"""A process that still exists this long after SIGKILL hangs in the kernel and is left alone."""


def start_rank(
    rank: int, logs: Path | None, *, passed: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process of a rank, and return it with the connection over which it awaits its task.

    Args:
        passed: more descriptors that it inherits, under the same numbers.
    """
    ours, theirs = socket.socketpair()
    log: IO[bytes] | None = None
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        log = (logs / f"trainer-rank-{rank}.log").open("ab")
    try:
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollover.trainer.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,
                stderr=None if log is None else log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)},
                pass_fds=(theirs.fileno(), *passed),
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
    except BaseException:
        ours.close()
        raise
    finally:
        if log is not None:
            log.close()
    return popen, Connection(ours.detach())


def exit_of(popen: subprocess.Popen[bytes]) -> str:
    """Describe how a process that has closed its connection ended, as in "was killed (SIGTERM)"."""
    try:
        code = popen.wait(END_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"ended (exit code {code})"
    return f"was killed ({signal.Signals(-code).name}{', possibly out of memory' if code == -signal.SIGKILL else ''})"


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine was stopped (SIGSTOP), where Linux reports it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")


def listening(address: str) -> socket.socket:
    """Return a socket for rank 0 that listens at a free port of one address of this machine, and of no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)
