"""Processes of ``rollover`` in the background, forked from a server that has imported all they need.

What is started again a few hundred times must start in a fraction of a second. A process writes what it says to a file
of its name, and dies with the tests however they end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from rollover import cli
from tests.runs import Cue, signal_at
from tests.swarm.chaos.clocks import follow_clock

_ROOT = Path(__file__).parents[3]
_PR_SET_PDEATHSIG = 1
_LOCK = threading.Lock()


@functools.cache
def _begun() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with contextlib.chdir(_ROOT):  # where the server finds what it imports
        forkserver.ensure_running()
    return context


def _server() -> multiprocessing.context.ForkServerContext:
    """Return the server, which is started once: all threads share its working directory."""
    with _LOCK:
        return _begun()


class Forked:
    """``rollover ARGV`` in a process of its own, in ``folder``.

    Args:
        kill_at: when the process kills itself with SIGKILL.
        tokens_per_s: what a worker's engine decodes at most; as fast as it can when left out. While there is a file
            ``NAME.halt`` in ``folder`` it decodes nothing.
        has_own_clock: its wall clock is what ``set_clocks`` makes it.
        namespace: the network namespace that it is in; its home is ``folder`` then.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        argv: Sequence[str],
        *,
        kill_at: Cue | None = None,
        tokens_per_s: float | None = None,
        has_own_clock: bool = False,
        namespace: str = "",
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        arguments = (str(folder), name, tuple(argv), kill_at, tokens_per_s, has_own_clock, namespace)
        self._process = _server().Process(target=_main, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        """As ``Popen`` has it: minus the signal, for a process that was killed; ``None`` while it runs."""
        return self._process.exitcode

    def send(self, number: int) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def last_words(self) -> str:
        return f"-- {self.name}: {self.exit_code}\n{self.log.read_text(errors='replace')[-3000:]}"


def _main(
    folder: str,
    name: str,
    argv: Sequence[str],
    kill_at: Cue | None,
    tokens_per_s: float | None,
    has_own_clock: bool,
    namespace: str,
) -> None:
    """The forked process."""
    import torch

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the server, which ends with the tests
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.chdir(folder)
    log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    if tokens_per_s is not None:
        from tests.swarm.chaos.throttle import throttle_workers

        throttle_workers(tokens_per_s, Path.cwd() / f"{name}.halt")
    if has_own_clock:
        follow_clock(Path.cwd())
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
        os.environ |= {"HOME": folder, "no_proxy": "*"}
    if kill_at is not None:
        signal_at(kill_at, [signal.SIGKILL])
    code = cli.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
