"""The signals that ask a process to end: Ctrl-C, a scheduler that takes the machine back, a terminal that closes.

They have the same effect here, and the exit code tells which it was, as in shells. One that was ignored when the
process began (``nohup``, a background job) stays ignored.
"""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ASKING_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end, and it has ended its work cleanly or had none to finish."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


@contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[None]:
    """Call ``handler`` with the number of each signal that arrives inside. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        handler(number)

    before = {n: signal.getsignal(n) for n in _ASKING_TO_END}
    for number, was in before.items():
        if was is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def stop(number: int) -> None:
    """Raise ``Stopped``. This is the handler for work that has nothing to finish."""
    raise Stopped(number)


def _leave_terminal() -> None:
    """Redirect output from a terminal that is gone to nowhere: writing to it is an error, which would end a process in
    mid-step that is to end cleanly."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
