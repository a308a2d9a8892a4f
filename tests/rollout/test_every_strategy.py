"""Every strategy, with samples trained in groups or one by one, deterministic or not: the laws hold in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.batch import Batch
from rollover.rollout.config import Limits
from rollover.rollout.events import CheckpointSaved
from rollover.rollout.journal import Journal, restart
from rollover.rollout.state import RolloutState
from tests.rollout.kit import (
    NAMES,
    ParityScorer,
    Rig,
    assert_trainable,
    config_of,
    content,
    lognormal,
    make_rig,
    with_stop,
)
from tests.virtual_time import run

STEPS = 6
DETERMINISTIC = [(name, True) for name in NAMES if not config_of(name).strategy.overlaps_training]
OVERLAPPED = "rollover, overlapped"
CASES = [*((name, False) for name in (*NAMES, OVERLAPPED)), *DETERMINISTIC]


def rig_of(name: str, unit: str, state: RolloutState, *, deterministic: bool, journal: Journal | None = None) -> Rig:
    """Few places and long tails, so that samples are parked, run out of their budget and go on."""
    return make_rig(
        name.partition(",")[0],
        **({"overlap": True} if name == OVERLAPPED else {}),
        unit=unit,
        state=state,
        journal=journal,
        lockstep=deterministic,
        length=lognormal(6, 1.0),
        max_running=7,
        max_new_tokens=40,
        stream_interval_tokens=3,
        limits=Limits(save_every_tokens=5),
        scorer=ParityScorer(0.5),
    )


async def train(rig: Rig) -> dict[int, Batch]:
    return await with_stop(rig, rig.train(STEPS, train_s=1.0, checkpoint_every=2))


def whole(name: str, unit: str, *, deterministic: bool) -> tuple[Rig, dict[int, Batch]]:
    async def work() -> tuple[Rig, dict[int, Batch]]:
        rig = rig_of(name, unit, RolloutState(), deterministic=deterministic)
        return rig, await train(rig)

    return run(work())


@pytest.mark.parametrize("unit", ["group", "sample"])
@pytest.mark.parametrize(("name", "deterministic"), CASES)
def test_tokens_are_conserved_and_none_is_too_old(name: str, deterministic: bool, unit: str) -> None:
    """``make_rig`` proves conservation and the invariant of the bound after every single event."""
    rig, batches = whole(name, unit, deterministic=deterministic)
    assert sorted(batches) == list(range(STEPS))
    assert_trainable(batches, rig)
    tokens = rig.ledger.tokens
    assert tokens.decoded == rig.engine.decoded_tokens
    assert tokens.trained == sum(t.num_tokens for b in batches.values() for t in b.trajectories)


@pytest.mark.parametrize("unit", ["group", "sample"])
@pytest.mark.parametrize("name", [name for name, _ in DETERMINISTIC])
def test_a_deterministic_run_repeats_its_batches_also_after_a_restart(name: str, unit: str) -> None:
    rig, batches = whole(name, unit, deterministic=True)
    expected = {step: content(batch) for step, batch in batches.items()}
    again = whole(name, unit, deterministic=True)[1]
    assert {step: content(batch) for step, batch in again.items()} == expected

    async def go_on(cut: int) -> dict[int, Batch]:
        journal, written = Journal(Path(":memory:")), rig.events[:cut]
        journal.append(written)
        newest = max((e.step for e in written if isinstance(e, CheckpointSaved)), default=0)
        state = restart(journal, step=newest, redo_round=True)
        resumed = await train(rig_of(name, unit, state, deterministic=True, journal=journal))
        journal.close()
        return resumed

    for share in (0.15, 0.3, 0.9):
        resumed = run(go_on(int(share * len(rig.events))))
        assert {s: content(b) for s, b in resumed.items()} == {s: expected[s] for s in resumed}
