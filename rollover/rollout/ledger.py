"""The ledger: where every admitted prompt and every decoded token is. It is the fold of the journal's events.

Conservation, proved by ``Ledger.check``:

* A sample is in exactly one state. ``waiting -> running -> {parked -> running}* -> finished -> scored``;
  from any of them it can become ``failed``. An episode goes ``running -> acting`` at the end of each turn, and on to
  ``parked`` or, when it is over, ``finished``.
* A group is ``open`` until each sample is scored or failed, then ``ready``, then ``consumed`` by a batch or
  ``dropped`` with a cause. There is no other way out.
* ``decoded tokens = trained + wasted (by cause) + live``. The tokens of a batch count as trained when it is consumed;
once its step is done, the tokens without a gradient are moved to the waste.
* ``observed tokens = in batches + dropped + live``: a second account, of the tokens that environments have added.

The ledger contains facts. A strategy decides what to do about them; the driver does it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

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
from rollover.rollout.records import (
    ACTING,
    FAILED,
    FINISHED,
    PARKED,
    RUNNING,
    SCORED,
    SETTLED,
    STARTABLE,
    WAITING,
    GroupRecord,
    SampleRecord,
    SampleState,
    Tokens,
)
from rollover.types import FinishReason, Prompt, SampleId, append_segment

_ABORT, _TURN = FinishReason.ABORT, FinishReason.TURN


class Ledger:
    """Holds the state of all samples and groups. Only ``apply`` changes it.

    Examples:
        A group of two samples is opened for an engine that has room for one of them:

        >>> class Sums:
        ...     def prompt(self, index):
        ...         return Prompt(prompt_id=f"sums/{index}@0", token_ids=(1, index), text=f"{index}+1", source="sums")
        >>> engine = Capabilities(max_running=1, max_context_tokens=64)
        >>> sync = strategy("sync", engine, rollout_batch_size=1, group_size=2)
        >>> state = RolloutState()
        >>> scheduler = Scheduler(strategy=sync, source=Sums(), state=state, max_running=1)
        >>> scheduler.begin_round()
        >>> _ = list(scheduler.decide(now_s=0.0))
        >>> ledger = state.ledger
        >>> [*ledger.open], [*map(str, ledger.running)], [*map(str, ledger.waiting)]
        ([0], ['g0.0'], ['g0.1'])
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.policy_version = 0
        """Version that the engines sample from."""
        self.next_step = 0
        """Step of the next batch, which is the number of batches consumed."""
        self.cursor = 0
        """Number of prompts drawn from the source."""
        self.next_group_id = 0
        """Number of groups opened, which is the id of the next one."""
        self.tokens = Tokens()
        self.groups: dict[int, GroupRecord] = {}
        """Open, ready and consumed-but-not-yet-checkpointed groups."""
        self.open: dict[int, GroupRecord] = {}
        self.ready: dict[int, GroupRecord] = {}
        self.waiting: dict[SampleId, None] = {}
        self.running: dict[SampleId, None] = {}
        self.parked: dict[SampleId, None] = {}
        self.acting: dict[SampleId, None] = {}
        """Episodes whose environment acts."""
        self.unscored: dict[SampleId, None] = {}
        """Finished samples that are not yet scored."""
        self._places = {
            WAITING: self.waiting,
            RUNNING: self.running,
            PARKED: self.parked,
            ACTING: self.acting,
            FINISHED: self.unscored,
        }
        """Samples that are neither scored nor failed, by their state."""
        self.starts_of_open: Counter[int] = Counter()
        """Started open groups by the version they started at."""
        self.starts_of_ready: Counter[int] = Counter()
        """Ready groups by the version they started at."""
        self.num_fresh = 0
        """Number of waiting samples of groups that have not started: the first of each fixes the group's start
        version."""
        self._startable: list[int] = []
        """Groups with waiting or parked samples, in order of opening."""
        self.returned: deque[Prompt] = deque()
        """Prompts of discarded groups, which are used again before new ones are drawn."""
        self.batches: dict[int, tuple[int, ...]] = {}
        """Group ids of the batches consumed since the last checkpoint, by step."""
        self.untrained: dict[int, Mapping[WasteCause, int]] = {}
        """Tokens without a gradient, for each batch that was trained."""
        self.skipped: set[int] = set()
        """Steps whose batches are to be skipped."""
        self.has_started = False
        """True if a sample has started since a new batch was last handed out."""
        self.replay: deque[int] = deque()
        """Steps whose batches must be handed out again, as they were, before any new one."""
        self.num_consumed = 0
        self.dropped: Counter[WasteCause] = Counter()
        """Number of groups dropped, by cause."""
        self.num_failed = self.num_failed_tokens = 0
        """Number of samples failed, and of their tokens; samples to which no reward applies are not among them."""
        self._proved: set[int] = set()
        """Consumed groups that ``check`` has found correct."""
        for event in events:
            self.apply(event)

    # -- reading --------------------------------------------------------------------------------------------

    def sample(self, sample_id: SampleId) -> SampleRecord:
        return self.groups[sample_id.group].samples[sample_id.index]

    @property
    def num_unconsumed(self) -> int:
        """Return the number of groups admitted and not yet in a batch: open plus ready."""
        return len(self.open) + len(self.ready)

    @property
    def num_active(self) -> int:
        """Return the number of samples that can be decoded; an episode whose environment acts is not among them."""
        return len(self.waiting) + len(self.running) + len(self.parked)

    def startable(self) -> Iterator[SampleId]:
        """Yield waiting and parked samples, the oldest group first. The first few are cheap, however many wait."""
        for group_id in self._startable:
            for sample in self.groups[group_id].samples:
                if sample.state in STARTABLE:
                    yield sample.sample_id

    def unconsumed(self) -> Iterator[GroupRecord]:
        """Return open and ready groups in order of opening."""
        return (self.groups[i] for i in sorted([*self.open, *self.ready]))

    # -- the fold -------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Move to the state after ``event``. An event that cannot happen in this state is a bug and fails an
        assertion."""
        match event:  # the frequent ones first
            case SegmentEnded():
                self._segment(event)
            case SampleStarted():
                self._start(event.sample_id, event.policy_version)
            case SampleScored():
                self._score(event)
            case Observed():
                self._observe(event)
            case GroupOpened():
                self._open(event)
            case SampleFailed(sample_id=sample_id, cause=cause):
                sample = self.sample(sample_id)
                assert sample.state not in SETTLED, f"{sample_id} is {sample.state} and cannot fail"
                self._leave(sample_id, sample)
                self.num_failed += cause is WasteCause.FAILED
                self.num_failed_tokens += sample.num_tokens * (cause is WasteCause.FAILED)
                sample.cause = cause
                self.tokens.waste(cause, sample)
                self._settle(sample_id, FAILED)
            case GroupDropped():
                self._drop(event)
            case BatchConsumed(step=step, group_ids=group_ids):
                self._consume(step, group_ids)
            case BatchTrained(step=step, untrained=untrained):
                self._train(step, untrained)
            case BatchSkipped(step=step):
                assert step in self.batches, f"there is no batch {step} to skip"
                self.skipped.add(step)
            case VersionPublished(policy_version=version):
                assert version >= self.policy_version, f"version {version} after {self.policy_version}"
                self.policy_version = version
            case CheckpointSaved(step=step):
                for done in [s for s in self.batches if s < step]:
                    for group_id in self.batches.pop(done):
                        del self.groups[group_id]
                    self.untrained.pop(done, None)
                    self.skipped.discard(done)
            case Restarted():
                self._restart(event)

    def _open(self, event: GroupOpened) -> None:
        assert event.group_id == self.next_group_id, "groups are numbered in order of opening"
        if event.cursor <= self.cursor:  # not drawn from the source
            assert self.returned, "the source is read in order"
            returned = self.returned.popleft()
            assert returned.prompt_id == event.prompt.prompt_id, "and so are the prompts that came back"
        entry = GroupRecord(
            group_id=event.group_id,
            prompt=event.prompt,
            samples=[SampleRecord(SampleId(event.group_id, i), event.prompt) for i in range(event.group_size)],
            num_unsettled=event.group_size,
            num_startable=event.group_size,
        )
        self.groups[event.group_id] = self.open[event.group_id] = entry
        self._startable.append(event.group_id)
        self.waiting.update(dict.fromkeys(s.sample_id for s in entry.samples))
        self.num_fresh += event.group_size
        self.next_group_id += 1
        self.cursor = max(self.cursor, event.cursor)

    def _start(self, sample_id: SampleId, version: int) -> None:
        group = self.groups[sample_id.group]
        sample = group.samples[sample_id.index]
        assert sample.state in STARTABLE, f"{sample_id} is {sample.state}"
        self._leave(sample_id, sample)
        self.has_started = True
        sample.state = RUNNING
        self.running[sample_id] = None
        if group.start_version is None:
            group.start_version = version
            self.starts_of_open[version] += 1
            self.num_fresh -= group.num_startable  # its siblings

    def _segment(self, event: SegmentEnded) -> None:
        _, sample_id, segment = event
        group_id, index = sample_id
        sample = self.groups[group_id].samples[index]
        assert sample.state is RUNNING, f"{sample_id} is {sample.state}, not running"
        num_tokens, reason = len(segment.token_ids), segment.finish_reason
        assert num_tokens == len(segment.rollout_logprobs), (
            f"{sample_id} has {num_tokens} tokens, not as many log-probs"
        )
        for beside in (segment.kept, segment.routes):
            assert not beside or len(beside) == num_tokens, (
                f"{sample_id} has {num_tokens} tokens, not as many pieces beside"
            )
        append_segment(sample.segments, segment)
        sample.num_tokens += num_tokens
        self.tokens.decoded += num_tokens
        self.tokens.reprefilled += segment.num_prefilled_tokens
        if reason is None:
            return
        del self.running[sample_id]
        if reason is _ABORT:
            self._park(sample_id, sample)
        else:
            self._place(sample_id, sample, ACTING if reason is _TURN else FINISHED)

    def _observe(self, event: Observed) -> None:
        _, sample_id, observation = event
        sample = self.sample(sample_id)
        assert sample.state is ACTING, f"{sample_id} is {sample.state}, not acting"
        del self.acting[sample_id]
        if sample.observations:  # an environment goes on from its newest state; the journal has all of them
            sample.observations[-1] = sample.observations[-1]._replace(state="")
        sample.observations.append(observation)
        sample.num_observed += len(observation.token_ids)
        sample.turn_start = sample.num_tokens
        self.tokens.observed += len(observation.token_ids)
        if observation.end is None:
            self._park(sample_id, sample)
        else:
            self._place(sample_id, sample, FINISHED)

    def _place(self, sample_id: SampleId, sample: SampleRecord, state: SampleState) -> None:
        sample.state = state
        self._places[state][sample_id] = None

    def _score(self, event: SampleScored) -> None:
        sample_id = event.sample_id
        sample = self.sample(sample_id)
        assert sample.state is FINISHED, f"{sample_id} is {sample.state}, not finished"
        del self.unscored[sample_id]
        sample.reward, sample.components, sample.solved = event.reward, event.components, event.solved
        self._settle(sample_id, SCORED)

    def _park(self, sample_id: SampleId, sample: SampleRecord) -> None:
        """Park a stopped sample; one without a token has nothing to resume and waits again."""
        self._place(sample_id, sample, PARKED if sample.num_tokens else WAITING)
        group = self.groups[sample_id.group]
        group.num_startable += 1
        if group.num_startable == 1:
            insort(self._startable, sample_id.group)

    def _leave(self, sample_id: SampleId, sample: SampleRecord) -> None:
        """Remove the sample from the collection of its state."""
        if sample.state in SETTLED:
            return
        del self._places[sample.state][sample_id]
        if sample.state in STARTABLE:
            group = self.groups[sample_id.group]
            group.num_startable -= 1
            self.num_fresh -= group.start_version is None
            if group.num_startable == 0:
                del self._startable[bisect_left(self._startable, sample_id.group)]

    def _settle(self, sample_id: SampleId, state: SampleState) -> None:
        group = self.groups[sample_id.group]
        group.samples[sample_id.index].state = state
        group.num_unsettled -= 1
        if group.num_unsettled == 0:
            del self.open[group.group_id]
            self.ready[group.group_id] = group
            if group.start_version is not None:
                _take_one(self.starts_of_open, group.start_version)
                self.starts_of_ready[group.start_version] += 1

    def _drop(self, event: GroupDropped) -> None:
        group = self.groups[event.group_id]
        is_open = event.group_id in self.open
        assert is_open or event.group_id in self.ready, f"group {event.group_id} is consumed and cannot be dropped"
        del (self.open if is_open else self.ready)[event.group_id]
        if group.start_version is not None:
            _take_one(self.starts_of_open if is_open else self.starts_of_ready, group.start_version)
        for sample in group.samples:
            self._leave(sample.sample_id, sample)
            if sample.state is not FAILED:
                self.tokens.waste(event.cause, sample)
        del self.groups[event.group_id]
        self.dropped[event.cause] += 1
        if event.prompt_returned:
            self.returned.append(group.prompt)

    def _consume(self, step: int, group_ids: tuple[int, ...]) -> None:
        assert step == self.next_step, f"batch {step} consumed where {self.next_step} was next"
        if self.replay:
            assert self.replay[0] == step and self.batches[step] == group_ids, "a replayed batch is what it was"
            self.replay.popleft()
        else:
            assert len(set(group_ids)) == len(group_ids), "a group is trained once"
            for group_id in group_ids:
                group = self.ready.pop(group_id)
                if group.start_version is not None:  # otherwise each of its samples failed before it was sent out
                    _take_one(self.starts_of_ready, group.start_version)
                for sample in group.samples:
                    sample.pack()
            self.batches[step] = group_ids
            self.has_started = False
        self._account(step, +1)
        self.next_step += 1

    def _train(self, step: int, untrained: Mapping[WasteCause, int]) -> None:
        assert step in self.batches and step < self.next_step, f"batch {step} is trained, but was not handed out"
        assert step not in self.untrained, f"batch {step} is trained twice"
        num_tokens = sum(s.num_tokens for i in self.batches[step] for s in self.groups[i].samples if s.state is SCORED)
        assert 0 <= sum(untrained.values()) <= num_tokens, f"batch {step} has {num_tokens} tokens, not {untrained}"
        self.untrained[step] = untrained
        self.tokens.write_off(untrained, +1)

    def _account(self, step: int, sign: int) -> None:
        """Count the tokens of the batch of ``step`` as trained, or undo that with ``sign`` -1."""
        for group_id in self.batches[step]:
            for sample in self.groups[group_id].samples:
                if sample.state is SCORED:
                    self.tokens.trained += sign * sample.num_tokens
                    self.tokens.observed_in_batches += sign * sample.num_observed
        self.num_consumed += sign * len(self.batches[step])

    def _restart(self, event: Restarted) -> None:
        self.tokens.decoded += event.lost_tokens
        self.tokens.wasted[WasteCause.FAILED] += event.lost_tokens
        for sample_id in list(self.running):
            del self.running[sample_id]
            self._park(sample_id, self.sample(sample_id))
        self.replay = deque(sorted(s for s in self.batches if s >= event.step))
        for step in self.batches:
            if event.step <= step < self.next_step:
                self._account(step, -1)
                if step in self.untrained:
                    self.tokens.write_off(self.untrained.pop(step), -1)
        self.next_step = event.step
        self.policy_version = event.step

    # -- the law --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove conservation. Costs one pass over the groups that are open, ready, or consumed since the last check; an
        older consumed group does not change any more.

        Raises:
            AssertionError: naming the group or the account that does not add up.
        """
        counts: Counter[SampleState] = Counter()
        live = observed = 0
        consumed = {i for ids in self.batches.values() for i in ids}
        assert len(consumed) == sum(map(len, self.batches.values())), "a group is in two batches"
        self._proved &= consumed
        for group_id in self.groups.keys() - self._proved:
            group, is_consumed = self.groups[group_id], group_id in consumed
            unsettled = startable = 0
            for sample in group.samples:
                state = sample.state
                counts[state] += 1
                unsettled += state not in SETTLED
                startable += state in STARTABLE
                assert sample.num_tokens == sum(len(s.token_ids) for s in sample.segments)
                assert sample.num_observed == sum(len(o.token_ids) for o in sample.observations)
                assert state in SETTLED or sample.sample_id in self._places[state], f"{sample.sample_id} is not {state}"
                if state is not FAILED and not is_consumed:
                    live += sample.num_tokens
                    observed += sample.num_observed
            assert unsettled == group.num_unsettled, f"group {group_id} miscounts its unsettled samples"
            assert startable == group.num_startable, f"group {group_id} miscounts its startable samples"
            assert (group_id in self.open) == (unsettled > 0), f"group {group_id} is not only open"
            assert (group_id in self.ready) == (unsettled == 0 and not is_consumed)
            if is_consumed:
                self._proved.add(group_id)
        for state, place in self._places.items():
            assert counts[state] == len(place), f"a sample that is not {state}, or of no group, counts as {state}"
        assert self._startable == sorted(i for i, g in self.groups.items() if g.num_startable), "a group waits unseen"
        assert self.num_fresh == sum(g.num_startable for g in self.open.values() if g.start_version is None)
        for groups, starts in ((self.open, self.starts_of_open), (self.ready, self.starts_of_ready)):
            found = Counter(g.start_version for g in groups.values() if g.start_version is not None)
            assert dict(starts) == dict(found), "a version is counted that no group started at, or too often"
        awaiting_replay = [i for step in self.replay for i in self.batches[step]]
        replayed = [s for i in awaiting_replay for s in self.groups[i].samples if s.state is SCORED]
        live += sum(s.num_tokens for s in replayed)
        observed += sum(s.num_observed for s in replayed)
        assert self.tokens.live == live, f"{self.tokens.live} tokens are live by the account, {live} by the samples"
        assert self.tokens.observed_live == observed, f"{self.tokens.observed_live} observed tokens, not {observed}"
        assert self.next_group_id == (
            self.num_unconsumed + self.num_consumed + len(awaiting_replay) + sum(self.dropped.values())
        ), "a group has vanished"


def _take_one(starts: Counter[int], version: int) -> None:
    """Count one group less, and forget a version without groups: a long run has many."""
    starts[version] -= 1
    if not starts[version]:
        del starts[version]
