"""Episodes whose prompt is given, and those whose environment writes it: an empty turn begins them, whose answer is the
prompt. Both are exact, and go on as recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.rollout.config import Limits
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


EPISODES = pytest.mark.parametrize(
    ("game", "source"), [pytest.param(Game, Prompts, id="given"), pytest.param(Author, Unwritten, id="written")]
)


@EPISODES
@pytest.mark.parametrize("name", NAMES)
def test_episodes_are_exact_under_every_strategy(name: str, game: type[Game], source: type[Prompts]) -> None:
    environment = game()
    rig, batches = play(6, name, environment=environment, source=source(), max_running=8, max_new_tokens=LIMIT)
    assert_good(batches, rig, environment)
    trained = [t for b in batches.values() for t in b.trajectories]
    assert max(t.num_turns for t in trained) > 2 and any(t.observations for t in trained)
    assert rig.ledger.tokens.observed_in_batches > 0 and rig.ledger.num_failed == 0
    assert max(environment.acted.values()) == 1, "no turn is answered twice"
    unsettled = {s.sample_id for g in rig.ledger.unconsumed() for s in g.samples}
    assert environment.open <= unsettled, "a settled episode is open"
    if game is Author:
        assert all(t.turns[0] == () for t in trained)
        assert all(request.prompt_ids[0] == 7 for request in rig.engine.requests), "no call without a prompt"


@EPISODES
@settings(max_examples=14, deadline=None)
@given(
    name=st.sampled_from(ON_FULL),
    delay_s=st.sampled_from([0.0, 2.0, 30.0]),
    fails=st.sampled_from([0.0, 0.1]),
    stop_after=st.integers(1, 90),
    save_every=st.integers(1, 9),
)
def test_a_run_stopped_at_any_event_goes_on_as_recorded(
    game: type[Game], source: type[Prompts], name: str, delay_s: float, fails: float, stop_after: int, save_every: int
) -> None:
    limits = Limits(save_every_tokens=save_every)
    rig, batches, recorded, environment = killed_and_resumed(
        name, lambda: game(delay_s, fails), stop_after, source=source(), limits=limits, max_new_tokens=LIMIT
    )
    assert_good(batches, rig, environment)
    assert_goes_on(batches, recorded, environment)
