"""Strategies: their decisions over small ledgers, and the laws that hold whatever the lengths are."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import Batch, WasteCause
from rollover.engine.base import Capabilities
from rollover.rollout.events import BatchConsumed, Event, GroupDropped, GroupOpened, SampleStarted, SegmentEnded
from rollover.rollout.round import ONE_BY_ONE
from rollover.rollout.state import RolloutState
from rollover.rollout.strategies.rollover import Rollover
from rollover.types import FinishReason, SampleId
from tests.rollout.kit import NAMES, ParityScorer, Rig, assert_trainable, config_of, lognormal, play, strategy_of
from tests.rollout.test_ledger import ABORT, STOP, consumed, ended, failed, opened, restarted, scored, started

N, G = 2, 2


def ready(group_id: int, version: int = 0) -> list[Event]:
    """Events of a group, opened before, up to its last reward."""
    ids = [SampleId(group_id, k) for k in range(G)]
    return [event for i in ids for event in (started(i, version), ended(i, 3, STOP, version=version), scored(i))]


def state_with(num_open: int = 0, *, parked: int = 0, num_ready: int = 0) -> RolloutState:
    """``num_ready`` ready groups, then ``parked`` parked samples, then waiting ones; ``num_open`` open groups."""
    state = RolloutState()
    for i in range(num_ready + num_open):
        state.apply(opened(i, size=G))
    for i in range(num_ready):
        for event in ready(i):
            state.apply(event)
    for sample_id in list(state.ledger.waiting)[:parked]:
        state.apply(started(sample_id))
        state.apply(ended(sample_id, 2, ABORT))
    return state


@pytest.mark.parametrize(
    ("name", "config", "ledger", "expected"),
    [
        ("sync", {}, {}, 2),  # exactly the batch
        ("sync", {}, {"num_open": 1}, 1),  # a dropped group is replaced
        ("sync", {}, {"num_ready": 2}, 0),
        ("oversample", {}, {}, 4),  # twice the batch when nothing else is said
        ("oversample", {"over_sampling_batch_size": 3}, {}, 3),
        ("oversample", {}, {"num_ready": 1}, 3),  # whole groups of the last round count
        ("april", {}, {}, 4),
        ("april", {"over_sampling_batch_size": 5}, {}, 5),
        ("april", {}, {"num_open": 3, "parked": 3}, 1),  # carried-over groups count
        ("april", {}, {"num_open": 2, "num_ready": 1}, 1),  # no refill for those that became ready
        ("april", {"max_staleness": 1, "over_sampling_batch_size": 4}, {"num_open": 3}, 1),
        ("concurrency", {"num_running": 5}, {}, 3),  # whole groups: 3 x 2 >= 5
        ("concurrency", {"num_running": 6}, {"num_open": 2, "parked": 1}, 1),
        ("concurrency", {"num_running": 6}, {"num_open": 3}, 0),
        ("concurrency", {"num_running": 6}, {"num_open": 1, "num_ready": 2}, 2),  # ready ones leave places
        ("concurrency", {"num_running": 99, "max_staleness": 0}, {}, 2),  # the bound rules: N (S + 1)
        ("concurrency", {"num_running": 99, "max_staleness": 1}, {"num_open": 1}, 3),
        ("bounded_async", {"num_running": 6}, {"num_open": 2}, 1),
        ("bounded_async", {"num_running": 99, "max_staleness": 0}, {"num_ready": 2}, 0),
        ("token_budget", {}, {"num_open": 3, "parked": 3}, 1),
        ("sorted", {}, {}, 4),  # a pool
        ("sorted", {}, {"num_open": 1, "num_ready": 1}, 0),  # not used up: it still fills a batch
        ("sorted", {}, {"num_ready": 1}, 3),
        ("tail_rounds", {}, {}, 4),
        ("tail_rounds", {}, {"num_ready": 1}, 1),  # this round has begun: what was dropped is replaced, no more
        ("tail_rounds", {}, {"num_open": 2}, 0),
        ("inflight", {"num_running": 6}, {"num_open": 2}, 1),
        ("threshold", {"num_running": 99}, {}, 3),  # (1 + 0.5) N
        ("threshold", {"num_running": 99, "staleness_threshold": 1.0}, {"num_open": 1, "num_ready": 1}, 2),
        ("threshold", {"num_running": 4}, {}, 2),
        ("windowed", {"num_running": 6}, {"num_open": 2}, 1),
        ("probe", {}, {"num_open": 1}, 1),
        ("fast_lane", {"num_running": 6}, {"num_open": 2}, 1),
    ],
)
def test_groups_to_open(name: str, config: dict[str, Any], ledger: dict[str, int], expected: int) -> None:
    strategy = strategy_of(name, rollout_batch_size=N, group_size=G, **config)
    assert max(0, strategy.groups_to_open(state_with(**ledger).view)) == expected


def test_rollover_believes_the_engine_where_the_user_says_nothing() -> None:
    engine = Capabilities(max_running=8, max_context_tokens=64, prefill_tokens_per_iteration=30.0)
    for said, told in ((None, 30.0), (7.0, 7.0), (math.inf, math.inf)):
        made = config_of("rollover", prefill_tokens_per_iteration=said).build_strategy(engine)
        assert isinstance(made, Rollover) and made.prefill_tokens_per_iteration == told


def test_a_round_is_full_once_no_group_of_it_is_open_and_then_gives_all_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise groups that act or await a reward while nothing is decoded always miss the first batch."""
    monkeypatch.setattr(Rollover, "round", lambda self, view: replace(ONE_BY_ONE, num_batches=3))
    strategy, state = strategy_of("rollover", rollout_batch_size=N, group_size=G), state_with(num_ready=2 * N)
    a, b, later = SampleId(2 * N, 0), SampleId(2 * N, 1), SampleId(2 * N + 1, 0)
    state.apply(opened(a.group, size=G))
    acts = [started(a), ended(a, 3, FinishReason.TURN), started(b), restarted(0), started(b), ended(b, 3, STOP)]
    for event in [*acts, failed(a), scored(b)]:
        assert strategy.select_batch(state.view) is None, f"there is a batch before {event}"
        state.apply(event)
    chosen = strategy.select_batch(state.view)
    assert chosen is not None
    for event in (consumed(0, *chosen), opened(later.group, size=G)):
        state.apply(event)
        assert strategy.select_batch(state.view) is not None and strategy.groups_to_open(state.view) == 0
    state.apply(started(later))  # a new round
    assert strategy.select_batch(state.view) is None


def test_parked_before_fresh_and_oldest_group_first() -> None:
    """A sample that waits beside parked siblings goes before newer groups, parked or not."""
    state = RolloutState([opened(i, size=G) for i in range(3)])
    for i in (SampleId(1, 0), SampleId(0, 1)):
        state.apply(started(i))
        state.apply(ended(i, 2, ABORT))
    state.apply(started(SampleId(0, 0)))
    state.apply(ended(SampleId(0, 0), 0, ABORT))  # stopped before its first token: it waits again
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for name in sorted({*NAMES} - {"token_budget"}):
        assert [*strategy_of(name).samples_to_start(state.view)] == expected


DISCARDING = ("oversample", "tail_rounds")


def test_batches_are_taken_in_order_of_opening() -> None:
    strategy = strategy_of("april", rollout_batch_size=N, group_size=G, max_staleness=4)
    state = state_with(num_ready=1, num_open=1)
    assert strategy.select_batch(state.view) is None
    state.apply(opened(2, size=G))
    for event in ready(2):
        state.apply(event)
    assert strategy.select_batch(state.view) == (0, 2)
    for event in ready(1):
        state.apply(event)
    assert strategy.select_batch(state.view) == (0, 1)


# -- laws over the driver -----------------------------------------------------------------------------------


def heads(batches: dict[int, Batch], since: int) -> list[int]:
    """Staleness of each group's oldest token."""
    return [b.step - g.oldest_version for b in batches.values() if b.step >= since for g in b.groups]


def waste(rig: Rig) -> dict[WasteCause, int]:
    return dict(+rig.ledger.tokens.wasted)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    salt=st.integers(0, 10**6),
    sigma=st.sampled_from([0.0, 0.5, 1.2]),
    max_running=st.integers(1, 24),
    batch_size=st.integers(1, 4),
    group_size=st.integers(1, 3),
    stream_interval=st.integers(1, 7),
    score_s=st.sampled_from([0.0, 0.5, 7.0]),
    train_s=st.sampled_from([0.0, 3.0]),
)
def test_laws_hold_under_any_lengths(
    name: str,
    salt: int,
    sigma: float,
    max_running: int,
    batch_size: int,
    group_size: int,
    stream_interval: int,
    score_s: float,
    train_s: float,
) -> None:
    """Conservation and the bound after every event (see ``kit.assert_lawful``), no slot kept, exact tokens, each
    group trained once, each prompt drawn once."""
    rig, batches = play(
        4,
        name,
        train_s=train_s,
        length=lognormal(6, sigma, salt=salt),
        max_running=max_running,
        stream_interval_tokens=stream_interval,
        scorer=ParityScorer(score_s),
        rollout_batch_size=batch_size,
        group_size=group_size,
    )
    assert_trainable(batches, rig)
    assert rig.engine.stats().num_running == 0 and not rig.ledger.running
    assert rig.source.drawn == list(range(rig.ledger.cursor))
    assert max(rig.scorer.scored.values()) == 1
    tokens = rig.ledger.tokens
    assert tokens.trained == sum(b.num_tokens for b in batches.values())
    assert tokens.decoded == rig.engine.decoded_tokens
    if name not in DISCARDING:
        assert not waste(rig)


@pytest.mark.parametrize("over_sampling", [4, 6, 8, 12])
def test_mean_head_lag_of_april_is_its_over_sampling_ratio_less_one(over_sampling: int) -> None:
    """Little's law: over_sampling - N groups stand at each boundary, N leave per step."""
    n, num_steps, warm_up = 4, 60, 10
    _, batches = play(
        num_steps,
        "april",
        length=lognormal(8, 1.0, cap=200),
        rollout_batch_size=n,
        over_sampling_batch_size=over_sampling,
        max_staleness=40,
        max_new_tokens=200,
        watched=False,
    )
    assert statistics.fmean(heads(batches, warm_up)) == pytest.approx(over_sampling / n - 1, abs=0.1)


@pytest.mark.parametrize("name", ["april", "concurrency", "bounded_async", "inflight"])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_tight_bound_holds_and_is_reached(name: str, max_staleness: int) -> None:
    """Two samples run on and on; the batch of their last legal step waits for them."""

    def length(request: Any) -> int:
        return 200 if request.sample_key == "g0.0." else 3

    rig, batches = play(5, name, length=length, max_staleness=max_staleness, max_new_tokens=200, max_running=8)
    assert_trainable(batches, rig)
    assert [b.step for b in batches.values() if 0 in [g.group_id for g in b.groups]] == [max_staleness]


def test_surplus_groups_lead_the_next_batch() -> None:
    """Four groups become ready in the same tick, a batch takes two: the others are the next batch, without decoding."""
    rig, batches = play(2, "april", length=lambda request: 5)
    assert [[g.group_id for g in b.groups] for b in batches.values()] == [[0, 1], [2, 3]]
    assert rig.engine.num_ticks == 5
    rig, batches = play(2, "oversample", length=lambda request: 5)
    assert [[g.group_id for g in b.groups] for b in batches.values()] == [[0, 1], [2, 3]]
    assert not waste(rig)


def test_oversample_returns_the_prompts_of_discarded_groups_first() -> None:
    def length(request: Any) -> int:
        return 40 if request.sample_key.split(".")[0] in ("g0", "g2") else 4

    rig, batches = play(2, "oversample", length=length)
    assert [g.prompt.columns["row"] for g in batches[0].groups] == [1, 3]
    dropped = [e for e in rig.events if isinstance(e, GroupDropped)]
    assert [e.group_id for e in dropped[:2]] == [0, 2]
    assert all(e.prompt_returned for e in dropped)
    opened_rows = [e.prompt.columns["row"] for e in rig.events if isinstance(e, GroupOpened)]
    assert opened_rows[:8] == [0, 1, 2, 3, 0, 2, 4, 5]
    assert waste(rig) == {WasteCause.DISCARDED_ON_ABORT: 2 * 2 * 4}  # two groups, stopped at 4 tokens a sample
    assert rig.ledger.tokens.live == 2 * 2 * 4  # the surplus of the second round


@pytest.mark.parametrize("name", ["concurrency", "bounded_async"])
def test_concurrency_refills_at_once(name: str) -> None:
    """The number of running samples stays at its target from the first start to the first batch."""
    rig, _ = play(3, name, num_running=5, max_staleness=8, watched=False)
    running, low = 0, []
    for event in rig.events:
        match event:
            case SampleStarted():
                running += 1
            case SegmentEnded() if event.segment.finish_reason is not None:
                low.append(running)
                running -= 1
            case BatchConsumed():
                break
    busy = Counter(low)
    assert max(low) == 5 and busy[5] >= 0.5 * len(low)


@pytest.mark.parametrize("name", NAMES)
def test_groups_without_signal_are_replaced_and_counted(name: str) -> None:
    rig, batches = play(8, name, keep_group=lambda rewards: len(set(rewards)) > 1)
    assert all(len(set(g.rewards_G)) > 1 for b in batches.values() for g in b.groups)
    assert_trainable(batches, rig)
    filtered = [e for e in rig.events if isinstance(e, GroupDropped) and not e.prompt_returned]
    assert filtered and {e.cause for e in filtered} == {WasteCause.FILTER_ZERO_SIGNAL}
    assert rig.ledger.dropped[WasteCause.FILTER_ZERO_SIGNAL] == len(filtered)
    assert waste(rig)[WasteCause.FILTER_ZERO_SIGNAL] > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_started_group_waits_behind_newer_ones_for_long(name: str) -> None:
    """Starvation: however few places there are, staleness stays far below a bound that does not press."""
    bound = {} if name in ("sync", "probe", *DISCARDING) else {"max_staleness": 30}
    _, batches = play(40, name, max_running=3, watched=False, **bound)
    assert max(heads(batches, 0)) <= 6
