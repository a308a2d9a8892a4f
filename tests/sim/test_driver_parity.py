"""The simulator and the asyncio driver are two shells of one scheduler: they train the same batches at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.rollout.events import BatchConsumed, Event
from rollover.rollout.generation import sample_seed
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency
from rollover.types import SampleId
from tests.engine.fake import FakeEngine
from tests.rollout.kit import NAMES, SEED, make_rig, run, with_stop
from tests.sim.kit import Lengths, one_replica, strategy_of
from tests.virtual_time import VirtualClock

NUM_STEPS = 8


def length_of(group: int, index: int) -> int:
    """Long-tailed, the same for both; few samples end together."""
    return 1 + (sample_seed(SEED, SampleId(group, index)) % 997) ** 2 // 17500


def batches_of_driver(
    name: str, max_running: int, train_s: float, **config: Any
) -> list[tuple[float, tuple[int, ...]]]:
    lengths = {sample_seed(SEED, SampleId(g, i)): length_of(g, i) for g in range(400) for i in range(4)}
    consumed: list[tuple[float, tuple[int, ...]]] = []

    def observer(event: Event) -> None:
        if isinstance(event, BatchConsumed):
            consumed.append((event.time_s, event.group_ids))

    async def work() -> None:
        engine = FakeEngine(
            lambda request: lengths[request.seed],
            auto=True,
            clock=VirtualClock(),
            max_running=max_running,
            stream_interval_tokens=1,
        )
        rig = make_rig(name, engine=engine, observer=observer, watched=False, **config)
        await with_stop(rig, rig.train(NUM_STEPS, train_s=train_s, checkpoint_every=1))

    run(work())
    return consumed


@pytest.mark.parametrize("train_s", [0.0, 7.0])
@pytest.mark.parametrize("max_running", [6, 64])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("oversample", "tail_rounds")])
def test_both_shells_train_the_same_batches(name: str, max_running: int, train_s: float) -> None:
    config = {"group_size": 4, "rollout_batch_size": 3}
    strategy = strategy_of(name, max_running=max_running, **config)
    consumed: list[BatchConsumed] = []

    def observer(event: Event) -> None:
        if isinstance(event, BatchConsumed):
            consumed.append(event)

    simulate(
        strategy,
        Lengths(lambda index, i, attempt: length_of(index, i)),
        one_replica(max_running=max_running, trainer=Latency(base_s=train_s)),
        steps=NUM_STEPS,
        observer=observer,
    )
    by_driver = batches_of_driver(name, max_running, train_s, **config)
    assert [e.group_ids for e in consumed] == [ids for _, ids in by_driver]
    # The fake engine decodes at whole seconds, so a round that begins between two loses a fraction of one.
    for event, (time_s, _) in zip(consumed, by_driver, strict=True):
        assert event.time_s == pytest.approx(time_s, abs=1.5 + NUM_STEPS)
