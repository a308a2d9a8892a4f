"""What the scheduler tells a shell, for each answer to a full batch, after a restart and in a pause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollover.batch import WasteCause
from rollover.errors import DataError, RunError
from rollover.rollout.actions import Action, ConsumeBatch, StartSample, StopAll
from rollover.rollout.config import Limits
from rollover.rollout.events import BatchConsumed, Event, GroupDropped, SampleFailed
from rollover.rollout.scheduler import GroupRules, Scheduler
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, SampleId
from tests.rollout.kit import Prompts, strategy_of
from tests.rollout.test_ledger import ABORT, STOP, ended, restarted

CONSUME, STOP_ALL = [ConsumeBatch()], [StopAll()]


class Shell:
    """Tells the scheduler what is said to have happened; batches of one group of one sample, if nothing else is said."""

    def __init__(
        self,
        name: str,
        *,
        state: RolloutState | None = None,
        max_running: int = 2,
        rules: GroupRules | None = None,
        **config: Any,
    ) -> None:
        self.state = state or RolloutState()
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            strategy=strategy_of(name, **({"rollout_batch_size": 1, "group_size": 1} | config)),
            source=Prompts(),
            state=self.state,
            max_running=max_running,
            rules=rules,
            limits=Limits(),
            emit=self.events.append,
        )
        self.scheduler.begin_round()

    def decide(self) -> list[Action]:
        return [*self.scheduler.decide(0.0)]

    def started(self) -> list[int]:
        """Groups whose sample is started now; nothing else is asked for."""
        actions = self.decide()
        assert all(isinstance(a, StartSample) for a in actions)
        return [a.sample_id.group for a in actions if isinstance(a, StartSample)]

    def ends(self, group: int, reason: FinishReason = STOP, *, num_tokens: int = 2, is_scored: bool = True) -> None:
        sample_id = SampleId(group, 0)
        version = self.state.ledger.policy_version
        self.scheduler.segment_ended(sample_id, ended(sample_id, num_tokens, reason, version=version).segment, 0.0)
        if reason is STOP and is_scored:
            self.scheduler.scored(sample_id, 1.0, 0.0)

    def consume(self) -> Sequence[int]:
        return [g.group_id for g in self.scheduler.consume(0.0).groups]

    def publish(self) -> None:
        """Train what was consumed, and begin the next round."""
        self.scheduler.published(self.state.ledger.next_step, 0.0, pause_s=0.0)
        self.scheduler.begin_round()


def test_parking_stops_all_and_consumes_once_nothing_runs() -> None:
    shell = Shell("april", over_sampling_batch_size=2)
    assert shell.started() == [0, 1]
    shell.ends(0)
    assert shell.decide() == STOP_ALL
    assert shell.decide() == [], "it is stopping"
    shell.ends(1, ABORT)
    assert shell.decide() == shell.decide() == CONSUME
    assert shell.consume() == [0]
    assert shell.decide() == [], "no batch is wanted"
    shell.publish()
    assert shell.started() == [1, 2], "what is parked goes first"


def test_a_loop_that_loses_count_of_its_weights_is_told() -> None:
    shell = Shell("sync")
    (group,) = shell.started()
    with pytest.raises(RunError, match=r"version 1 are published, but .* between 0, the present one, and 0, the"):
        shell.scheduler.published(1, 0.0, pause_s=0.0)
    shell.ends(group)
    assert shell.decide() == CONSUME
    shell.consume()
    with pytest.raises(RunError, match=r"batch 1 .* of version 0, and max_staleness is 0: .* with version 1 after"):
        shell.scheduler.begin_round()
    shell.publish()
    with pytest.raises(RunError, match=r"version 0 are published, but .* between 1, the present one, and 1, the"):
        shell.scheduler.published(0, 0.0, pause_s=0.0)


@pytest.mark.parametrize(("name", "reason"), [("oversample", ABORT), ("april, drop_surplus", STOP)])
def test_what_a_batch_leaves_to_be_dropped_is_dropped_right_before_it(name: str, reason: FinishReason) -> None:
    shell = Shell(name, over_sampling_batch_size=2)
    assert shell.started() == [0, 1]
    shell.ends(0)
    assert shell.decide() == STOP_ALL
    shell.ends(1, reason)
    assert shell.decide() == CONSUME
    num_events = len(shell.events)
    assert shell.consume() == [0]
    assert [type(e) for e in shell.events[num_events:]] == [GroupDropped, BatchConsumed]


def test_waiting_lets_samples_end_and_be_scored() -> None:
    shell = Shell("token_budget", over_sampling_batch_size=2, tokens_per_round=2)
    [first, second] = shell.decide()
    assert isinstance(first, StartSample) and first.token_budget == 2
    assert isinstance(second, StartSample)
    shell.ends(0)
    assert shell.decide() == [], "sample 1 runs to the end of its budget"
    shell.ends(1, is_scored=False)
    assert shell.decide() == [], "and to its reward"
    shell.scheduler.scored(SampleId(1, 0), 1.0, 0.0)
    assert shell.decide() == CONSUME
    assert shell.consume() == [0]


def test_keeping_starts_more_beside_the_batch_and_after_it() -> None:
    shell = Shell("bounded_async", num_running=2)
    assert shell.started() == [0, 1]
    shell.ends(0)
    assert shell.decide() == [StartSample(SampleId(2, 0), None), *CONSUME]
    assert shell.consume() == [0]
    shell.ends(1)
    assert shell.started() == [3], "the trainer is busy: no batch is wanted"
    shell.scheduler.begin_round()
    assert shell.decide() == CONSUME
    shell.scheduler.halt()
    assert shell.decide() == []


@pytest.mark.parametrize("name", ["sync", "april", "oversample", "bounded_async"])
def test_a_handed_out_batch_is_consumed_again_before_anything_starts(name: str) -> None:
    first = Shell(name)
    first.started()
    for sample_id in list(first.state.ledger.running):
        first.ends(sample_id.group)
    while first.decide() != CONSUME:
        pass
    consumed = first.consume()
    again = Shell(name, state=RolloutState([*first.events, restarted(0)]))
    assert again.decide() == CONSUME
    assert again.consume() == consumed
    assert again.decide() == [], "nothing is started before another batch is asked for"
    assert [type(e) for e in again.events] == [BatchConsumed]


def test_in_a_pause_nothing_is_decided() -> None:
    shell = Shell("april")
    with shell.scheduler.paused():
        with shell.scheduler.paused():
            assert shell.decide() == []
        assert shell.decide() == []
    assert shell.started() == [0, 1]


@pytest.mark.parametrize("name", ["april", "oversample"])
def test_a_batch_that_loses_a_group_while_its_round_ends_is_collected(name: str) -> None:
    shell = Shell(name, over_sampling_batch_size=2)
    assert shell.started() == [0, 1]
    shell.ends(0)
    assert shell.decide() == STOP_ALL
    shell.ends(1, ABORT)
    assert shell.decide() == CONSUME
    assert shell.scheduler.drop_tokens_of("", 0.0, since=0) == 4
    assert shell.started() == [2, 3], "no batch is announced"
    shell.ends(3)
    assert shell.decide() == STOP_ALL
    shell.ends(2, ABORT)
    assert shell.decide() == CONSUME
    assert shell.consume() == [3]


@pytest.mark.parametrize("ended_before_the_drop", [False, True])
def test_a_group_whose_samples_failed_is_never_in_a_batch(ended_before_the_drop: bool) -> None:
    """The failure that ends a run is the last one of a group, and the next run has a batch to fill."""
    shell = Shell("sync")
    (group,) = shell.started()
    shell.ends(group, is_scored=False)
    if ended_before_the_drop:
        shell.scheduler.record(SampleFailed(0.0, SampleId(group, 0), "no reward", WasteCause.NO_REWARD))
    else:
        shell.scheduler._limits = Limits(max_failed_batches=1)
        with pytest.raises(DataError, match="the last 1 samples have no reward"):
            shell.scheduler.failed(SampleId(group, 0), "no reward", 0.0, cause=WasteCause.NO_REWARD)
    assert any(isinstance(event, GroupDropped) for event in shell.events) is not ended_before_the_drop
    again = Shell("sync", state=shell.state)
    (other,) = again.started()
    assert other != group and not shell.state.ledger.ready
    again.ends(other)
    assert again.decide() == CONSUME and again.consume() == [other]
