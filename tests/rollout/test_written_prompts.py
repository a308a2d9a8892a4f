"""Prompts that the environment writes: an episode begins with an empty turn, whose answer is the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.types import Observation, Prompt, SampleId
from tests.rollout.kit import NAMES, ON_FULL, Prompts, play
from tests.rollout.test_episodes import LIMIT, Game, assert_goes_on, assert_good, killed_and_resumed


class Unwritten(Prompts):
    def prompt(self, index: int) -> Prompt:
        return replace(super().prompt(index), token_ids=())


class Author(Game):
    """Writes the prompt of each sample, and then plays."""

    def answer(self, sample_id: SampleId, turn: int) -> Observation:
        return Observation((7, *sample_id), "asked") if turn == 1 else super().answer(sample_id, turn)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_written_once_and_read_by_the_engine(name: str) -> None:
    author = Author()
    rig, batches = play(6, name, environment=author, source=Unwritten(), max_running=8, max_new_tokens=LIMIT)
    assert_good(batches, rig, author)
    assert max(author.acted.values()) == 1 and rig.ledger.num_failed == 0
    assert all(t.turns[0] == () for b in batches.values() for t in b.trajectories)
    assert all(request.prompt_ids[0] == 7 for request in rig.engine.requests), "no call without a prompt"


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
    assert_good(batches, rig, author)
    assert_goes_on(batches, recorded, author)
