"""Checkpoints and the journal, which together are the state from which a run resumes.

Invariants: a checkpoint names the last event of the journal that it has seen, and is refused with a journal
that ends before that event. The journal is on the disk before the checkpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.errors import RunError
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.events import CheckpointSaved
from rollover.rollout.journal import Journal, read_events
from rollover.run.directory import RunDir
from rollover.trainer.checkpoint import (
    DamagedCheckpoint,
    checkpoint_path,
    list_checkpoints,
    prune_checkpoints,
    read_manifest,
)
from rollover.trainer.config import CheckpointConfig

if TYPE_CHECKING:
    from rollover.trainer.base import Trainer

_JOURNAL_SEQ = "journal_seq"
"""The key under which a checkpoint holds the number of the last event that it has seen."""


@dataclass(slots=True)
class Checkpointer:
    """Saves checkpoints when they are due, deletes old ones, and journals both."""

    config: CheckpointConfig
    folder: Path
    trainer: Trainer
    driver: RolloutDriver
    journal: Journal
    keep: Callable[[], Collection[int]]
    """Versions whose checkpoints stay, however old they are."""
    _saved_version: int = field(init=False)

    def __post_init__(self) -> None:
        self._saved_version = self.trainer.version

    async def save_when_due(self) -> None:
        """Save a checkpoint after every ``checkpoint.every_steps`` training steps."""
        every = self.config.every_steps
        if every and self.trainer.version % every == 0:
            await self.save()

    async def save(self) -> None:
        """Save a checkpoint, unless the trainer's weights are saved already. It is written in a thread: while the event
        loop stands still, replies that are there already run into their deadlines."""
        version = self.trainer.version
        if version != self._saved_version:
            self.driver.flush()
            self.journal.sync()  # otherwise a power cut could leave a checkpoint that is newer than its journal
            extra = {_JOURNAL_SEQ: self.journal.last_seq}
            await asyncio.to_thread(self.trainer.save, checkpoint_path(self.folder, version), extra)
            self._saved_version = version
            self.driver.saved(self._oldest_kept())
        self.prune()  # an earlier process may have died before it did so

    def prune(self) -> None:
        """Delete the checkpoints that are not kept."""
        prune_checkpoints(self.folder, self.config.keep_last, self.keep())

    def _oldest_kept(self) -> int:
        """Return the version of the oldest checkpoint that stays: older batches need no replay."""
        kept = list_checkpoints(self.folder)[-self.config.keep_last :]
        return read_manifest(kept[0]).version


def open_journal(run: RunDir, checkpoint: Path | None) -> Journal:
    """Open the run's journal, a new one for a new run. Raises ``RunError`` when it is older than the checkpoint."""
    if checkpoint is None:
        return Journal(run.journal)
    remedy = f"put the right one back, or start a new run with --model.path {checkpoint}"
    if not run.journal.exists():
        raise RunError(f"{run.journal} is missing, and {checkpoint} cannot be resumed without it: {remedy}")
    journal = Journal(run.journal)
    written = read_manifest(checkpoint).extra.get(_JOURNAL_SEQ, 0)
    if written > journal.last_seq:
        last = journal.last_seq
        journal.close()
        raise RunError(f"{run.journal} ends at event {last}, but {checkpoint} includes event {written}: {remedy}")
    return journal


@contextmanager
def advice_on_damage(journal: Path) -> Iterator[None]:
    """Let the error about a damaged checkpoint offer only checkpoints whose batches are on record."""
    try:
        yield
    except DamagedCheckpoint as error:
        error.oldest = math.inf  # without a journal none can be resumed
        with suppress(RunError):
            events = read_events(journal, effective=True, tokens=False)
            error.oldest = max((event.step for _, event in events if isinstance(event, CheckpointSaved)), default=0)
        raise


def step_to_resume(run: RunDir, checkpoint: Path | None) -> int | None:
    """Return the step from which the run continues; ``None`` for a new run."""
    if checkpoint is not None:
        return read_manifest(checkpoint).version
    return 0 if run.journal.exists() else None
