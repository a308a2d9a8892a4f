"""A program that runs a server and never outlives its parent: ``supervisor.py GRACE_S COMMAND...``, standard
library only.

The server runs in the supervisor's own process group. When the supervisor's standard input ends, because the parent
closed it or has died in whatever way, or when the server exits, the whole group is asked to stop and after
``GRACE_S`` seconds killed. What a server leaves behind (its workers) goes with it. A supervisor that is killed itself
takes the server along (Linux).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)
"""Looked up before any fork."""


def end_with_parent() -> None:
    """Have the system ask this process to stop when its parent dies; called between fork and exec."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(grace_s: float, command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN, which the server would inherit
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)
    except OSError as error:
        print(f"supervisor: {command[0]!r} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(127)
    while server.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    else:
        print(f"supervisor: the server exited with code {server.returncode}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGTERM)
    give_up_s = time.monotonic() + grace_s
    while server.poll() is None and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
