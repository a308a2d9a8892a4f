"""Runs of a swarm that everything happens to, and that end as the laws say all the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from rollover.rollout import events as recorded
from rollover.run.building import build_config
from tests.runs import Cue
from tests.speed import within
from tests.swarm.chaos.disks import small_disk
from tests.swarm.chaos.faults import Blows, WireFaults, drawn_blows
from tests.swarm.chaos.laws import Held, check_laws, check_members, sampled
from tests.swarm.chaos.record import WireRecord
from tests.swarm.chaos.stage import SPEEDS, Stage, Toll

_RUN_LIMIT_S = within(1800.0)
_EVENTS: dict[type[recorded.Event], int] = {
    recorded.GroupOpened: 12,
    recorded.SampleStarted: 30,
    recorded.SegmentEnded: 50,
    recorded.SampleScored: 24,
    recorded.BatchConsumed: 4,
    recorded.VersionPublished: 4,
    recorded.CheckpointSaved: 2,
    recorded.Restarted: 1,
}
"""Events of the coordinator at which it is killed, and up to which of its kind the kill waits."""
_MAX_FLUSHES = 40
_DISKS_MB = {"coordinator": 512, "members": 64}
"""Sizes of disks that can be filled; a run asks for some of the space when it starts."""
_ON_CUE = 0.5
"""Share of the coordinator's lives that end at an event or a flush, should no other blow come before."""

STORM = Blows()

WEATHER = WireFaults(cut=0.002, delay=0.05, longest_s=0.2, flip=0.05, truncate=0.05, missing=0.05)
"""A network that is bad, but delivers what it takes in order and once."""
CALM = WireFaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and what happens to it.

    Example: ``Case(strategy="april", num_kills=10).name`` is "push_pull-april".
    """

    strategy: str = "bounded_async"
    mode: Literal["push_pull", "pull"] = "push_pull"
    steps: int = 14
    argv: tuple[str, ...] = ()
    num_kills: int = 12
    """The run is left alone afterwards."""
    blows: Blows = STORM
    relay: bool = True
    """Blobs go through nginx, which must be installed."""
    wire: WireFaults = WEATHER
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.strategy}"

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            *("--engine.mode", self.mode, "--rollout.strategy", self.strategy, "--steps", str(self.steps)),
            *("--seed", str(self.seed), *self.argv),
        )


@dataclass(frozen=True, slots=True)
class Survivor:
    """A run that came to its end, all laws kept."""

    case: Case
    toll: Toll
    held: Held
    wire: WireRecord
    trained: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """Sample, tokens and versions of all that was trained, in order."""
    wall_s: float


async def survive(case: Case, folder: Path, *, speeds: Mapping[str, float] = SPEEDS) -> Survivor:
    """Do to a run in ``folder``, where ``run.toml`` is, what ``case`` says, and see it to its end.

    Raises:
        AssertionError: saying which law does not hold.
    """
    began_s = time.monotonic()
    with ExitStack() as opened:
        disks = {
            name: opened.enter_context(small_disk(folder / f"disk-{name}", megabytes))
            for name, megabytes in (_DISKS_MB if case.blows.fill_disks else {}).items()
        }
        places = {"run": disks["coordinator"].folder / "out", "caches": disks["members"].folder} if disks else {}
        seed = f"{case.seed}/{case.name}"
        stage = Stage(folder, case.settings, seed=seed, speeds=speeds, with_relay=case.relay, disks=disks, **places)
        try:
            async with asyncio.timeout(_RUN_LIMIT_S), stage.open():
                await stage.until("the first step", lambda: stage.steps_done() >= 1)
                stage.proxy.faults = case.wire
                await _storm(stage, case)
                await stage.until("the end of the run", lambda: stage.is_over, _RUN_LIMIT_S)
        except TimeoutError:
            raise AssertionError(f"the run has not ended after {_RUN_LIMIT_S:g} s\n{stage.last_words()}") from None
        except Exception as error:
            error.add_note(f"in {folder}, case {case}, after {stage.toll}")
            raise
        bound = build_config(str(folder / "swarm.toml"), case.settings).rollout.staleness_bound
        held = check_laws(stage.run, case.steps, bound, stage.proxy.record)
        check_members(stage.proxy.record)
        trained = sampled(stage.run)
    return Survivor(case, stage.toll, held, stage.proxy.record, trained, time.monotonic() - began_s)


async def _storm(stage: Stage, case: Case) -> None:
    """Strike until there were so many kills, or the run is over."""
    lots = Random(f"{case.seed}/{case.name}/blows")
    blows = drawn_blows(case.blows, tuple(stage.speeds), lots)
    cues = Random(f"{case.seed}/{case.name}/cues")
    stage.next_cue = lambda: _cue(cues)
    while stage.toll.num_kills < case.num_kills and not stage.is_over:
        blow = next(blows)
        await _pass(stage, blow.gap_s)
        if not stage.is_over and stage.is_up(blow.target):
            stage.strike(blow)
    stage.next_cue = lambda: None


async def _pass(stage: Stage, seconds: float) -> None:
    """Let time pass, unless the run is over."""
    began_s = time.monotonic()
    while not stage.is_over and time.monotonic() < began_s + seconds:
        stage.check_cast()
        await asyncio.sleep(0.02)


def _cue(lots: Random) -> Cue | None:
    """Draw the moment at which a coordinator is to kill itself, if it lives so long."""
    if lots.random() >= _ON_CUE:
        return None
    before = lots.random() < 0.5
    if lots.random() < 0.3:
        return Cue("flush", lots.randint(1, _MAX_FLUSHES), before)
    kind = lots.choice(list(_EVENTS))
    return Cue(kind, lots.randint(1, _EVENTS[kind]), before)
