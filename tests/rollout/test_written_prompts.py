"""Prompts that the environment writes: an episode begins with an empty turn, whose answer is the prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.errors import RewardError
from rollover.rollout.generation import sample_seed
from rollover.rollout.journal import Journal, restart
from rollover.types import Batch, FinishReason, Observation, Prompt, SampleId, Trajectory
from tests.engine.fake import logprob_at, token_at
from tests.rollout.kit import NAMES, ON_FULL, SEED, Prompts, Rig, make_rig, play, with_stop
from tests.rollout.test_episodes import LIMIT, Game
from tests.virtual_time import run


class Unwritten(Prompts):
    def prompt(self, index: int) -> Prompt:
        return replace(super().prompt(index), token_ids=())


class Author(Game):
    """Writes the prompt of each sample, and then plays."""

    def answer(self, sample_id: SampleId, turn: int) -> Observation:
        return Observation((7, *sample_id), "asked") if turn == 1 else super().answer(sample_id, turn)


def assert_written(batches: dict[int, Batch], rig: Rig) -> None:
    for step, batch in batches.items():
        for trajectory in batch.trajectories:
            first, *rest = trajectory.segments
            assert (first.token_ids, first.finish_reason) == ((), FinishReason.TURN)
            assert trajectory.observations[0].token_ids == (7, *trajectory.sample_id)
            turn, position = 1, 0
            for segment in rest:
                seed = sample_seed(SEED, trajectory.sample_id, turn)
                for token, logprob in zip(segment.token_ids, segment.rollout_logprobs, strict=True):
                    assert token == token_at(seed, position, segment.policy_version)
                    assert logprob == logprob_at(seed, position, segment.policy_version)
                    position += 1
                if segment.finish_reason is FinishReason.TURN:
                    turn, position = turn + 1, 0
            assert all(0 <= step - v <= rig.strategy.max_staleness for v in trajectory.policy_versions)
    rig.ledger.check()


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_written_once_and_read_by_the_engine(name: str) -> None:
    author = Author()
    rig, batches = play(6, name, environment=author, source=Unwritten(), max_running=8, max_new_tokens=LIMIT)
    assert_written(batches, rig)
    assert max(author.acted.values()) == 1 and rig.ledger.num_failed == 0
    for request in rig.engine.requests:
        assert request.prompt_ids[0] == 7, "no call without a prompt"


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(ON_FULL),
    delay_s=st.sampled_from([0.0, 2.0, 30.0]),
    fails=st.sampled_from([0.0, 0.1]),
    stop_after=st.integers(1, 70),
)
def test_a_run_stopped_at_any_event_writes_no_prompt_twice(
    name: str, delay_s: float, fails: float, stop_after: int
) -> None:
    class Killed(Exception):
        pass

    async def until_killed(journal: Journal) -> None:
        left = stop_after

        def watch(event: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed

        author = Author(delay_s, fails)
        rig = make_rig(
            name, environment=author, source=Unwritten(), journal=journal, observer=watch, max_new_tokens=LIMIT
        )
        try:
            while True:
                await rig.publish((await rig.driver.next_batch()).step + 1)
        except (Killed, RewardError):
            pass

    async def rest(journal: Journal) -> tuple[Rig, dict[int, Batch], dict[SampleId, Trajectory], Game]:
        state = restart(journal, step=0, redo_round=False)
        recorded = {s.sample_id: s.trajectory for g in state.ledger.groups.values() for s in g.samples}
        author = Author(delay_s, fails)
        rig = make_rig(name, environment=author, source=Unwritten(), state=state, journal=journal, max_new_tokens=LIMIT)
        return rig, await with_stop(rig, rig.train(4)), recorded, author

    journal = Journal(Path(":memory:"))
    run(until_killed(journal))
    fresh = Journal(Path(":memory:"))
    fresh.append([event for _, event in journal.read()] or [])
    fresh._is_known = False
    rig, batches, recorded, author = run(rest(fresh))
    assert_written(batches, rig)
    for trajectory in (t for b in batches.values() for t in b.trajectories):
        if (before := recorded.get(trajectory.sample_id)) is not None:
            assert trajectory.observations[: len(before.observations)] == before.observations
            answered = {turn for i, turn in author.acted if i == trajectory.sample_id}
            assert answered.isdisjoint(range(1, len(before.observations) + 1)), "a recorded turn was answered again"
