"""How killed processes come back into service, and how long that takes.

A coordinator is back when it has accepted a worker's session, a member when tokens that it has decoded since are
acknowledged. A process that does not come back is counted as well: as late, as hit again, or as part of a finished run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tests.swarm.chaos.record import WireRecord

GIVE_UP_S = 30.0
"""The wait for a return ends here; a late process takes at least this long."""
Outcome = Literal["back", "late", "hit again", "run over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """What became of a process after SIGKILL; times are in seconds since then. A member also counts as hit again when
    the coordinator is killed before the member is back.

    Example: ``Return(name="phone", is_watched=True, outcome="back", seconds=1.9, welcomed_s=0.7, serving_s=1.2,
    acked_s=1.9)``; one that was hit again after 0.6 s has ``outcome="hit again", seconds=0.6``.
    """

    name: str
    is_watched: bool
    """All processes were well at the time of the kill, and none was hit until the outcome."""
    outcome: Outcome
    seconds: float
    """Until the process was back, or until the outcome."""
    answered_s: float | None = None
    """The port of a coordinator or a relay answers."""
    welcomed_s: float | None = None
    """The first session of a member, or with a coordinator, was accepted."""
    serving_s: float | None = None
    """A member has weights."""
    acked_s: float | None = None
    """The first tokens since then were acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What has been reached so far, in seconds; ``None`` for what has not."""

    welcomed_s: float | None = None
    serving_s: float | None = None
    acked_s: float | None = None


def marks(record: WireRecord, name: str, killed_s: float) -> Marks:
    """Return what a member, or any member in the case of the coordinator, has reached since the kill at ``killed_s``.

    Example: of a record with ``hellos=[(10.6, "phone")]``, ``welcomes=[(10.7, "phone")]`` and ``acks=[(10.8, "phone",
    9.9), (11.9, "phone", 11.5)]`` ``marks(record, "phone", 10.0)`` has ``welcomed_s=0.7`` and ``acked_s=1.9``: the first
    acknowledgement is one of tokens that the killed process had sent.
    """
    who = None if name == "coordinator" else name
    welcomed_s = min(
        (
            found_s
            for at_s, member in record.hellos[bisect_left(record.hellos, (killed_s, "")) :]
            if who in (None, member) and (found_s := _first(record.welcomes, member, at_s)) is not None
        ),
        default=None,
    )
    if welcomed_s is None:
        return Marks()
    serving_s = _first(record.servings, who, welcomed_s)
    since = record.acks[bisect_left(record.acks, (welcomed_s, "")) :]
    acked_s = next((at_s for at_s, member, sent_s in since if who in (None, member) and sent_s > welcomed_s), None)
    return Marks(
        welcomed_s=welcomed_s - killed_s,
        serving_s=None if serving_s is None else serving_s - killed_s,
        acked_s=None if acked_s is None else acked_s - killed_s,
    )


async def followed(
    name: str,
    killed_s: float,
    record: WireRecord,
    *,
    port: int | None,
    is_watched: bool,
    is_hit: Callable[[], bool],
    is_over: Callable[[], bool],
) -> Return:
    """Follow a killed process until it is back, or until it is too late to tell.

    Args:
        port: where the process answers, if it listens.
        is_hit: tells whether the process, or the coordinator that it depends on, has been hit again.
        is_over: tells whether the run is over.
    """
    answered_s: float | None = None
    while True:
        found = marks(record, name, killed_s)
        if answered_s is None and port is not None and await answers(port):
            answered_s = time.monotonic() - killed_s
        elapsed_s = time.monotonic() - killed_s
        back_s = {"coordinator": found.welcomed_s, "nginx": answered_s}.get(name, found.acked_s)
        is_done = back_s is not None and (name == "nginx" or found.acked_s is not None)
        over, hit = is_over(), is_hit()
        if is_done or over or hit or elapsed_s > GIVE_UP_S:
            break
        await asyncio.sleep(0.01)
    return Return(
        name=name,
        is_watched=is_watched,
        outcome="back" if back_s is not None else "run over" if over else "hit again" if hit else "late",
        seconds=elapsed_s if back_s is None else back_s,
        answered_s=answered_s,
        **asdict(found),
    )


async def answers(port: int) -> bool:
    """Tell whether a server on this machine answers a request, whatever it says."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /v1/blobs/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 ")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False


def _first(seen: Sequence[tuple[Any, ...]], who: str | None, since_s: float) -> float | None:
    """Return the time of the first entry (time, member, ...) of ``who``, or of any member, after ``since_s``."""
    for entry in seen[bisect_left(seen, (since_s, "")) :]:
        if who is None or entry[1] == who:
            return float(entry[0])
    return None


@dataclass(frozen=True, slots=True)
class Kept:
    """How well the watched processes kept a limit.

    Example: of ten members, one is given up after 30 s and one was hit again: ``Kept(limit_s=6.0, num=9, missed=1, ...)``.
    """

    limit_s: float
    num: int
    """Watched until they were back, or for longer than the limit."""
    missed: int
    median_s: float | None
    p95_s: float | None
    max_s: float | None
    """For a process that was given up, the time until then."""
    num_hit_again: int
    num_run_over: int
    """The run ended before the limit, and before the process was back."""

    @classmethod
    def of(cls, returns: Sequence[Return], limit_s: float) -> Kept:
        watched = [back for back in returns if back.is_watched]
        over = [back for back in watched if back.outcome == "run over"]
        timed = sorted(
            back.seconds
            for back in watched
            if back.outcome in ("back", "late") or (back.outcome == "run over" and back.seconds > limit_s)
        )
        return cls(
            limit_s=limit_s,
            num=len(timed),
            missed=sum(seconds > limit_s for seconds in timed),
            median_s=quantile(timed, 0.5),
            p95_s=quantile(timed, 0.95),
            max_s=quantile(timed, 1.0),
            num_hit_again=sum(back.outcome == "hit again" for back in watched),
            num_run_over=sum(back.seconds <= limit_s for back in over),
        )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of them does not exceed.

    Example: ``quantile([1.0, 2.0, 3.0, 9.0], 0.5)`` is 2.0.
    """
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2) if ordered else None
