"""What goes wrong, as a function of a seed: frames on the wire, blobs on the way, blows to processes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFaults:
    """Probabilities, each for one frame or one blob.

    Example: with ``WireFaults(delay=0.02)`` one frame in fifty is late.
    """

    delay: float = 0.0
    """Frames behind a delayed one wait for it."""
    cut: float = 0.0
    """The connection ends at the frame, without a word."""
    longest_s: float = 0.3
    flip: float = 0.0
    """A bit of a blob is another one."""
    truncate: float = 0.0
    missing: float = 0.0
    """A blob is said not to be there."""


def delay_of_frame(faults: WireFaults, lots: Random) -> float | None:
    """Return for how long a frame holds up its lane; ``None`` if the connection ends at it."""
    drawn = lots.random(), lots.random()
    delay_s = lots.uniform(0.0, faults.longest_s)
    if drawn[0] < faults.cut:
        return None
    return delay_s if drawn[1] < faults.delay else 0.0


def damaged(body: bytes, faults: WireFaults, lots: Random) -> tuple[bytes | None, str]:
    """Return a blob as it arrives, ``None`` when it is said not to be there, and the name of what befell it."""
    drawn = lots.random()
    if drawn < faults.missing:
        return None, "missing"
    drawn -= faults.missing
    if body and drawn < faults.truncate:
        return body[: lots.randrange(len(body))], "truncated"
    drawn -= faults.truncate
    if body and 0.0 <= drawn < faults.flip:
        position = lots.randrange(8 * len(body))
        flipped = bytearray(body)
        flipped[position // 8] ^= 1 << position % 8
        return bytes(flipped), "flipped"
    return body, ""


Way = Literal["kill", "pause", "cut", "freeze", "fill"]
_PROCESS: tuple[tuple[Way, float], ...] = (("kill", 7.0), ("pause", 1.5), ("cut", 1.0), ("freeze", 0.5))
WITH_DISKS: tuple[tuple[Way, float], ...] = (*_PROCESS, ("fill", 0.5))
"""Disks are filled as well."""
FULL_S = 2.0


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that is done to one of the cast.

    Example: ``Blow(1.1, "phone", "pause", 1.2)`` comes 1.1 s after the previous blow, and stops the process of that
    name for 1.2 s.
    """

    gap_s: float
    target: str
    way: Way
    seconds: float
    """Length of a pause, a frozen network or a full disk; of a kill, the time before the process is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blows:
    """How often blows come, and of which kind: weights of a draw."""

    gap_s: float = 1.5
    """On average; the shortest is half of it."""
    ways: tuple[tuple[Way, float], ...] = _PROCESS
    lease_s: float = 3.0
    """A pause takes up to twice as long, so that some end within a lease and some do not."""

    @property
    def fill_disks(self) -> bool:
        return any(way == "fill" for way, _ in self.ways)


def drawn_blows(rule: Blows, members: Sequence[str], lots: Random) -> Iterator[Blow]:
    """Yield blows without end: one in three for the coordinator, one in twelve for the relay, the rest for members."""
    while True:
        gap_s = rule.gap_s * lots.uniform(0.5, 1.5)
        (target,) = lots.choices(["coordinator", "nginx", *members], [4.0, 1.0, *(7.0 / len(members) for _ in members)])
        ways, weights = zip(*rule.ways, strict=True)
        (way,) = lots.choices(ways, weights)
        if target not in members and (way in ("cut", "freeze") or (target, way) == ("nginx", "fill")):
            way = "pause"
        pause_s, away_s = min(lots.uniform(0.1, 2.0) * rule.lease_s, 8.0), lots.uniform(0.0, 0.4)
        seconds = {"kill": away_s, "fill": FULL_S}.get(way, pause_s)
        yield Blow(gap_s, target, way, seconds)
