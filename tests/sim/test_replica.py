"""A replica decodes one token per call and iteration, and time is c0 (1 + B / B0) an iteration."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.sim.dispatch import ReplicaPool
from rollover.sim.replica import Call, Replica
from rollover.sim.scenario import ReplicaModel
from rollover.types import SampleId


def call(
    group: int, num_tokens: int, *, prompt: int = 10, response: int = 0, index: int = 0, whole: bool = True
) -> Call:
    return Call(
        sample_id=SampleId(group, index),
        prompt=group,
        prompt_tokens=prompt,
        response_tokens=response,
        num_tokens=num_tokens,
        is_whole=whole,
        start_s=0.0,
        policy_version=0,
    )


def replica_with(calls: Iterable[Call], **model: float) -> Replica:
    replica = Replica(ReplicaModel(**({"c0_s": 1.0, "b0": 4.0} | model)))  # type: ignore[arg-type]
    for c in calls:
        replica.add(c)
    return replica


def drain(replica: Replica) -> dict[int, float]:
    """When each call ends, by group."""
    ends: dict[int, float] = {}
    while (now_s := replica.next_s()) < math.inf:
        replica.advance(now_s)
        for done in replica.finished():
            assert done.num_decoded == done.num_tokens
            ends[done.sample_id.group] = now_s
    assert not replica.calls
    return ends


def test_an_iteration_takes_longer_the_more_samples_run() -> None:
    # Three run for 10 iterations at 1 + 3/4 s, two for 10 more at 1 + 2/4 s, one for 20 more at 1 + 1/4 s.
    ends = drain(replica_with([call(0, 10), call(1, 20), call(2, 40)]))
    assert ends == pytest.approx({0: 17.5, 1: 17.5 + 15, 2: 17.5 + 15 + 25})


def test_sending_a_call_takes_its_time_once_for_each() -> None:
    replica = replica_with([call(0, 10), call(1, 10), call(2, 10)], call_s=0.5, b0=1e9)
    assert drain(replica) == pytest.approx(dict.fromkeys((0, 1, 2), 1.5 + 10))


def test_prefill_holds_up_everybody_and_siblings_share_their_prompt() -> None:
    replica = replica_with([call(0, 10, prompt=100), call(0, 10, prompt=100, index=1)], prefill_tokens_per_s=50, b0=1e9)
    assert replica.prefilled_tokens == 100
    assert drain(replica) == pytest.approx({0: 2.0 + 10.0})


def test_a_stopped_call_keeps_whole_tokens_and_resumes_without_prefill() -> None:
    replica = replica_with([call(0, 10, prompt=100)], prefill_tokens_per_s=50, b0=1e9)
    replica.advance(2.0 + 4.5)
    (stopped,) = replica.stop()
    assert stopped.num_decoded == 4
    assert replica.can_resume(SampleId(0, 0))
    replica.add(call(0, 6, prompt=100, response=4))
    assert replica.prefilled_tokens == 100
    assert drain(replica)[0] == pytest.approx(6.5 + 6, abs=1)


def test_new_weights_cost_the_caches() -> None:
    replica = replica_with([call(0, 10, prompt=100)], prefill_tokens_per_s=50, b0=1e9)
    replica.advance(2.0 + 4.0)
    replica.stop()
    replica.recompute(1)
    resumed = call(0, 6, prompt=100, response=4)
    replica.add(resumed)
    assert replica.prefilled_tokens == 100 + 104
    assert resumed.num_prefilled_tokens == 4


def test_running_samples_pay_for_new_weights_where_they_stand() -> None:
    replica = replica_with([call(0, 10, prompt=100), call(0, 10, prompt=100, index=1)], prefill_tokens_per_s=50, b0=1e9)
    replica.advance(2.0 + 4.0)
    replica.recompute(1)
    assert replica.prefilled_tokens == 100 + 100 + 2 * 4
    assert {c.num_prefilled_tokens for c in replica.calls.values()} == {4}
    assert drain(replica)[0] == pytest.approx(2 + 10 + 108 / 50)


def test_when_the_cache_is_full_the_youngest_waits_and_is_prefilled_again() -> None:
    # 10 + 10 tokens of prompt and room for 30: after 5 iterations it is full.
    replica = replica_with([call(0, 10), call(1, 10)], kv_tokens=30, b0=1e9)
    ends = drain(replica)
    assert replica.num_preempted == 1
    assert ends == pytest.approx({0: 10, 1: 15})
    assert replica.prefilled_tokens == 10 + 10 + 15


def test_parked_caches_go_before_anybody_waits() -> None:
    replica = replica_with([call(0, 10)], kv_tokens=45, b0=1e9)
    replica.advance(5.0)
    replica.stop()
    assert replica.can_resume(SampleId(0, 0))
    replica.add(call(1, 12))
    replica.add(call(2, 12))
    drain(replica)
    assert replica.num_preempted == 0
    assert not replica.can_resume(SampleId(0, 0))


def test_one_sample_larger_than_the_cache_still_runs() -> None:
    assert drain(replica_with([call(0, 50)], kv_tokens=30, b0=1e9)) == pytest.approx({0: 50})


jobs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.sampled_from([0.0, 0.5, 3.0, 11.0])), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(jobs=jobs, kv_tokens=st.sampled_from([math.inf, 35.0, 90.0]), max_running=st.sampled_from([1, 3, 100]))
def test_no_token_is_lost_or_made_up_whatever_the_room(
    jobs: list[tuple[int, int, float]], kv_tokens: float, max_running: int
) -> None:
    """Calls arrive over time, are all stopped once in between, and go on: each decodes exactly its tokens."""
    model = ReplicaModel(c0_s=1.0, b0=4.0, prefill_tokens_per_s=20.0, kv_tokens=kv_tokens, max_running=max_running)
    replica = Replica(model)
    decoded = dict.fromkeys(range(len(jobs)), 0)
    now_s = 0.0

    def until(limit_s: float) -> None:
        nonlocal now_s
        while (next_s := replica.next_s()) <= limit_s:
            assert next_s >= now_s
            now_s = next_s
            replica.advance(now_s)
            for done in replica.finished():
                decoded[done.sample_id.group] += done.num_decoded
        now_s = max(now_s, limit_s)
        replica.advance(now_s)

    for group, (tokens, prompt, wait_s) in enumerate(jobs):
        replica.add(call(group, tokens, prompt=prompt))
        assert len(replica._running) <= max_running
        until(now_s + wait_s)
    for stopped in replica.stop():
        group = stopped.sample_id.group
        decoded[group] += stopped.num_decoded
        assert 0 <= stopped.num_decoded <= stopped.num_tokens
        if left := jobs[group][0] - decoded[group]:
            replica.add(call(group, left, prompt=jobs[group][1], response=decoded[group]))
    while replica.next_s() < math.inf:
        until(replica.next_s())
    assert [decoded[i] for i in range(len(jobs))] == [tokens for tokens, _, _ in jobs]
    assert replica._base_tokens == pytest.approx(0, abs=1e-6)


def test_what_is_prefilled_at_the_same_moment_shares_the_call() -> None:
    replica = replica_with([call(0, 10), call(1, 10)], prefill_tokens_per_s=10, prefill_call_s=3.0, b0=1e9)
    replica.advance(5.0 + 4.0)
    replica.add(call(2, 10))
    # 3 s and twice 1 s, 4 iterations; then 3 s and 1 s, 6 iterations and 4 more.
    assert drain(replica) == pytest.approx({0: 19.0, 1: 19.0, 2: 23.0})


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_the_least_loaded_replica_is_found(rng: random.Random) -> None:
    replicas = [Replica(ReplicaModel(c0_s=1.0, b0=rng.choice([2.0, 4.0, 5.0])), i) for i in range(rng.randint(2, 6))]
    pool = ReplicaPool(replicas)
    for group in range(50):
        found = pool.place(SampleId(group, 0), fast_lane=False)
        assert (found.occupancy, found.index) == min((r.occupancy, r.index) for r in replicas)
        if rng.random() < 0.6:
            found.add(call(group, 5))
        replica = rng.choice(replicas)
        if rng.random() < 0.1:
            replica.stop()
            pool.eased(replica)
        elif replica.calls and rng.random() < 0.7:
            del replica.calls[next(iter(replica.calls))]
            pool.eased(replica)
