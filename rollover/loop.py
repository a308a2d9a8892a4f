"""The story on one page: prompts -> groups -> step -> publish.

One loop serves every strategy. Whether generation stops while the trainer trains is the strategy's answer to a full
batch (``OnFull``), not a second loop; the trainer always works in a thread of its own.

What it keeps true: a batch is journaled before it is trained; a checkpoint says how many batches it has seen; so
after any crash the journal and the newest checkpoint together are a state the run can go on from.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollover.report.progress import Progress
from rollover.session import Session

T = TypeVar("T")


async def train(session: Session, interrupt: Interrupt) -> None:
    """Train to ``config.steps`` from wherever ``session`` stands.

    Raises:
        RolloverError: with what the user can do about it; the run can be resumed.
    """
    await session.publish()
    await session.evaluate_when_due()
    while session.version < session.config.steps:
        with session.timed("time/rollout_s"):
            batch = await interrupt.unless(session.driver.next_batch())
        if batch is None:
            break
        with session.timed("time/train_s"):
            trained = await asyncio.to_thread(session.trainer.step, batch)
        with session.timed("time/publish_s"):
            await session.publish()
        session.log_step(batch, trained)
        session.save_when_due()
        await session.evaluate_when_due()
        if interrupt.requested:
            break
    await session.finish()


class Interrupt:
    """Ctrl-C: once means finish cleanly, twice means now."""

    def __init__(self, progress: Progress) -> None:
        self.requested = False
        self._progress = progress
        self._event = asyncio.Event()

    def __enter__(self) -> Interrupt:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

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

    def _on_signal(self) -> None:
        if self.requested:
            # The journal holds everything already: being killed is a case like any other, and nothing else is "now"
            # while a training step runs in its thread.
            self._progress.__exit__(None, None, None)
            os._exit(130)
        self.requested = True
        self._event.set()
        self._progress.message("stopping after this step; once more to stop now (the run can be resumed either way)")
