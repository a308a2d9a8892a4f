"""What goes wrong, as a function of a seed: frames on the wire, blobs on the way, blows to processes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFaults:
    """Probabilities, each for one frame or one blob.

    Example: with ``WireFaults(drop=0.02)`` one frame in fifty is lost.
    """

    drop: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    """Frames behind a delayed one wait for it."""
    overtake: float = 0.0
    """The frame is delayed, and those behind it are not."""
    cut: float = 0.0
    """The connection ends at the frame, without a word."""
    longest_s: float = 0.3
    flip: float = 0.0
    """A bit of a blob is another one."""
    truncate: float = 0.0
    missing: float = 0.0
    """A blob is said not to be there."""


@dataclass(frozen=True, slots=True)
class FrameFate:
    """What becomes of a frame: ``FrameFate(releases=((0.2, True), (0.25, False)))`` holds the lane up for 0.2 s and
    sends the frame a second time, out of order, 0.05 s later."""

    releases: tuple[tuple[float, bool], ...]
    """Delays, and whether the frames behind have to wait."""
    is_cut: bool = False


def fate_of_frame(faults: WireFaults, lots: Random) -> FrameFate:
    drawn = [lots.random() for _ in range(5)]
    delay_s, again_s = lots.uniform(0.0, faults.longest_s), lots.uniform(0.0, faults.longest_s)
    if drawn[0] < faults.cut:
        return FrameFate((), is_cut=True)
    if drawn[1] < faults.drop:
        return FrameFate(())
    first = (0.0, True)
    if drawn[2] < faults.overtake:
        first = (delay_s, False)
    elif drawn[3] < faults.delay:
        first = (delay_s, True)
    return FrameFate((first, (first[0] + again_s, False)) if drawn[4] < faults.double else (first,))


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


Way = Literal["kill", "pause", "cut", "freeze"]


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that is done to one of the cast: ``Blow(3.5, "phone", "pause", 1.2)`` stops the process of that name
    3.5 s after the beginning, for 1.2 s."""

    at_s: float
    whom: str
    way: Way
    seconds: float
    """Of a pause, of a network that carries nothing, or until a killed process is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blows:
    """How often whom is hit, and in which way: weights of a draw."""

    gap_s: float = 1.5
    """On average; the shortest is half of it."""
    ways: tuple[tuple[Way, float], ...] = (("kill", 7.0), ("pause", 1.5), ("cut", 1.0), ("freeze", 0.5))
    lease_s: float = 3.0
    """A pause takes up to twice as long, so that some end within a lease and some do not."""


def drawn_blows(rule: Blows, members: Sequence[str], lots: Random) -> Iterator[Blow]:
    """Yield blows one after the other, without end. The coordinator is hit in one case of four, the relay in one of
    eight."""
    at_s = 0.0
    while True:
        at_s += rule.gap_s * lots.uniform(0.5, 1.5)
        (whom,) = lots.choices(["coordinator", "nginx", *members], [2.0, 1.0, *(5.0 / len(members) for _ in members)])
        ways, weights = zip(*rule.ways, strict=True)
        (way,) = lots.choices(ways, weights)
        if whom not in members and way in ("cut", "freeze"):
            way = "pause"
        long_s = lots.uniform(0.1, 2.0) * rule.lease_s
        yield Blow(at_s, whom, way, lots.uniform(0.0, 0.4) if way == "kill" else min(long_s, 8.0))
