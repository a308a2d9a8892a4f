"""Which tests run before every commit, and which are *deep*: they start processes or need seconds.

A test is deep if it asks for one of ``FIXTURES`` or is listed in ``deep.txt``: a folder, a file, a function or one set
of parameters a line. Any other test may start no process and may use no more than ``LIMIT_S`` of processor time, or it
fails with the remedy: so both lists stay true.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.speed import slowness

LIMIT_S = 2.0
"""Processor time of a test that is not deep, in seconds of the reference machine of ``tests/speed.py``."""
MARGIN = 1.5
"""A test fails over this many limits: tests beside it take the processor's caches, which does not slow ``speed.py``'s loop."""
BUSY = 1.5
"""Load of each core from which processor time is not held against a test: other processes take the caches all the time."""
TOOLS = frozenset({"git", "cc", "gcc", "c++", "uname", "fc-list"})
"""Programs that any test may start: a run asks git for its commit and the compiler for its kernels, and matplotlib,
which reasoning-gym imports, asks for fonts once on each machine."""

LIBRARIES = ("torch", "transformers", "reasoning_gym", "datasets", "trl")
"""Imports that take seconds: whichever test is first to need one has no limit."""
FIXTURES = frozenset({"cluster", "four", "lies", "marked", "processes", "three", "two"})
"""Fixtures that start processes: ranks, clusters, workers, runs that are killed."""
LONGEST = ("tests/cluster/", "tests/swarm/test_fault_table", "tests/swarm/test_chaos")
"""Deep tests that begin first, so that no process is left with them in the end."""
LISTED = frozenset(Path(__file__).with_name("deep.txt").read_text().splitlines())


def is_deep(test_id: str, fixtures: Iterable[str]) -> bool:
    """Return whether a test, by its id and the fixtures that it asks for, is deep."""
    file, _, name = test_id.partition("::")
    function, _, _ = name.partition("[")
    folders = accumulate(file.split("/"), "{}/{}".format)
    return bool(FIXTURES & {*fixtures}) or bool(LISTED & {*folders, f"{file}::{function}", test_id})


def group(test_id: str) -> str:
    """Return the name of the tests that run in one process of several: a file's, or all that share a Ray cluster."""
    return "cluster" if test_id.startswith("tests/cluster/") else test_id.partition("::")[0]


class Processes:
    """Records which programs this process starts."""

    def __init__(self) -> None:
        self.started: list[str] = []
        sys.addaudithook(self._heard)
        start = multiprocessing.process.BaseProcess.start

        def started(process: Any) -> None:
            self.started.append(process.name)
            start(process)

        multiprocessing.process.BaseProcess.start = started  # type: ignore[method-assign]

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.spawn"):
            self.started.append(os.path.basename(os.fspath(arguments[0])))
        elif event == "os.fork":
            self.started.append("a fork")

    @property
    def unwelcome(self) -> list[str]:
        return sorted({*self.started} - TOOLS)


@cache
def processes() -> Processes:
    return Processes()


class TooDeep(AssertionError):
    """A test that runs before every commit is too deep for it."""


@contextmanager
def shallow(test_id: str) -> Iterator[None]:
    """Raise ``TooDeep`` if what is done inside starts a process or uses too much processor time."""
    heard, missing = processes(), [name for name in LIBRARIES if name not in sys.modules]
    heard.started.clear()
    start_s = time.process_time()
    yield
    used_s = 0.0 if any(name in sys.modules for name in missing) else time.process_time() - start_s
    if heard.unwelcome:
        raise TooDeep(
            f"{test_id} starts {', '.join(heard.unwelcome)}, as deep tests alone may: ask for a fixture of"
            " tests/tiers.py:FIXTURES, or list it in tests/deep.txt"
        )
    is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    if used_s > MARGIN * LIMIT_S and used_s > MARGIN * (limit_s := LIMIT_S * slowness()) and not is_busy:
        raise TooDeep(
            f"{test_id} used {used_s:.1f} s of processor time, of {limit_s:.1f} s: make it smaller, or list it in"
            " tests/deep.txt"
        )
