"""Strategies: their decisions over small ledgers, and the laws that hold whatever the lengths are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import WasteCause
from rollover.engine.base import Capabilities
from rollover.rollout.config import Limits
from rollover.rollout.events import CheckpointSaved, Event, GroupDropped, GroupOpened
from rollover.rollout.journal import Journal, restart
from rollover.rollout.round import ONE_BY_ONE
from rollover.rollout.state import RolloutState
from rollover.rollout.strategies.rollover import Rollover
from rollover.types import FinishReason, SampleId
from tests.rollout.kit import (
    NAMES,
    VARIANTS,
    ParityScorer,
    Rig,
    assert_trainable,
    config_of,
    content,
    lognormal,
    play,
    strategy_of,
)
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


def test_a_round_without_an_open_group_is_full_and_gives_all_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("name", "expected"), [("april", (0, 1)), ("sorted", (1, 3)), ("inflight", (1, 3)), ("april, drop_surplus", (1, 3))]
)
def test_batches_are_taken_in_order_of_opening_or_of_ending(name: str, expected: tuple[int, ...]) -> None:
    strategy = strategy_of(name, rollout_batch_size=N, group_size=G, max_staleness=4)
    state = state_with(num_open=4)
    for i in (3, 1, 0, 2):
        for event in ready(i):
            state.apply(event)
    assert strategy.select_batch(state.view) == expected


# -- laws over the driver -----------------------------------------------------------------------------------


def waste(rig: Rig) -> dict[WasteCause, int]:
    return dict(+rig.ledger.tokens.wasted)


def dropping(share: float, seed: int) -> Callable[[Sequence[float]], bool]:
    """A filter that drops such a share of groups, by lot."""
    lot = random.Random(seed)
    return lambda rewards: lot.random() >= share


RUNS = st.fixed_dictionaries(
    {
        "length": st.builds(
            lognormal, st.sampled_from([6, 15]), st.sampled_from([0.0, 0.5, 1.2]), salt=st.integers(0, 10**6)
        ),
        "max_running": st.integers(1, 24),
        "rollout_batch_size": st.integers(1, 4),
        "group_size": st.integers(1, 3),
        "unit": st.sampled_from(["group", "sample"]),
        "max_new_tokens": st.integers(3, 60),
        "stop_token_ids": st.sampled_from([(), (7,)]),
        "stream_interval_tokens": st.integers(1, 9),
        "limits": st.builds(Limits, save_every_tokens=st.integers(1, 20)),
        "in_flight_update": st.booleans(),
        "scorer": st.builds(ParityScorer, st.sampled_from([0.0, 0.5, 7.0])),
        "keep_group": st.builds(dropping, st.sampled_from([0.0, 0.3]), st.integers(0, 10**6)),
        "train_s": st.sampled_from([0.0, 3.0]),
    }
)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(options=RUNS, extra_staleness=st.integers(0, 3))
def test_laws_hold_under_any_lengths(name: str, options: dict[str, Any], extra_staleness: int) -> None:
    """Conservation and the bound after every event (see ``kit.assert_lawful``), no slot kept, exact tokens across any
    number of aborts, each group trained once, each prompt drawn once; and each batch comes."""
    if name != "sync":
        options |= {"max_staleness": (name in ("april", "oversample", "token_budget")) + extra_staleness}
    rig, batches = play(4, name, **options)
    assert_trainable(batches, rig)
    assert rig.engine.stats().num_running == 0 and not rig.ledger.running
    siblings = options["group_size"] if options["unit"] == "sample" else 1
    assert rig.source.drawn == [index // siblings for index in range(rig.ledger.cursor)]
    assert max(rig.scorer.scored.values()) == 1
    tokens = rig.ledger.tokens
    assert tokens.trained == sum(b.num_tokens for b in batches.values())
    assert tokens.decoded == rig.engine.decoded_tokens
    discards = {WasteCause.DISCARDED_ON_ABORT} if name == "oversample" else set()
    assert waste(rig).keys() <= {WasteCause.FILTER_ZERO_SIGNAL} | discards
    for trajectory in (t for b in batches.values() for t in b.trajectories):
        calls = [r for r in rig.engine.requests if r.sample_key == f"{trajectory.sample_id}."]
        assert len({r.seed for r in calls}) == 1
        assert all(r.response_ids == trajectory.token_ids[: len(r.response_ids)] for r in calls)
        assert options["in_flight_update"] or all(s.kv_version == s.policy_version for s in trajectory.segments)
    assert all(len(r.response_ids) < options["max_new_tokens"] for r in rig.engine.requests)


@pytest.mark.parametrize(
    ("name", "rows", "wasted"),
    [
        ("april", [[0, 1], [2, 3]], {}),
        ("oversample", [[0, 1], [2, 3]], {}),
        ("april, drop_surplus", [[0, 1], [4, 5]], {WasteCause.SURPLUS_GROUP: 2 * 2 * 2 * 5}),
    ],
)
def test_surplus_groups_lead_or_are_dropped(name: str, rows: list[list[int]], wasted: dict[WasteCause, int]) -> None:
    """Four groups of two samples become ready in the same tick, a batch takes two. Without the others, the next batch
    takes as long; and their prompts are lost too."""
    rig, batches = play(2, name, length=lambda request: 5)
    assert [[g.prompt.columns["row"] for g in b.groups] for b in batches.values()] == rows
    assert waste(rig) == wasted
    assert rig.engine.num_ticks == (10 if wasted else 5)


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


@pytest.mark.parametrize("name", VARIANTS)
def test_groups_without_signal_are_replaced_and_counted(name: str) -> None:
    rig, batches = play(8, name, keep_group=lambda rewards: len(set(rewards)) > 1)
    assert all(len(set(g.rewards_G)) > 1 for b in batches.values() for g in b.groups)
    assert_trainable(batches, rig)
    filtered = [e for e in rig.events if isinstance(e, GroupDropped) and not e.prompt_returned]
    assert filtered and {e.cause for e in filtered} == {WasteCause.FILTER_ZERO_SIGNAL}
    assert rig.ledger.dropped[WasteCause.FILTER_ZERO_SIGNAL] == len(filtered)
    assert waste(rig)[WasteCause.FILTER_ZERO_SIGNAL] > 0


def few_places(unit: str) -> dict[str, Any]:
    """And long tails, so that samples are parked, run out of their budget and go on."""
    limits, scorer = Limits(save_every_tokens=5), ParityScorer(0.5)
    sizes = {"unit": unit, "max_running": 7, "max_new_tokens": 40, "stream_interval_tokens": 3}
    return {"train_s": 1.0, "checkpoint_every": 2, "lockstep": True, "limits": limits, "scorer": scorer, **sizes}


@pytest.mark.parametrize("unit", ["group", "sample"])
@pytest.mark.parametrize("name", [name for name in NAMES if not config_of(name).strategy.overlaps_training])
def test_a_deterministic_run_repeats_its_batches_also_after_a_restart(name: str, unit: str) -> None:
    rig, batches = play(6, name, **few_places(unit))
    assert_trainable(batches, rig)
    assert rig.ledger.tokens.decoded == rig.engine.decoded_tokens
    expected = {step: content(batch) for step, batch in batches.items()}
    _, again = play(6, name, **few_places(unit))
    assert {step: content(batch) for step, batch in again.items()} == expected

    for share in (0.15, 0.3, 0.9):
        written = rig.events[: int(share * len(rig.events))]
        journal = Journal(Path(":memory:"))
        journal.append(written)
        newest = max((e.step for e in written if isinstance(e, CheckpointSaved)), default=0)
        state = restart(journal, step=newest, redo_round=True)
        _, resumed = play(6, name, state=state, journal=journal, **few_places(unit))
        assert {s: content(b) for s, b in resumed.items()} == {s: expected[s] for s in resumed}, f"cut at {share}"
        journal.close()
