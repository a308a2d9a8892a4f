"""What is particular to each strategy of the literature."""

from __future__ import annotations

import pytest

from rollover.batch import WasteCause
from rollover.rollout.state import RolloutState
from rollover.types import SampleId
from tests.rollout.kit import strategy_of
from tests.rollout.test_ledger import ABORT, STOP, consumed, ended, opened, published, scored, started
from tests.rollout.test_scheduler import Shell
from tests.rollout.test_strategies import G, N, ready


def test_a_token_budget_is_granted_once_per_round() -> None:
    strategy = strategy_of("token_budget", rollout_batch_size=N, group_size=G, tokens_per_round=3)
    state = RolloutState([opened(i, size=G) for i in range(2)])
    first, *others = strategy.samples_to_start(state.view)
    assert strategy.token_budget(state.view, first) == 3
    for i in (first, others[0]):
        state.apply(started(i))
    state.apply(ended(first, 2, ABORT))
    assert [*strategy.samples_to_start(state.view)] == [first, *others[1:]]  # its call has failed
    state.apply(started(first))
    state.apply(ended(first, 3, ABORT))
    assert [*strategy.samples_to_start(state.view)] == others[1:]  # the rest have one left
    for i in others[1:]:
        state.apply(started(i))
        state.apply(ended(i, 3, ABORT))
    assert [*strategy.samples_to_start(state.view)] == []  # one still runs on its budget
    state.apply(ended(others[0], 3, ABORT))
    assert [*strategy.samples_to_start(state.view)] == [first, *others]  # another round under the same weights
    state.apply(started(first))
    state.apply(ended(first, 1, STOP))
    state.apply(published(1))
    assert [*strategy.samples_to_start(state.view)] == others  # new weights: a new round


@pytest.mark.parametrize(("window", "expected"), [(1, None), (2, None), (3, None), (4, (1, 3)), (5, (1, 3))])
def test_the_window_reaches_from_the_oldest_open_group(window: int, expected: tuple[int, ...] | None) -> None:
    strategy = strategy_of("windowed", rollout_batch_size=N, group_size=G, window_groups=window, max_staleness=4)
    state = RolloutState([opened(i, size=G) for i in range(5)])
    state.apply(started(SampleId(0, 0)))
    for i in (4, 3, 1):
        for event in ready(i):
            state.apply(event)
    assert strategy.select_batch(state.view) == expected
    for i in (SampleId(0, 0), SampleId(0, 1)):
        if i.index:
            state.apply(started(i))
        state.apply(ended(i, 2, STOP))
        state.apply(scored(i))
    assert strategy.select_batch(state.view) == (0, 1)  # the head was ready: taken first, it moves the window on


def test_probes_first_then_the_groups_with_the_longest_estimate() -> None:
    strategy = strategy_of("probe", rollout_batch_size=3, group_size=2)
    state = RolloutState([opened(i, size=2) for i in range(3)])
    order = [*strategy.samples_to_start(state.view)]
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    for i, length in ((0, 5), (1, 9)):
        state.apply(started(SampleId(i, 0)))
        state.apply(ended(SampleId(i, 0), length, STOP))
    state.apply(started(SampleId(2, 0)))
    assert [*strategy.samples_to_start(state.view)] == [(2, 1), (1, 1), (0, 1)]  # unknown counts as the cap


def test_the_oldest_unfinished_samples_want_the_fast_lane() -> None:
    strategy = strategy_of("fast_lane", rollout_batch_size=2, group_size=2, fast_lane_samples=3)
    state = RolloutState([opened(i, size=2) for i in range(3)])
    ids = [SampleId(g, i) for g in range(3) for i in range(2)]
    assert [strategy.wants_fast_lane(state.view, i) for i in ids] == [True, True, True, False, False, False]
    state.apply(started(ids[0]))
    state.apply(ended(ids[0], 2, STOP))
    assert [strategy.wants_fast_lane(state.view, i) for i in ids[1:]] == [True, True, True, False, False]


def test_the_threshold_is_a_quota_between_two_updates() -> None:
    """Consuming opens nothing; publishing does; what is carried over counts."""
    strategy = strategy_of("threshold", rollout_batch_size=4, group_size=1, staleness_threshold=0.5, num_running=99)
    state = RolloutState([opened(i) for i in range(6)])
    assert strategy.groups_to_open(state.view) == 0
    for i in range(4):
        for event in (started(SampleId(i, 0)), ended(SampleId(i, 0), 1, STOP), scored(SampleId(i, 0))):
            state.apply(event)
    state.apply(consumed(0, 0, 1, 2, 3))
    assert strategy.groups_to_open(state.view) == 0
    state.apply(published(1))
    assert strategy.groups_to_open(state.view) == 4  # (1 + 0.5) 4, less 2 carried over


def test_a_long_round_runs_the_prompts_that_lost_in_short_ones() -> None:
    """Unfinished groups and whole ones beyond the batch alike; until they fill a batch they wait."""
    shell = Shell("tail_rounds", max_running=9, rollout_batch_size=2, over_sampling_batch_size=3)

    def play_round(ends: tuple[bool, ...]) -> list[int]:
        """Rows that a round starts; of its samples those end that ``ends`` says, all at once."""
        started = shell.started()
        rows = [shell.state.ledger.groups[i].prompt.columns["row"] for i in started]
        for i, has_ended in zip(started, ends, strict=True):
            shell.ends(i, STOP if has_ended else ABORT)
        shell.consume()
        shell.publish()
        shell.state.ledger.check()
        return rows

    assert play_round((True, False, True)) == [0, 1, 2]
    assert play_round((True, True, True)) == [3, 4, 5]
    assert play_round((True, True)) == [1, 5]
    assert play_round((True, True, False)) == [6, 7, 8]
    assert shell.state.ledger.dropped == {WasteCause.DISCARDED_ON_ABORT: 2, WasteCause.SURPLUS_GROUP: 1}
