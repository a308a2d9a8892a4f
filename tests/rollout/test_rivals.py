"""What is particular to each strategy of the literature, and that none of them locks up whatever the timing is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import WasteCause
from rollover.rollout.actions import ConsumeBatch, StartSample, StopAll
from rollover.rollout.config import Limits
from rollover.rollout.events import BatchConsumed, Event
from rollover.rollout.scheduler import GroupRules, Scheduler
from rollover.rollout.state import RolloutState
from rollover.types import SampleId
from tests.rollout.kit import NAMES, Prompts, assert_bounded, play, strategy_of
from tests.rollout.test_ledger import ABORT, STOP, consumed, ended, opened, published, scored, started
from tests.rollout.test_strategies import G, N, ready, waste


class Shop:
    """A shell around the scheduler without time: what happens next is drawn by lot. Each sample needs so many tokens;
    a generation call decodes some of them, never more than its budget."""

    def __init__(self, name: str, rng: random.Random, *, places: int, filtered: float, **config: Any) -> None:
        self.strategy = strategy_of(name, max_running=places, max_new_tokens=40, **config)
        self.rng, self.state = rng, RolloutState()
        self.ledger = self.state.ledger
        self.budgets: dict[SampleId, int | None] = {}
        self.batch_is_due = False
        self.scheduler = Scheduler(
            strategy=self.strategy,
            source=Prompts(),
            state=self.state,
            max_running=places,
            limits=Limits(),
            rules=GroupRules(keep_group=lambda rewards: rng.random() >= filtered),
            emit=self.check,
        )

    def check(self, event: Event) -> None:
        assert_bounded(self.ledger, self.strategy.batch_size, self.strategy.max_staleness)
        if isinstance(event, BatchConsumed):
            assert len(set(event.group_ids)) == self.strategy.batch_size

    def play(self, num_batches: int) -> None:
        """Until so many batches are consumed.

        Raises:
            AssertionError: a law is broken, or nothing can happen any more.
        """
        scheduler, ledger, rng = self.scheduler, self.ledger, self.rng
        for step in range(num_batches):
            scheduler.begin_round()
            self.act()
            while not self.batch_is_due:
                self.happen()
            self.batch_is_due = False
            scheduler.consume(0.0)
            while rng.random() < 0.8 and (ledger.running or ledger.unscored):
                self.happen()  # while the trainer trains
            scheduler.published(step + 1, 0.0, pause_s=0.0)
            ledger.check()

    def act(self) -> None:
        self.batch_is_due = False
        for action in self.scheduler.decide(0.0):
            match action:
                case StartSample(sample_id=sample_id, token_budget=budget):
                    assert budget is None or budget > 0
                    self.budgets[sample_id] = budget
                case StopAll():
                    for sample_id in list(self.ledger.running):
                        self.end_call(sample_id, stopped=True)
                    self.act()
                case ConsumeBatch():
                    self.batch_is_due = True

    def happen(self) -> None:
        """A sample is scored, finishes, or parks: at the end of its budget, or because it was stopped."""
        ledger, rng = self.ledger, self.rng
        assert ledger.running or ledger.unscored, "no batch, and nothing is running or being scored"
        if ledger.unscored and (not ledger.running or rng.random() < 0.5):
            self.scheduler.scored(rng.choice(list(ledger.unscored)), 0.0, 0.0)
        else:
            self.end_call(rng.choice(list(ledger.running)), stopped=rng.random() < 0.05)
        self.act()

    def end_call(self, sample_id: SampleId, *, stopped: bool) -> None:
        num_left = 1 + random.Random(str(sample_id)).randrange(40) - self.ledger.sample(sample_id).num_tokens
        num_tokens = self.rng.randrange(num_left) if stopped else num_left
        num_tokens = min(num_tokens, self.budgets[sample_id] or num_tokens)
        event = ended(
            sample_id, num_tokens, STOP if num_tokens == num_left else ABORT, version=self.ledger.policy_version
        )
        self.scheduler.segment_ended(sample_id, event.segment, 0.0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    batch_size=st.integers(1, 4),
    group_size=st.integers(1, 3),
    places=st.integers(1, 16),
    filtered=st.sampled_from([0.0, 0.3]),
    extra_staleness=st.integers(0, 3),
)
def test_no_strategy_locks_up_or_breaks_the_bound(
    name: str, seed: int, batch_size: int, group_size: int, places: int, filtered: float, extra_staleness: int
) -> None:
    """Under any timing, with groups dropped and few places: each batch fills, is rightly chosen, and the invariant of
    the theorem holds after every event."""
    rng = random.Random(seed)
    config: dict[str, Any] = {"rollout_batch_size": batch_size, "group_size": group_size}
    needed = {"april": 1, "oversample": 1, "token_budget": 1, "sorted": 1, "tail_rounds": 1, "threshold": 1}
    if name not in ("sync", "probe"):
        config["max_staleness"] = needed.get(name, 0) + extra_staleness
    if name == "windowed":
        config["window_groups"] = rng.randint(1, 3 * batch_size)
    if name == "token_budget":
        config["tokens_per_round"] = rng.randint(1, 50)
    Shop(name, rng, places=places, filtered=filtered, **config).play(6)


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


def test_some_train_groups_in_the_order_in_which_they_became_whole() -> None:
    for name, config in (("sorted", {}), ("inflight", {}), ("april", {"drop_surplus": True})):
        strategy = strategy_of(name, rollout_batch_size=N, group_size=G, max_staleness=4, **config)
        state = RolloutState([opened(i, size=G) for i in range(4)])
        for i in (3, 1, 0, 2):
            for event in ready(i):
                state.apply(event)
        assert strategy.select_batch(state.view) == (1, 3)


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


def test_surplus_groups_are_kept_unless_asked_for() -> None:
    """Four groups become ready in the same tick, a batch takes two."""
    rig, batches = play(2, "april", length=lambda request: 5, drop_surplus=True)
    assert [[g.group_id for g in b.groups] for b in batches.values()] == [[0, 1], [4, 5]]
    assert waste(rig) == {WasteCause.SURPLUS_GROUP: 2 * 2 * 2 * 5}  # in each of two rounds two groups of two samples
    rows = [g.prompt.columns["row"] for b in batches.values() for g in b.groups]
    assert rows == [0, 1, 4, 5]  # their prompts are lost too


def test_a_long_round_runs_the_prompts_that_lost_in_short_ones() -> None:
    """Unfinished groups and whole ones beyond the batch alike; until they fill a batch they wait."""
    strategy = strategy_of("tail_rounds", rollout_batch_size=2, group_size=1, over_sampling_batch_size=3)
    state = RolloutState()
    scheduler = Scheduler(strategy=strategy, source=Prompts(), state=state, max_running=9, limits=Limits())

    def play_round(ends: tuple[bool, ...]) -> list[int]:
        """Rows that a round starts; of its samples those end that ``ends`` says, all at once."""
        scheduler.begin_round()
        ids = [a.sample_id for a in scheduler.decide(0.0) if isinstance(a, StartSample)]
        rows = [state.ledger.sample(i).prompt.columns["row"] for i in ids]
        for i, has_ended in zip(ids, ends, strict=True):
            event = ended(i, 3, STOP if has_ended else ABORT, version=state.ledger.policy_version)
            scheduler.segment_ended(i, event.segment, 0.0)
            if has_ended:
                scheduler.scored(i, 1.0, 0.0)
        scheduler.published(scheduler.consume(0.0).step + 1, 0.0, pause_s=0.0)
        state.ledger.check()
        return rows

    assert play_round((True, False, True)) == [0, 1, 2]
    assert play_round((True, True, True)) == [3, 4, 5]
    assert play_round((True, True)) == [1, 5]
    assert play_round((True, True, False)) == [6, 7, 8]
    assert state.ledger.dropped == {WasteCause.DISCARDED_ON_ABORT: 2, WasteCause.SURPLUS_GROUP: 1}
