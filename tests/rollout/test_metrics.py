"""What a batch and a ledger say in numbers, against hand-worked values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.batch import Batch, Group
from rollover.rollout.lag import weighted_quantile
from rollover.rollout.ledger import Ledger
from rollover.rollout.metrics import batch_metrics, ledger_metrics
from rollover.types import FinishReason, Prompt, SampleId, Segment, Trajectory
from tests.rollout.test_ledger import ended, failed, opened, started
from tests.segments import segment

PROMPT = Prompt(prompt_id="p/0@0", token_ids=(1, 2), text="?", source="p")


def trajectory(index: int, reward: float, *segments: Segment, group: int = 0) -> Trajectory:
    return Trajectory(sample_id=SampleId(group, index), prompt=PROMPT, segments=segments, reward=reward)


def group(number: int, *rewards: float, prompt: Prompt = PROMPT) -> Group:
    """A group whose responses have one token."""
    made = tuple(trajectory(i, reward, segment(1), group=number) for i, reward in enumerate(rewards))
    return Group(group_id=number, prompt=prompt, trajectories=made)


def test_staleness_weighs_tokens_and_head_staleness_weighs_groups() -> None:
    # Step 5. Sample 0: 6 tokens of version 3 and 2 of version 5 (lags 2, 0); sample 1: 4 tokens of version 4 (lag 1).
    one = trajectory(0, 1.0, segment(6, FinishReason.ABORT, version=3), segment(2, version=5))
    two = trajectory(1, 0.0, segment(4, FinishReason.LENGTH, version=4))
    other = trajectory(0, 0.5, segment(6, version=5), group=1)
    groups = tuple(Group(group_id=i, prompt=PROMPT, trajectories=t) for i, t in enumerate([(one, two), (other,)]))
    numbers = batch_metrics(Batch(step=5, groups=groups))
    assert numbers["staleness/mean"] == pytest.approx((6 * 2 + 4 * 1) / 18)
    assert numbers["staleness/group_mean"] == pytest.approx((16 / 12 + 0) / 2)
    assert numbers["staleness/head_mean"] == pytest.approx((2 + 0) / 2)
    assert (numbers["staleness/p95"], numbers["staleness/max"]) == (2.0, 2)
    assert numbers["staleness/off_policy_tokens"] == pytest.approx(10 / 18)
    assert numbers["rollout/resumes_per_sample"] == pytest.approx(1 / 3)
    assert numbers["response/truncated"] == pytest.approx(1 / 3)
    assert (numbers["response/mean_tokens"], numbers["response/max_tokens"]) == (6.0, 8)


def test_a_group_has_signal_when_its_rewards_differ() -> None:
    numbers = batch_metrics(Batch(step=0, groups=(group(0, 1, 1), group(1, 0, 1), group(2, 0, 0), group(3, 0, 0))))
    assert numbers["reward/groups_with_signal"] == 0.25
    assert numbers["reward/mean"] == pytest.approx(3 / 8)
    assert numbers["reward/std"] == pytest.approx((3 / 8 * 5 / 8) ** 0.5)


def test_rows_of_one_batch_with_the_same_prompt_are_counted() -> None:
    def of(number: int, row: int, epoch: int, *token_ids: int) -> Group:
        return group(number, 1.0, prompt=replace(PROMPT, prompt_id=f"p/{row}@{epoch}", token_ids=token_ids))

    groups = (of(0, 0, 0, 1, 2), of(1, 0, 1, 1, 2), of(2, 1, 0, 1, 2), of(3, 2, 0, 3), of(4, 3, 0, 4))
    assert batch_metrics(Batch(step=0, groups=groups))["prompt/repeated"] == 0.25
    assert batch_metrics(Batch(step=0, groups=groups[:2]))["prompt/repeated"] == 0, "one row twice is no repetition"
    written = (of(5, 4, 0), of(6, 5, 0), of(7, 6, 0), of(8, 7, 0))  # by reset of an environment
    assert batch_metrics(Batch(step=0, groups=(*groups, *written)))["prompt/repeated"] == 0.25
    alone = batch_metrics(Batch(step=0, groups=written))
    assert not alone.keys() & {"prompt/repeated", "reward/groups_with_signal"}, "groups of one response"


def test_a_batch_without_a_token_divides_nothing_by_zero() -> None:
    empty = trajectory(0, 0.0, segment(0, version=2))
    numbers = batch_metrics(Batch(step=2, groups=(Group(group_id=0, prompt=PROMPT, trajectories=(empty,)),)))
    assert (numbers["staleness/mean"], numbers["staleness/head_mean"], numbers["response/mean_tokens"]) == (0, 0, 0)


def test_the_account_of_a_ledger_is_its_own() -> None:
    one = SampleId(0, 0)
    ledger = Ledger([opened(0), started(one), ended(one, 3, FinishReason.ABORT)])
    numbers = ledger_metrics(ledger)
    assert (numbers["rollout/decoded_tokens"], numbers["rollout/live_tokens"]) == (3, 3)
    assert (numbers["rollout/trained_tokens"], numbers["rollout/parked_samples"]) == (0, 1)
    assert numbers["rollout/starvation_age"] == 0
    ledger.next_step = 3  # three batches went by, and the group that was begun under version 0 was in none
    assert ledger_metrics(ledger)["rollout/starvation_age"] == 3
    ledger.apply(failed(one))
    numbers = ledger_metrics(ledger)
    assert (numbers["rollout/failed_samples"], numbers["rollout/failed_mean_tokens"]) == (1, 3)
    empty = ledger_metrics(Ledger())
    assert empty["rollout/starvation_age"] == 0 and "rollout/failed_mean_tokens" not in empty, "nothing has begun"


def test_a_quantile_is_the_smallest_value_with_that_share_below() -> None:
    counts = {0: 94, 1: 1, 2: 5}
    assert weighted_quantile(counts, 0.94) == 0
    assert weighted_quantile(counts, 0.95) == 1
    assert weighted_quantile(counts, 0.951) == 2
    assert weighted_quantile(counts, 1.0) == 2
