"""The simulator and the asyncio driver are two shells of one scheduler: they train the same batches at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollover.rollout.events import BatchConsumed, Event
from rollover.rollout.generation import sample_seed
from rollover.sim.run import simulate
from rollover.sim.scenario import NO_TIME, Latency, Turns
from rollover.types import FinishReason, Observation, Prompt, SampleId, Trajectory
from tests.engine.fake import FakeEngine
from tests.rollout.kit import NAMES, SEED, make_rig, run, with_stop
from tests.sim.kit import Lengths, one_replica, strategy_of
from tests.virtual_time import VirtualClock

NUM_STEPS = 8
TURN, TOOL_S = 13, 7.0


def length_of(group: int, index: int) -> int:
    """Long-tailed, the same for both; few samples end together."""
    return 1 + (sample_seed(SEED, SampleId(group, index)) % 997) ** 2 // 17500


class Tools:
    """Answers each turn after a while, until the episode is as long as its response."""

    def turn_limit(self, prompt: Prompt) -> int:
        return 10 * TURN

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        await asyncio.sleep(TOOL_S)
        if trajectory.num_tokens == length_of(*trajectory.sample_id):
            return Observation((), end=FinishReason.STOP, start_s=now_s)
        return Observation((1, 1, 1), start_s=now_s)

    def leave(self, sample_id: SampleId) -> None:
        pass


def batches_of_driver(
    name: str, max_running: int, train_s: float, turn: int = 60, environment: Tools | None = None, **config: Any
) -> list[tuple[float, tuple[int, ...]]]:
    lengths = {
        sample_seed(SEED, SampleId(g, i), k): min(turn, length_of(g, i) - k * turn)
        for g in range(400)
        for i in range(4)
        for k in range(-(-length_of(g, i) // turn))
    }
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
        rig = make_rig(name, engine=engine, environment=environment, observer=observer, watched=False, **config)
        await with_stop(rig, rig.train(NUM_STEPS, train_s=train_s, checkpoint_every=1))

    run(work())
    return consumed


@pytest.mark.parametrize("train_s", [0.0, 7.0])
@pytest.mark.parametrize("max_running", [6, 64])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("oversample", "tail_rounds")])
def test_both_shells_train_the_same_batches(name: str, max_running: int, train_s: float) -> None:
    config: dict[str, Any] = {"group_size": 4, "rollout_batch_size": 3}
    simulated = batches_of_simulator(name, max_running, trainer=Latency(base_s=train_s), **config)
    by_driver = batches_of_driver(name, max_running, train_s, **config)
    assert [e.group_ids for e in simulated] == [ids for _, ids in by_driver]
    # The fake engine decodes at whole seconds, so a round that begins between two loses a fraction of one.
    for event, (time_s, _) in zip(simulated, by_driver, strict=True):
        assert event.time_s == pytest.approx(time_s, abs=1.5 + NUM_STEPS)


@pytest.mark.parametrize("name", ["sync", "april", "rollover", "bounded_async"])
def test_both_shells_play_the_same_episodes(name: str) -> None:
    """Few turns and answers end at the same time, when the order of the two shells may differ."""
    config: dict[str, Any] = {"group_size": 4, "rollout_batch_size": 3, "max_new_tokens": 400}
    turns = Turns(tokens=TURN, answer_s=TOOL_S, observed_tokens=3)
    simulated = batches_of_simulator(name, 6, turns=turns, **config)
    by_driver = batches_of_driver(name, 6, 0.0, TURN, Tools(), **config)
    assert [e.group_ids for e in simulated] == [ids for _, ids in by_driver]
    for event, (time_s, _) in zip(simulated, by_driver, strict=True):
        assert event.time_s == pytest.approx(time_s, rel=0.05, abs=5)


def batches_of_simulator(
    name: str, max_running: int, *, trainer: Latency = NO_TIME, turns: Turns | None = None, **config: Any
) -> list[BatchConsumed]:
    strategy = strategy_of(name, max_running=max_running, **config)
    consumed: list[BatchConsumed] = []

    def observer(event: Event) -> None:
        if isinstance(event, BatchConsumed):
            consumed.append(event)

    simulate(
        strategy,
        Lengths(lambda index, i, attempt: length_of(index, i)),
        one_replica(max_running=max_running, trainer=trainer, turns=turns),
        steps=NUM_STEPS,
        observer=observer,
    )
    return consumed
