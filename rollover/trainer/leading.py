"""The process of the run leads the ranks of a sharded trainer, wherever they run: it commands, watches and ends them.

Invariants: every wait has a deadline; of several failures the first is named, and by then no rank is left
running. The deadline applies to progress: ranks count what they do, and are ended when none of them has done anything
for that long, however long a whole command takes.

A ``RankLauncher`` starts the ranks: as processes of this machine (``ranks``) or of the nodes of a cluster.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from rollover import errors
from rollover.errors import ResourceError, RolloverError
from rollover.trainer.messages import Done, Failed, RankTask
from rollover.trainer.staging import lay_down

_COLLECTIVE_MARGIN = 2.0
"""Collectives in a rank wait this many times longer than the process of the run, which can name the rank that they wait
for."""
_POLL_S = 0.2
_START_S = 120.0
"""Deadline while ranks start: importing PyTorch takes time and shows no progress."""
_GRACE_S = 3.0
"""Time after the first reported failure in which others can turn out to have preceded it."""


def collective_timeout_s(timeout_s: float) -> float:
    """Return the deadline of each collective for ranks that are ended after ``timeout_s`` without progress."""
    return _COLLECTIVE_MARGIN * max(timeout_s, _START_S)


class RankLost(RolloverError, RuntimeError):
    """A rank died, hangs, or failed with an unexpected error; the others have been ended."""


@dataclass(frozen=True, slots=True)
class ForRanks:
    """A value for all ranks that is too large for a message: each reads it from a file whose path it is given."""

    value: Any


class RankProcess(Protocol):
    """One rank, from the viewpoint of the process that leads it."""

    rank: int
    answer: Done | Failed | None
    """Answer to the last command."""
    is_gone: bool
    """True if it has ended, so that no answer comes from it any more."""

    def fate(self) -> str:
        """Describe how it ended, as in "was killed (SIGTERM)"."""
        ...

    def is_stopped(self) -> bool:
        """Return whether it has been stopped (SIGSTOP)."""
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

    @property
    def is_remote(self) -> bool:
        """Return whether ranks are on other machines, which share disks with this one but no memory."""
        ...

    def launch(self, task: RankTask) -> LedRanks:
        """Start new ranks, and return them once they have loaded the model that they train.

        Args:
            task: of rank 0; the others get the same, except for what is specific to each.

        Raises ``RankLost`` or the error of a rank that cannot load its model.
        """
        ...


class LedRanks(ABC):
    """All ranks of a trainer from their start to their end."""

    facts: dict[str, Any]
    """Facts about the trainer that rank 0 reports when it has loaded it."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        self._folder = folder
        """The folder for what is too large for a message; the machines of all ranks see it."""
        self._timeout_s = timeout_s
        self._failures: list[int] = []
        """The ranks that have failed in the present command, in the order in which this became known here, since the
        clocks of several machines cannot be compared."""

    @property
    @abstractmethod
    def members(self) -> Sequence[RankProcess]:
        """Return the ranks in their order; none after the end."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Return the process id of each rank on its own machine."""

    @property
    @abstractmethod
    def progress(self) -> NDArray[np.uint64]:
        """Return how much each rank has done, ``[size]``."""

    @abstractmethod
    def end(self) -> None:
        """Kill all ranks. Does nothing when called again."""

    @abstractmethod
    def _tell(self, message: bytes) -> None:
        """Send a pickled command to all ranks."""

    @abstractmethod
    def _collect(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        """Collect the answers that have arrived, after a short wait for the first. Returns whether there were any."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    def ask(self, doing: str, command: str, **arguments: Any) -> list[Any]:
        """Let all ranks carry out a command, and return the result of each.

        Args:
            doing: description of the command for messages.

        Raises ``RankLost``, or the error of a rank; the ranks have then been ended.
        """
        try:
            self._failures = []
            for member in self.members:
                member.answer = None
            own = {name: self._passed_on(name, value) for name, value in arguments.items()}
            self._tell(pickle.dumps((command, own)))
            return self._answers(doing)
        except BaseException:
            self.end()
            raise

    def _passed_on(self, name: str, value: Any) -> Any:
        match value:
            case ForRanks():
                return lay_down(self._folder / name, value.value).resolve()
            case Path():
                return value.resolve()  # on other machines, ranks have other working directories
            case _:
                return value

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
        """Return how long ranks may show no progress: longer while they start, unless one was stopped."""
        is_stopped = any(p.is_stopped() for p in waiting)
        return self._timeout_s if doing != "loading" or is_stopped else max(self._timeout_s, _START_S)

    def _receive(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        """Collect the answers that have arrived, and record failures. Returns whether there were any answers."""
        is_any = self._collect(waiting, timeout_s)
        self._failures += [p.rank for p in self.members if _has_failed(p) and p.rank not in self._failures]
        return is_any

    def _fail(self, doing: str) -> NoReturn:
        """Raise the error of the first failure, once it is known which failure was first."""
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
            is_of_place = first.answer.kind == ResourceError.__name__  # a device or a disk of the rank's own
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
            else "it hangs"
            if self.size == 1
            else "the others are waiting for it"
            if len(behind) == 1
            else "they hang"
        )
        return f"{names} of {self.size} did nothing for {limit_s:g} s (trainer.rank_timeout_s) in {doing}: {has}"


_FORESEEN, _DIED, _UNFORESEEN, _SECONDARY = range(4)
"""Kinds of failures; earlier ones explain later ones."""


def _has_failed(process: RankProcess) -> bool:
    return isinstance(process.answer, Failed) or (process.is_gone and process.answer is None)


def _blame(process: RankProcess) -> int:
    """Return the kind of a rank's failure: an error that Rollover foresees is certainly a rank's own, and a sudden end
    nearly always is; other errors may be caused by the loss of another rank."""
    if not isinstance(process.answer, Failed):
        return _DIED
    if process.answer.is_secondary:
        return _SECONDARY
    return _FORESEEN if process.answer.kind else _UNFORESEEN
