"""Ctrl-C during a run: the first one finishes the step and saves a checkpoint, the second one ends the process at
once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rollover.report.progress import Progress
from rollover.run import signals

T = TypeVar("T")


class Interrupt:
    """Handles Ctrl-C, SIGTERM and SIGHUP in the main thread. While ``deferred``, the first asks the loop to finish
    cleanly and the second ends the process at once; otherwise there is nothing to finish, and the first raises
    ``Stopped``.

    Args:
        progress: reports what happens, and is closed when the process ends at once.
        resume: the command that continues the run.
    """

    def __init__(self, progress: Progress, *, resume: str) -> None:
        self.number: int | None = None
        """The number of the signal that asked the run to end."""
        self._progress = progress
        self._resume = resume
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def requested(self) -> bool:
        return self.number is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Report an interrupt to the running loop through ``requested`` and ``unless`` instead of an exception."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``, or ``None`` as soon as an interrupt comes. If it has come, nothing begins."""
        if self.requested:
            work.close()
            return None
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for pending in (task, asked):
                pending.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def on_signal(self, number: int) -> None:
        """Take a signal from ``signals.handled``: the event loop's own handlers notice nothing while its thread is
        blocked by a warm-up, by loading or by decoding in lockstep."""
        if self._loop is None:
            signals.stop(number)
        elif self.requested:
            # The journal has everything already, so being killed is a case like any other; and no other way ends the
            # process at once while a training step runs in its thread.
            self._progress.__exit__(None, None, None)
            print(f"stopped immediately; resume with: {self._resume}", file=sys.stderr, flush=True)
            os._exit(128 + number)
        else:
            self.number = number
            self._loop.call_soon_threadsafe(self._event.set)
            self._progress.message(
                "stopping after this step; Ctrl-C again to stop immediately (the run can be resumed either way)"
            )
