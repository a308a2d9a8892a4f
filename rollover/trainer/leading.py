"""The process of the run leads the ranks of a sharded trainer, wherever they run: it asks, watches and gives them up.

What it keeps true: every wait has a deadline; of several failures the first is named, and by then no rank is left
running. The deadline is one of progress: ranks count what they do, and are given up when none of them does anything for
so long, however long a whole command takes.

Who starts ranks and speaks with them is a ``RankLauncher``: processes of this machine (``ranks``) or of the nodes of a
cluster.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from rollover import errors
from rollover.errors import ResourceError, RolloverError
from rollover.trainer.messages import Done, Failed, RankTask

_COLLECTIVE_MARGIN = 2.0
"""Collectives in a rank wait so many times longer than the process of the run, which can name whom they wait for."""
_POLL_S = 0.2
_START_S = 120.0
"""Importing PyTorch takes its time, and shows no progress."""
_GRACE_S = 3.0
"""After the first failure, others have so long to show that they came before it."""


def collective_timeout_s(timeout_s: float) -> float:
    """Return the deadline of each collective of ranks that are given up after ``timeout_s``.

    Example: 1200 s where ranks are given up after 600 s, and 240 s after 5 s, since they may start for 120 s.
    """
    return _COLLECTIVE_MARGIN * max(timeout_s, _START_S)


class RankLost(RolloverError, RuntimeError):
    """A rank that died, hangs, or failed in a way that nobody has foreseen; the others have been ended.

    Example: ``rank 1 of 2 was killed (SIGTERM) in step 7``
    """


@dataclass(frozen=True, slots=True)
class ForRanks:
    """A value for all ranks, too large for a message: each finds it in a file whose path it is told.

    Example: ``ranks.ask("step 7", "step", batch=ForRanks(batch))``
    """

    value: Any


@dataclass(frozen=True, slots=True)
class FromRanks:
    """A folder of this machine where the files that ranks write are when they have answered. Each rank is told the path
    of a folder on its own machine.

    Example: ``ranks.ask("the publication of version 7", "publish", folder=FromRanks(folder))``
    """

    folder: Path


class RankProcess(Protocol):
    """One rank, as whoever leads it sees it."""

    rank: int
    answer: Done | Failed | None
    """Answer to the last command."""
    is_gone: bool
    """It has ended, and no answer comes from it any more."""

    def fate(self) -> str:
        """Say how it ended, as in "was killed (SIGTERM)"."""
        ...

    def is_stopped(self) -> bool:
        """Say whether somebody has stopped it (SIGSTOP)."""
        ...


class RankLauncher(Protocol):
    """Starts all ranks of a trainer, as often as it is asked to."""

    @property
    def devices(self) -> Sequence[str]:
        """Return the device of each rank by PyTorch's name."""
        ...

    @property
    def num_threads(self) -> int:
        """Return the CPU threads of each rank."""
        ...

    def launch(self, task: RankTask) -> LedRanks:
        """Start ranks that have not met before, and return them once they have loaded what they train.

        Args:
            task: of rank 0; the others are told the same, but for what is their own.

        Raises ``RankLost`` or the error of a rank that cannot load what it shall train.
        """
        ...


class LedRanks(ABC):
    """All ranks of a trainer from their start to their end.

    Example: ``ranks.ask("step 7", "step", batch=ForRanks(batch))`` returns the answer of each rank.
    """

    facts: dict[str, Any]
    """Facts that rank 0 reports about the trainer when it has loaded it."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._failures: list[int] = []
        """The ranks that have failed in the present command, in the order in which that became known here: clocks of
        several machines cannot be compared."""

    @property
    @abstractmethod
    def members(self) -> Sequence[RankProcess]:
        """Return the ranks in their order; none after the end."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Return the process of each rank, by its number on its own machine."""

    @property
    @abstractmethod
    def progress(self) -> NDArray[np.uint64]:
        """Return how much each rank has done, ``[size]``."""

    @abstractmethod
    def end(self) -> None:
        """Kill all ranks. Does nothing the second time."""

    @abstractmethod
    def _tell(self, command: str, arguments: Mapping[str, Any]) -> None:
        """Send a command to all ranks, and the values in its arguments with it."""

    @abstractmethod
    def _collect(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        """Take the answers that are there; wait a little for the first. Returns whether there were any."""

    @abstractmethod
    def _bring(self, doing: str, arguments: Mapping[str, Any]) -> None:
        """Bring what ranks have written to this machine."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    def ask(self, doing: str, command: str, **arguments: Any) -> list[Any]:
        """Have all ranks carry out a command, and return the result of each.

        Args:
            doing: what that is, for messages.

        Raises ``RankLost``, or the error that a rank has met; the ranks have been ended then.
        """
        try:
            self._failures = []
            for member in self.members:
                member.answer = None
            self._tell(command, arguments)
            results = self._answers(doing)
            self._bring(doing, arguments)
            return results
        except BaseException:
            self.end()
            raise

    def _answers(self, doing: str) -> list[Any]:
        seen, active_s = self.progress.copy(), time.monotonic()
        while waiting := self._waiting():
            if self._receive(waiting, _POLL_S):
                active_s = time.monotonic()
            if self._failures:
                self._fail(doing)
            if not np.array_equal(self.progress, seen):
                seen, active_s = self.progress.copy(), time.monotonic()
            elif time.monotonic() - active_s >= (limit_s := self._limit_s(doing, waiting)):
                raise RankLost(self._hanging(doing, waiting, limit_s))
        return [p.answer.result for p in self.members if isinstance(p.answer, Done)]

    def _waiting(self) -> list[RankProcess]:
        return [p for p in self.members if p.answer is None and not p.is_gone]

    def _limit_s(self, doing: str, waiting: Sequence[RankProcess]) -> float:
        """Return for how long ranks may show no progress: for longer while they start, unless one was stopped."""
        is_stopped = any(p.is_stopped() for p in waiting)
        return self._timeout_s if doing != "loading" or is_stopped else max(self._timeout_s, _START_S)

    def _receive(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        """Take the answers that are there, and keep count of failures. Returns whether there were any answers."""
        is_any = self._collect(waiting, timeout_s)
        self._failures += [p.rank for p in self.members if _has_failed(p) and p.rank not in self._failures]
        return is_any

    def _fail(self, doing: str) -> NoReturn:
        """Raise for the first failure, once it is known which that is."""
        deadline_s = time.monotonic() + _GRACE_S
        while waiting := self._waiting():
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0 or any(_blame(self.members[rank]) <= _DIED for rank in self._failures):
                break
            self._receive(waiting, min(rest_s, _POLL_S))
        first = min((self.members[rank] for rank in self._failures), key=_blame)
        name = f"rank {first.rank} of {self.size}"
        if not isinstance(first.answer, Failed):
            raise RankLost(f"{name} {first.fate()} in {doing}")
        if _blame(first) == _FORESEEN:
            is_of_place = first.answer.kind == ResourceError.__name__  # a device or a disk of its own
            message = f"{name}: {first.answer.message}" if is_of_place else first.answer.message
            raise getattr(errors, first.answer.kind)(message)
        raise RankLost(f"{name} failed in {doing}: {first.answer.message}")

    def _hanging(self, doing: str, waiting: Sequence[RankProcess], limit_s: float) -> str:
        stopped = [p for p in waiting if p.is_stopped()]
        progress = self.progress
        least = min(progress[p.rank] for p in waiting)
        behind = [p for p in waiting if progress[p.rank] == least]
        names = ", ".join(f"rank {p.rank}" for p in stopped or behind)
        has = (
            "it was stopped (SIGSTOP)"
            if stopped
            else "the others are waiting for it"
            if len(behind) == 1
            else "they hang"
        )
        return f"{names} of {self.size} did nothing for {limit_s:g} s (trainer.rank_timeout_s) in {doing}: {has}"


_FORESEEN, _DIED, _UNFORESEEN, _SECONDARY = range(4)
"""Kinds of failures, that which explains the others first."""


def _has_failed(process: RankProcess) -> bool:
    return isinstance(process.answer, Failed) or (process.is_gone and process.answer is None)


def _blame(process: RankProcess) -> int:
    """Return the kind of a rank's failure: an error that Rollover foresees is certainly a rank's own, and so is nearly
    always a sudden end; other errors may come of losing another rank."""
    if not isinstance(process.answer, Failed):
        return _DIED
    if process.answer.is_secondary:
        return _SECONDARY
    return _FORESEEN if process.answer.kind else _UNFORESEEN
