"""Writes the events of a run to its journal, and tells an engine's members which tokens they may forget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollover.engine.base import CallPlacement
from rollover.rollout.events import Event, SegmentEnded
from rollover.rollout.generation import sample_key
from rollover.rollout.journal import Journal
from rollover.rollout.ledger import Ledger


class EventWriter:
    """Writes events at the end of the event loop's turn in which they happen, so that many share a transaction.

    Args:
        journal: ``None`` for a run that keeps none.
        ledger: has already applied each event that is added.
        placement: told of tokens that are journaled.
        on_error: called when writing at the end of a turn has failed.
    """

    def __init__(
        self,
        journal: Journal | None,
        ledger: Ledger,
        placement: CallPlacement | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._journal = journal
        self._ledger = ledger
        self._placement = placement
        self._on_error = on_error
        self._unwritten: list[Event] = []
        self._unwritten_tokens: dict[str, int] = {}
        """Number of tokens of each sample's turn, including its unwritten segments, by its key."""

    def add(self, event: Event) -> None:
        """Write an event with the next ``flush``, at the end of this turn at the latest."""
        if self._journal is None:
            return
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._flush_later)
        self._unwritten.append(event)
        if isinstance(event, SegmentEnded):  # its group may no longer be in the ledger when it is written
            sample = self._ledger.sample(event.sample_id)
            key = sample_key(event.sample_id, len(sample.observations))
            self._unwritten_tokens[key] = sample.num_tokens - sample.turn_start

    def flush(self) -> None:
        """Write all events so far, and tell members that hold tokens until they are journaled."""
        if self._journal is None or not self._unwritten:
            return
        self._journal.append(self._unwritten)  # if this fails, the events are kept, so the journal has no holes
        tokens, self._unwritten, self._unwritten_tokens = self._unwritten_tokens, [], {}
        if self._placement is not None:
            self._journal.sync()  # members delete these tokens now
            self._placement.journaled(tokens.items())

    def sync(self) -> None:
        """Write all events so far, and force them to the disk."""
        self.flush()
        if self._journal is not None:
            self._journal.sync()

    def _flush_later(self) -> None:
        try:
            self.flush()
        except Exception as e:
            self._on_error(e)
