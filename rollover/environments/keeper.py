"""Runs a piece of work in two processes: a worker that does it, and a keeper that outlives it and cleans up.

The work is users' code. It may fork, start programs, put them into sessions of their own, ignore signals, hang or die.
The keeper runs none of that code: it waits until the work ends by itself, until its own standard input is closed or
until its parent dies. Then it kills every process that the work started, directly or indirectly, and ends with the
work's exit code. Meanwhile it passes on what the work prints to standard error, up to ``_MOST_OUTPUT_BYTES``.

On Linux orphans among the descendants become the keeper's children ("child subreaper"), so none can escape. Elsewhere
only the work's own process group is killed.

No library does this: ``concurrent.futures`` and ``multiprocessing`` cannot stop a task that is late, Pebble kills the
worker but not the processes that it started, loky finds descendants only through living parents, and any process that
inherits the pipes of these libraries can answer over them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_SIGNALLED = 128
"""Added to the number of the signal that killed the work, as shells do."""
_CLEARING_S = 5.0
"""Seconds to wait for a process after SIGKILL; a process that remains hangs in the kernel."""
_MOST_OUTPUT_BYTES = 2**20
_CUT = b"\n(a process of yours has printed 1 MiB; what else it prints is dropped)\n"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def environment() -> dict[str, str]:
    """Return the environment variables of a process that does such work: it finds the same modules as this one and uses
    one thread, since there may be many such processes."""
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}


def keep(work: Callable[[], None]) -> NoReturn:
    """Run ``work`` in a child and, when it has ended, exit with its exit code. Needs a process without threads."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    woken, wakes = os.pipe()  # a signal writes its number here
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    printed, prints = os.pipe()
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(woken)
        os.close(wakes)
        os.close(printed)
        _do(work, keeper, prints)
    os.close(prints)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    output = _BoundedOutput(printed)
    code = _wait(worker, woken, output)
    _clear(worker)
    output.drain()
    os._exit(_SIGNALLED + signal.SIGKILL if code is None else code)


def limit_memory(gib: int | None) -> None:
    """Limit the addresses of this process, and of each that it starts."""
    if gib is not None:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = gib * 2**30 if most == resource.RLIM_INFINITY else min(gib * 2**30, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def describe_exit(code: int) -> str:
    """Describe how the work ended, given the exit code of its keeper: ``137`` is ``"was killed (SIGKILL); ..."``."""
    number = code - _SIGNALLED if code > _SIGNALLED else -code
    if number not in signal.valid_signals():
        return f"died (exit code {code})"
    names = {one.value: one.name for one in signal.Signals}
    memory = "; was it out of memory?" if number == signal.SIGKILL else ""
    return f"was killed ({names.get(number, f'signal {number}')}){memory}"


class _BoundedOutput:
    """Passes on what the work prints, or drops it, so that it never waits for a reader."""

    def __init__(self, source: int) -> None:
        os.set_blocking(source, False)
        self._source = source
        self._left = _MOST_OUTPUT_BYTES
        self.held = b""
        """Read, but not written yet."""

    @property
    def source(self) -> list[int]:
        """Return the descriptor to wait for, unless standard error must accept something first."""
        return [] if self.held or self._source < 0 else [self._source]

    def read(self) -> bool:
        """Read what there is, at most one block. Returns whether there was anything."""
        with suppress(BlockingIOError):
            block = os.read(self._source, 4096)
            if not block:
                self._source = -1
            self.held = block[: self._left]
            self._left -= len(self.held)
            if self.held and self._left == 0:
                self.held += _CUT
            return bool(block)
        return False

    def write(self) -> None:
        held, self.held = self.held, b""
        with suppress(OSError):  # nobody reads
            os.write(2, held)

    def drain(self) -> None:
        """Pass on what is left. Called when no process is left that could print more."""
        self.write()
        while self.source and self.read():
            self.write()


def _do(work: Callable[[], None], keeper: int, prints: int) -> NoReturn:
    """Run ``work`` as the child, in a process group of its own and with nothing to read on standard input."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)  # it died before the line above
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    os.close(prints)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # the frames above belong to the keeper and must not be returned to
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            with suppress(OSError, ValueError):  # its reader is gone, or the user's code has closed it
                sys.stdout.flush()
        finally:
            os._exit(code)


def _wait(worker: int, woken: int, output: _BoundedOutput) -> int | None:
    """Wait for the exit code of the work; ``None`` when the keeper must end first."""
    # Look before the first wait: the work may have ended before its signal had a handler.
    while (code := _reap(worker)) is None:
        ready, writable, _ = select.select([0, woken, *output.source], [2] if output.held else [], [])
        if writable:
            output.write()
        elif output.source and output.source[0] in ready:
            output.read()
        if 0 in ready or signal.SIGTERM in (os.read(woken, 4096) if woken in ready else b""):
            return _reap(worker)
    return code


def _reap(worker: int) -> int | None:
    """Reap the children that have ended. Returns the exit code of ``worker`` if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
    return code if code is None or code >= 0 else _SIGNALLED - code


def _clear(worker: int) -> None:
    """Kill the work's process group, then child after child: the children of a killed one become our own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    deadline_s = time.monotonic() + _CLEARING_S
    while time.monotonic() < deadline_s:
        _reap(worker)
        children = _children()
        if not children:
            return
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                os.kill(pid, signal.SIGKILL) if group == os.getpgid(0) else os.killpg(group, signal.SIGKILL)
        time.sleep(0.002)


def _children() -> list[int]:
    """List our children, including processes that have ended but are not reaped. Only works where there is /proc."""
    found, parent = [], str(os.getpid())
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name) state parent ...; the name may hold anything
            if place.read_text(errors="replace").rpartition(")")[2].split()[1] == parent:
                found.append(int(place.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
