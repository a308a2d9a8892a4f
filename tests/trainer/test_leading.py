"""Which of several failures of ranks is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollover.errors import ResourceError
from rollover.trainer import leading
from rollover.trainer.leading import LedRanks, RankLost, RankProcess
from rollover.trainer.messages import Done, Failed

GONE = object()
"""The end of a rank that has said nothing."""
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@dataclass(slots=True)
class Member:
    rank: int
    answer: Done | Failed | None = None
    is_gone: bool = False

    def fate(self) -> str:
        return "was killed (SIGABRT)"

    def is_stopped(self) -> bool:
        return False


class Scripted(LedRanks):
    """Ranks from which comes what ``script`` says, a second after the other; then nothing."""

    def __init__(self, size: int, script: Sequence[Mapping[int, Any]]) -> None:
        super().__init__(Path("ranks"), timeout_s=60.0)
        self.now_s = 0.0
        self._own = [Member(rank) for rank in range(size)]
        self._script = [*script]

    @property
    def members(self) -> Sequence[RankProcess]:
        return self._own

    @property
    def pids(self) -> list[int]:
        return []

    @property
    def progress(self) -> NDArray[np.uint64]:
        return np.zeros(len(self._own), dtype=np.uint64)

    def end(self) -> None:
        self.is_ended = True

    def _tell(self, message: bytes) -> None:
        pass

    def _collect(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        self.now_s += 1.0
        arrived = self._script.pop(0) if self._script else {}
        for rank, what in arrived.items():
            assert self._own[rank] in waiting, f"rank {rank} has said all"
            if what is GONE:
                self._own[rank].is_gone = True
            else:
                self._own[rank].answer = what
        return bool(arrived)


def raised(monkeypatch: pytest.MonkeyPatch, *script: Mapping[int, Any]) -> Exception:
    ranks = Scripted(3, script)
    monkeypatch.setattr(leading, "time", SimpleNamespace(monotonic=lambda: ranks.now_s))
    with pytest.raises((RankLost, ResourceError)) as found:
        ranks.ask("step 7", "step")
    assert ranks.is_ended
    return found.value


def unforeseen(message: str) -> Failed:
    return Failed("", message, is_secondary=False)


def secondary(message: str) -> Failed:
    return Failed("", message, is_secondary=True)


FULL = Failed("ResourceError", "training ran out of memory: lower trainer.micro_batch_tokens", is_secondary=False)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        # Clocks of several machines say nothing: what came first is named.
        ([{2: unforeseen("first")}, {0: unforeseen("second")}], "rank 2 of 3 failed in step 7: first"),
        # Those that lost a connection are not to blame, even where they are the first to say so.
        ([{0: secondary(CLOSED)}, {2: unforeseen("KeyError: 'x'")}], "rank 2 of 3 failed in step 7: KeyError: 'x'"),
        ([{0: secondary(CLOSED)}, {}, {1: GONE}], "rank 1 of 3 was killed (SIGABRT) in step 7"),
        ([{0: unforeseen(CLOSED)}, {1: GONE}], "rank 1 of 3 was killed (SIGABRT) in step 7"),
        ([{0: secondary(CLOSED), 2: secondary("PeerLost")}], f"rank 0 of 3 failed in step 7: {CLOSED}"),
        ([{0: secondary(CLOSED)}, {1: Done(None)}], f"rank 0 of 3 failed in step 7: {CLOSED}"),
    ],
)
def test_the_failure_that_explains_the_others_is_named(
    monkeypatch: pytest.MonkeyPatch, script: Sequence[Mapping[int, Any]], message: str
) -> None:
    found = raised(monkeypatch, *script)
    assert type(found) is RankLost and str(found) == message


@pytest.mark.parametrize(
    "script",
    [
        [{0: secondary(CLOSED)}, {1: FULL}],
        [{0: unforeseen(CLOSED)}, {1: FULL}],
        [{0: GONE, 1: FULL, 2: GONE}],  # NCCL ends the processes that have lost one
    ],
)
def test_a_foreseen_error_names_its_rank(monkeypatch: pytest.MonkeyPatch, script: Sequence[Mapping[int, Any]]) -> None:
    found = raised(monkeypatch, *script)
    assert type(found) is ResourceError and str(found) == f"rank 1 of 3: {FULL.message}"
