"""Prompts that the environment writes: an episode begins with an empty turn, whose answer is the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import Batch
from rollover.rollout.generation import sample_seed
from rollover.types import FinishReason, Observation, Prompt, SampleId, Trajectory
from tests.engine.fake import logprob_at, token_at
from tests.rollout.kit import NAMES, ON_FULL, SEED, Prompts, Rig, play
from tests.rollout.test_episodes import LIMIT, Game, assert_goes_on, killed_and_resumed


class Unwritten(Prompts):
    def prompt(self, index: int) -> Prompt:
        return replace(super().prompt(index), token_ids=())


class Author(Game):
    """Writes the prompt of each sample, and then plays."""

    def answer(self, sample_id: SampleId, turn: int) -> Observation:
        return Observation((7, *sample_id), "asked") if turn == 1 else super().answer(sample_id, turn)


def assert_decoded(trajectory: Trajectory) -> None:
    """Every token behind an empty turn is what the engine's script has there."""
    first, *rest = trajectory.segments
    assert (first.token_ids, first.finish_reason) == ((), FinishReason.TURN)
    turn, position = 1, 0
    for segment in rest:
        seed = sample_seed(SEED, trajectory.sample_id, turn)
        for token, logprob in zip(segment.token_ids, segment.rollout_logprobs, strict=True):
            assert token == token_at(seed, position, segment.policy_version)
            assert logprob == logprob_at(seed, position, segment.policy_version)
            position += 1
        if segment.finish_reason is FinishReason.TURN:
            turn, position = turn + 1, 0


def assert_written(batches: dict[int, Batch], rig: Rig) -> None:
    for step, batch in batches.items():
        for trajectory in batch.trajectories:
            assert trajectory.observations[0].token_ids == (7, *trajectory.sample_id)
            assert_decoded(trajectory)
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
    rig, batches, recorded, author = killed_and_resumed(
        name, lambda: Author(delay_s, fails), stop_after, source=Unwritten(), max_new_tokens=LIMIT
    )
    assert_written(batches, rig)
    assert_goes_on(batches, recorded, author)
