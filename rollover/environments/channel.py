"""Connects a reward process with the run: requests arrive at this end, and replies leave from it.

It belongs to one process: a forked child closes its copy, and programs that are started do not inherit it. A reply is
sent only over the socket that was opened here, whatever has happened to its descriptor since.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, NoReturn

LOST = 74
"""Exit code of a worker whose connection is lost: closed by other code, or left by its parent in the middle of a
message."""


class Channel:
    """Reads and writes JSON, one value per line, on the socket ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rb")
        self._process = os.getpid()
        self._identity = _identity(descriptor)
        os.register_at_fork(after_in_child=self._abandon)

    def receive(self) -> dict[str, Any]:
        """Wait for the next request. Ends the process when no more will come."""
        self._check()
        try:
            line = self._lines.readline()
        except OSError:
            _lose()
        if not line:
            os._exit(0)
        if not line.endswith(b"\n"):
            _lose()
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: dict[str, Any]) -> None:
        self._check()
        content = json.dumps(message).encode() + b"\n"
        try:
            self._socket.sendall(content)
        except OSError:
            _lose()

    def leave_in_a_child(self) -> None:
        """End the process if it is a forked child that has returned from the user's code: only its parent may
        answer."""
        if os.getpid() != self._process:
            os._exit(0)

    def _check(self) -> None:
        self.leave_in_a_child()
        if _identity(self._socket.fileno()) != self._identity:
            _lose()

    def _abandon(self) -> None:
        if _identity(self._socket.fileno()) == self._identity:
            os.close(self._socket.detach())


def _lose() -> NoReturn:
    os._exit(LOST)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        stat = os.fstat(descriptor)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
