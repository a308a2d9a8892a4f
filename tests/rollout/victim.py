"""``python -m tests.rollout.victim STRATEGY SEED JOURNAL SEEN``: a run that kills itself at a random event.

It writes each batch it gets (step, group ids) to SEEN, synced, before it trains it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from rollover.rollout.events import CheckpointSaved, Event
from rollover.rollout.journal import Journal
from rollover.rollout.state import RolloutState
from tests.rollout.kit import lognormal, make_rig
from tests.virtual_time import run


async def main(name: str, seed: int, journal: Path, seen: Path) -> None:
    remaining = random.Random(seed).randint(30, 120)

    def observer(event: Event) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    rig = make_rig(
        name,
        state=RolloutState(),
        journal=Journal(journal),
        length=lognormal(5, 1.0),
        max_running=10,
        max_new_tokens=40,
        observer=observer,
    )
    with seen.open("w") as file:
        while True:
            batch = await rig.driver.next_batch()
            file.write(" ".join(str(i) for i in (batch.step, *(g.group_id for g in batch.groups))) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if batch.step % 2:
                rig.driver.record(CheckpointSaved(time_s=0.0, step=batch.step + 1))
            await rig.publish(batch.step + 1)


if __name__ == "__main__":
    strategy, lot, path, handed_out = sys.argv[1:]
    run(main(strategy, int(lot), Path(path), Path(handed_out)))
