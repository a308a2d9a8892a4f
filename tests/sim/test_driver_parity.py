"""The simulator and the asyncio driver are two shells of one scheduler: they train the same batches at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollover.rollout.events import BatchConsumed
from rollover.rollout.generation import sample_seed
from rollover.sim.scenario import NO_TIME, Latency, Turns
from rollover.types import FinishReason, Observation, Prompt, SampleId, Trajectory
from tests.rollout.kit import NAMES, SEED, play
from tests.sim.kit import Lengths, one_replica, strategy_of, watched

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


def batches_of_driver(name: str, max_running: int, train_s: float, turn: int = 60, **rig: Any) -> list[BatchConsumed]:
    lengths = {
        sample_seed(SEED, SampleId(g, i), k): min(turn, length_of(g, i) - k * turn)
        for g in range(400)
        for i in range(4)
        for k in range(-(-length_of(g, i) // turn))
    }
    rig |= {"length": lambda request: lengths[request.seed], "max_running": max_running, "watched": False}
    played, _ = play(NUM_STEPS, name, train_s=train_s, checkpoint_every=1, **rig)
    return [event for event in played.events if isinstance(event, BatchConsumed)]


def batches_of_simulator(
    name: str, max_running: int, *, trainer: Latency = NO_TIME, turns: Turns | None = None, **config: Any
) -> list[BatchConsumed]:
    lengths = Lengths(lambda index, i, attempt: length_of(index, i))
    scenario = one_replica(max_running=max_running, trainer=trainer, turns=turns)
    strategy = strategy_of(name, max_running=max_running, **config)
    _, events = watched(strategy, lengths, scenario, steps=NUM_STEPS)
    return [event for event in events if isinstance(event, BatchConsumed)]


@pytest.mark.parametrize("train_s", [0.0, 7.0])
@pytest.mark.parametrize("max_running", [6, 64])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "oversample"])
def test_both_shells_train_the_same_batches(name: str, max_running: int, train_s: float) -> None:
    config: dict[str, Any] = {"group_size": 4, "rollout_batch_size": 3}
    simulated = batches_of_simulator(name, max_running, trainer=Latency(base_s=train_s), **config)
    by_driver = batches_of_driver(name, max_running, train_s, **config)
    assert [e.group_ids for e in simulated] == [e.group_ids for e in by_driver]
    # The fake engine decodes at whole seconds, so a round that begins between two loses a fraction of one.
    assert [e.time_s for e in simulated] == pytest.approx([e.time_s for e in by_driver], abs=1.5 + NUM_STEPS)


@pytest.mark.parametrize("name", ["sync", "april", "rollover", "bounded_async"])
def test_both_shells_play_the_same_episodes(name: str) -> None:
    """Few turns and answers end at the same time, when the order of the two shells may differ."""
    config: dict[str, Any] = {"group_size": 4, "rollout_batch_size": 3, "max_new_tokens": 400}
    turns = Turns(tokens=TURN, answer_s=TOOL_S, observed_tokens=3)
    simulated = batches_of_simulator(name, 6, turns=turns, **config)
    by_driver = batches_of_driver(name, 6, 0.0, TURN, environment=Tools(), **config)
    assert [e.group_ids for e in simulated] == [e.group_ids for e in by_driver]
    assert [e.time_s for e in simulated] == pytest.approx([e.time_s for e in by_driver], rel=0.05, abs=5)
