"""The story on one page: prompts -> groups -> step -> publish.

One loop serves every strategy. Whether generation stops while the trainer trains is the strategy's answer to a full
batch (``OnFull``), not a second loop; the trainer always works in a thread of its own.

What it keeps true: a batch is journaled before it is trained; a checkpoint says how many batches it has seen; so
after any crash the journal and the newest checkpoint together are a state the run can go on from.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rollover.report.progress import Progress
from rollover.run import signals
from rollover.run.session import Session

T = TypeVar("T")


async def train(session: Session, interrupt: Interrupt) -> None:
    """Train to ``config.steps`` from wherever ``session`` stands.

    Raises:
        RolloverError: with what the user can do about it; the run can be resumed.
    """
    with interrupt.deferred():
        await interrupt.unless(session.publish())
        await interrupt.unless(session.evaluate_when_due())
        while session.version < session.config.steps and not interrupt.requested:
            with session.timed("time/rollout_s"):
                batch = await interrupt.unless(session.driver.next_batch())
            if batch is None:
                break
            with session.timed("time/train_s"):
                trained = await session.train(batch)
            await session.judge_engines(batch, trained)
            with session.timed("time/publish_s"):
                await interrupt.unless(session.publish())
            session.log_step(batch, trained)
            session.save_when_due()
            await interrupt.unless(session.evaluate_when_due())
        await session.finish()


class Interrupt:
    """Ctrl-C, SIGTERM and SIGHUP. While ``deferred``, once means finish cleanly and twice means now; before and after,
    there is nothing to finish and once means now (``Stopped``). Belongs to the main thread.

    Args:
        progress: tells what happens, and is taken down when the process ends at once.
        resume: the command that goes on with the run.
    """

    def __init__(self, progress: Progress, *, resume: str) -> None:
        self.number: int | None = None
        """Of the signal that asked to end."""
        self._progress = progress
        self._resume = resume
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Not the loop's own way: it notices nothing while warm-up, loading or decoding in lockstep hold the thread.
        self._handling = signals.handled(self._on_signal)

    def __enter__(self) -> Interrupt:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)

    @property
    def requested(self) -> bool:
        return self.number is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within it, the running loop learns of the interrupt by ``requested`` and ``unless``."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``, or ``None`` as soon as an interrupt is asked for."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for pending in (task, asked):
                pending.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def _on_signal(self, number: int) -> None:
        if self._loop is None:
            signals.stop(number)
        elif self.requested:
            # The journal holds everything already: being killed is a case like any other, and nothing else is "now"
            # while a training step runs in its thread.
            self._progress.__exit__(None, None, None)
            print(f"stopped at once; go on with: {self._resume}", file=sys.stderr, flush=True)
            os._exit(128 + number)
        else:
            self.number = number
            self._loop.call_soon_threadsafe(self._event.set)
            self._progress.message(
                "stopping after this step; once more to stop now (the run can be resumed either way)"
            )
