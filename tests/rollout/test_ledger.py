"""Conservation: every admitted prompt in one place, every decoded token in one account, after every event."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollover.batch import WasteCause
from rollover.rollout.events import (
    BatchConsumed,
    BatchSkipped,
    BatchTrained,
    CheckpointSaved,
    Event,
    GroupDropped,
    GroupOpened,
    Observed,
    Restarted,
    SampleFailed,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.ledger import Ledger, SampleState
from rollover.types import FinishReason, Observation, Prompt, SampleId
from tests.segments import segment


def prompt(i: int) -> Prompt:
    return Prompt(prompt_id=f"toy/{i}@0", token_ids=(1, 2), text=f"{i}", source="toy")


def opened(group_id: int, *, size: int = 1, cursor: int | None = None, row: int | None = None) -> GroupOpened:
    return GroupOpened(
        time_s=0.0,
        group_id=group_id,
        prompt=prompt(group_id if row is None else row),
        group_size=size,
        cursor=group_id + 1 if cursor is None else cursor,
    )


def started(sample_id: SampleId, version: int = 0) -> SampleStarted:
    return SampleStarted(time_s=0.0, sample_id=sample_id, policy_version=version)


def ended(sample_id: SampleId, num_tokens: int, reason: FinishReason | None, *, version: int = 0) -> SegmentEnded:
    return SegmentEnded(0.0, sample_id, segment(num_tokens, reason, version=version))


def scored(sample_id: SampleId) -> SampleScored:
    return SampleScored(time_s=0.0, sample_id=sample_id, reward=0.5)


def failed(sample_id: SampleId) -> SampleFailed:
    return SampleFailed(time_s=0.0, sample_id=sample_id, reason="it broke")


def dropped(group_id: int, *, returned: bool = False) -> GroupDropped:
    cause = WasteCause.DISCARDED_ON_ABORT
    return GroupDropped(time_s=0.0, group_id=group_id, cause=cause, prompt_returned=returned)


def consumed(step: int, *group_ids: int) -> BatchConsumed:
    return BatchConsumed(time_s=0.0, step=step, group_ids=group_ids)


def trained(step: int, **untrained: int) -> BatchTrained:
    return BatchTrained(time_s=0.0, step=step, untrained={WasteCause(name): n for name, n in untrained.items()})


def skipped(step: int) -> BatchSkipped:
    return BatchSkipped(time_s=0.0, step=step)


def published(version: int) -> VersionPublished:
    return VersionPublished(time_s=0.0, policy_version=version, pause_s=0.0)


def restarted(step: int) -> Restarted:
    return Restarted(time_s=0.0, step=step, redo_from=None, lost_tokens=0)


@dataclass
class Model:
    """The same facts, kept the plain way: one dictionary of samples, one of groups, sums taken afresh."""

    samples: dict[SampleId, tuple[SampleState, int]] = field(default_factory=dict)
    place: dict[int, str] = field(default_factory=dict)
    """Of each group: open, ready, batch <step> or dropped <cause>."""
    prompts: dict[int, str] = field(default_factory=dict)
    decoded: int = 0
    next_step: int = 0
    untrained: dict[int, dict[WasteCause, int]] = field(default_factory=dict)
    """By step that is done."""
    skipped: set[int] = field(default_factory=set)

    def set(self, sample_id: SampleId, state: SampleState, tokens: int = 0) -> None:
        num_tokens = self.samples.get(sample_id, (state, 0))[1] + tokens
        self.samples[sample_id] = (state, num_tokens)
        self.decoded += tokens

    def siblings(self, group_id: int) -> dict[SampleId, tuple[SampleState, int]]:
        return {i: entry for i, entry in self.samples.items() if i.group == group_id}

    def settle(self, group_id: int) -> None:
        if all(state in ("scored", "failed") for state, _ in self.siblings(group_id).values()):
            self.place[group_id] = "ready"

    def tokens_of(self, step: int) -> int:
        return sum(
            tokens for i, (state, tokens) in self.samples.items() if state == "scored" and self.step_of(i.group) == step
        )

    @property
    def trained(self) -> int:
        without = sum(n for counts in self.untrained.values() for n in counts.values())
        return sum(self.tokens_of(step) for step in range(self.next_step)) - without

    def step_of(self, group_id: int) -> int | None:
        kind, _, step = self.place[group_id].partition(" ")
        return int(step) if kind == "batch" else None

    @property
    def wasted(self) -> Counter[str]:
        wasted: Counter[str] = Counter()
        for i, (state, tokens) in self.samples.items():
            kind, _, cause = self.place[i.group].partition(" ")
            if state == "failed":
                wasted[WasteCause.FAILED] += tokens
            elif kind == "dropped":
                wasted[cause] += tokens
        for counts in self.untrained.values():
            wasted.update(counts)
        return +wasted


class LedgerMachine(RuleBasedStateMachine):
    """Any legal history, crashes and replays included."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.model = Ledger(), Model()
        self.history: list[Event] = []
        self.saved_step = 0

    def apply(self, event: Event) -> None:
        self.ledger.apply(event)
        self.history.append(event)

    def pick(self, data: st.DataObject, *states: str) -> SampleId | None:
        ids = [
            i for i, (state, _) in self.model.samples.items() if state in states and self.model.place[i.group] == "open"
        ]
        return data.draw(st.sampled_from(ids)) if ids else None

    @rule(size=st.integers(1, 3))
    def open(self, size: int) -> None:
        i, cursor = self.ledger.next_group_id, self.ledger.cursor
        if self.ledger.returned:
            row = int(self.ledger.returned[0].text)
        else:
            row, cursor = cursor, cursor + 1
        self.apply(opened(i, size=size, cursor=cursor, row=row))
        self.model.place[i] = "open"
        self.model.prompts[i] = f"{row}"
        for k in range(size):
            self.model.set(SampleId(i, k), SampleState.WAITING)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if (i := self.pick(data, "waiting", "parked")) is not None:
            self.apply(started(i, self.ledger.policy_version))
            self.model.set(i, SampleState.RUNNING)

    @rule(data=st.data(), num_tokens=st.integers(0, 5), reason=st.sampled_from([*FinishReason, None]))
    def segment(self, data: st.DataObject, num_tokens: int, reason: FinishReason | None) -> None:
        if (i := self.pick(data, "running")) is None:
            return
        total = self.model.samples[i][1] + num_tokens
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not total:
            return
        self.apply(ended(i, num_tokens, reason, version=self.ledger.policy_version))
        state = {
            None: SampleState.RUNNING,
            FinishReason.ABORT: SampleState.PARKED if total else SampleState.WAITING,
            FinishReason.TURN: SampleState.ACTING,
        }.get(reason, SampleState.FINISHED)
        self.model.set(i, state, num_tokens)

    @rule(data=st.data(), num_tokens=st.integers(0, 5), end=st.sampled_from([None, FinishReason.STOP]))
    def observe(self, data: st.DataObject, num_tokens: int, end: FinishReason | None) -> None:
        if (i := self.pick(data, "acting")) is None:
            return
        total = self.model.samples[i][1]
        if end is not None and not total:
            return
        self.apply(Observed(0.0, i, Observation((7,) * num_tokens, end=end)))
        on = SampleState.PARKED if total else SampleState.WAITING
        self.model.set(i, on if end is None else SampleState.FINISHED)

    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        if (i := self.pick(data, "finished")) is not None:
            self.apply(scored(i))
            self.model.set(i, SampleState.SCORED)
            self.model.settle(i.group)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if (i := self.pick(data, "waiting", "running", "parked", "acting", "finished")) is not None:
            self.apply(failed(i))
            self.model.set(i, SampleState.FAILED)
            self.model.settle(i.group)

    @rule(data=st.data(), cause=st.sampled_from(WasteCause), returned=st.booleans())
    def drop(self, data: st.DataObject, cause: WasteCause, returned: bool) -> None:
        ids = [i for i, place in self.model.place.items() if place in ("open", "ready")]
        if ids:
            i = data.draw(st.sampled_from(ids))
            self.apply(GroupDropped(time_s=0.0, group_id=i, cause=cause, prompt_returned=returned))
            self.model.place[i] = f"dropped {cause}"

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        step = self.ledger.next_step
        if again := [i for i in self.model.place if self.model.step_of(i) == step]:
            assert self.ledger.replay[0] == step
            ids = self.ledger.batches[step]
            assert sorted(ids) == again
        else:
            assert not self.ledger.replay
            ready = [i for i, place in self.model.place.items() if place == "ready"]
            if not ready:
                return
            ids = tuple(data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True)))
        self.apply(consumed(step, *ids))
        self.model.next_step += 1
        for i in ids:
            self.model.place[i] = f"batch {step}"

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        step = self.model.next_step - 1
        if step < self.saved_step or step in self.model.untrained:
            return
        left, counts = self.model.tokens_of(step), {}
        if step in self.model.skipped:
            counts = {WasteCause.SKIPPED: left}
        for cause in data.draw(st.lists(st.sampled_from(WasteCause), unique=True, max_size=2)) if not counts else ():
            counts[cause] = data.draw(st.integers(0, left))
            left -= counts[cause]
        self.apply(BatchTrained(time_s=0.0, step=step, untrained=counts))
        self.model.untrained[step] = counts

    @precondition(lambda self: self.ledger.batches)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.ledger.batches)))
        self.apply(skipped(step))
        self.model.skipped.add(step)

    @rule()
    def publish(self) -> None:
        if self.ledger.policy_version < self.ledger.next_step:
            self.apply(published(self.ledger.policy_version + 1))

    @rule()
    def checkpoint(self) -> None:
        self.saved_step = self.ledger.next_step
        self.apply(CheckpointSaved(time_s=0.0, step=self.saved_step))

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.saved_step, self.ledger.next_step))
        self.apply(restarted(step))
        self.model.next_step = step
        self.model.untrained = {s: counts for s, counts in self.model.untrained.items() if s < step}
        for i, (state, tokens) in list(self.model.samples.items()):
            if state == "running" and self.model.place[i.group] == "open":
                self.model.set(i, SampleState.PARKED if tokens else SampleState.WAITING)

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()

    @invariant()
    def agrees_with_the_model(self) -> None:
        ledger, model = self.ledger, self.model
        assert ledger.tokens.decoded == model.decoded
        assert ledger.tokens.trained == model.trained
        assert +ledger.tokens.wasted == model.wasted
        assert ledger.skipped == {step for step in model.skipped if step >= self.saved_step}
        for state, place in (
            ("waiting", ledger.waiting),
            ("running", ledger.running),
            ("parked", ledger.parked),
            ("finished", ledger.unscored),
        ):
            expected = {i for i, (s, _) in model.samples.items() if s == state and model.place[i.group] == "open"}
            assert set(place) == expected
        assert set(ledger.open) == {i for i, place in model.place.items() if place == "open"}
        assert set(ledger.ready) == {i for i, place in model.place.items() if place == "ready"}
        assert [*ledger.replay] == sorted(
            {s for i in model.place if (s := model.step_of(i)) is not None and s >= model.next_step}
        )

    @invariant()
    def each_prompt_is_in_one_place(self) -> None:
        """Drawn prompts are held by the newest group opened for them, or wait to go out again."""
        returned = Counter(p.text for p in self.ledger.returned)
        holders = Counter(self.model.prompts[i] for i, p in self.model.place.items() if "dropped" not in p)
        assert max((returned + holders).values(), default=0) <= 1
        assert set(returned) | set(self.model.prompts.values()) == {str(i) for i in range(self.ledger.cursor)}

    def teardown(self) -> None:
        assert state_of(Ledger(self.history)) == state_of(self.ledger)


def state_of(ledger: Ledger) -> dict[str, Any]:
    """Everything a ledger knows, comparable; order counts where decisions depend on it. What ``check`` remembers of its
    earlier proofs is not among it."""
    facts = {name: value for name, value in vars(ledger).items() if name not in ("open", "ready", "_proved")}
    return {**{name: repr(value) for name, value in facts.items()}, "open": [*ledger.open], "ready": [*ledger.ready]}


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True)


A = SampleId(0, 0)
STOP, ABORT = FinishReason.STOP, FinishReason.ABORT
READY: list[Event] = [opened(0), started(A), ended(A, 3, STOP), scored(A)]

IMPOSSIBLE: dict[str, tuple[list[Event], Event]] = {
    "a group number twice": ([opened(0)], opened(0)),
    "a prompt that was drawn before": ([opened(0)], opened(1, cursor=1, row=0)),
    "a running sample started": ([opened(0), started(A)], started(A)),
    "a finished sample started": ([opened(0), started(A), ended(A, 1, STOP)], started(A)),
    "tokens of a waiting sample": ([opened(0)], ended(A, 1, None)),
    "tokens of a parked sample": ([opened(0), started(A), ended(A, 1, ABORT)], ended(A, 1, ABORT)),
    "tokens without log-probs": (
        [opened(0), started(A)],
        ended(A, 2, None)._replace(segment=ended(A, 2, None).segment._replace(rollout_logprobs=(-1.0,))),
    ),
    "a second finish": ([opened(0), started(A), ended(A, 1, STOP)], ended(A, 1, STOP)),
    "a reward for a running sample": ([opened(0), started(A)], scored(A)),
    "a second reward": (READY, scored(A)),
    "a failure behind the reward": (READY, failed(A)),
    "a second failure": ([opened(0, size=2), failed(A)], failed(A)),
    "training an open group": ([opened(0)], consumed(0, 0)),
    "training a group twice in a batch": (READY, consumed(0, 0, 0)),
    "training a group twice": ([*READY, consumed(0, 0)], consumed(1, 0)),
    "a step left out": (READY, consumed(1, 0)),
    "training a dropped group": ([*READY, dropped(0)], consumed(0, 0)),
    "dropping a trained group": ([*READY, consumed(0, 0)], dropped(0)),
    "dropping a group twice": ([opened(0), dropped(0)], dropped(0)),
    "a replayed batch with other groups": ([*READY, consumed(0, 0), opened(1), restarted(0)], consumed(0, 1)),
    "a step that is done before its batch is there": (READY, trained(0)),
    "a step that is done twice": ([*READY, consumed(0, 0), trained(0)], trained(0)),
    "a step done before a replay handed its batch out": ([*READY, consumed(0, 0), restarted(0)], trained(0)),
    "more tokens without a gradient than the batch has": ([*READY, consumed(0, 0)], trained(0, zero_advantage=4)),
    "stepping over a batch that is not there": (READY, skipped(0)),
    "weights that go back": ([published(2)], published(1)),
}


@pytest.mark.parametrize("history, event", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_happen_is_refused(history: list[Event], event: Event) -> None:
    ledger = Ledger(history)
    with pytest.raises((AssertionError, KeyError)):
        ledger.apply(event)


@pytest.mark.parametrize(
    "harm",
    [
        lambda ledger: ledger.parked.pop(A),
        lambda ledger: ledger.running.update({A: None}),
        lambda ledger: ledger.groups.pop(0),
        lambda ledger: ledger.open.pop(0),
        lambda ledger: setattr(ledger.sample(A), "num_tokens", 1),
        lambda ledger: setattr(ledger.sample(A), "state", SampleState.RUNNING),
        lambda ledger: ledger.ready.update({0: ledger.groups[0]}),
        lambda ledger: setattr(ledger.groups[0], "num_unsettled", 1),
        lambda ledger: setattr(ledger.tokens, "decoded", 4),
        lambda ledger: ledger.tokens.wasted.update({WasteCause.FAILED: 1}),
        lambda ledger: setattr(ledger, "next_group_id", 2),
        lambda ledger: ledger.dropped.update({WasteCause.FAILED: 1}),
    ],
)
def test_check_finds_what_does_not_add_up(harm: Any) -> None:
    ledger = Ledger([opened(0, size=2), started(A), ended(A, 3, ABORT)])
    ledger.check()
    harm(ledger)
    with pytest.raises((AssertionError, KeyError)):
        ledger.check()


def test_of_an_episode_only_the_newest_state_is_held() -> None:
    ledger, one = Ledger(), SampleId(0, 0)
    ledger.apply(opened(0))
    for turn in range(3):
        ledger.apply(started(one))
        ledger.apply(ended(one, 2, FinishReason.TURN))
        ledger.apply(Observed(0.0, one, Observation((7,), state=f"after {turn}")))
    assert [answer.state for answer in ledger.sample(one).observations] == ["", "", "after 2"]


def test_a_token_kept_for_a_restart_takes_8_bytes_and_comes_back() -> None:
    logprobs = tuple(array("f", (-0.1 * i for i in range(1000))))
    decoded = segment(range(70_000, 71_000))._replace(rollout_logprobs=logprobs)
    ledger = Ledger([opened(0), started(A), SegmentEnded(1.0, A, decoded), scored(A)])
    before = ledger.sample(A).trajectory
    ledger.apply(consumed(0, 0))
    assert ledger.sample(A).trajectory == before and before.segments == (decoded,)
    kept = ledger.sample(A).segments[0]
    assert sys.getsizeof(kept.token_ids) + sys.getsizeof(kept.rollout_logprobs) < 8 * 1000 + 300
