"""The scheduler: every decision about rollouts, and the resulting events. No clock, no engine, no asyncio.

Two shells use it: the driver (asyncio, real engines) and the simulator (virtual time, models of engines). A shell
reports what happened and carries out the answer, so both make the same decisions.

Invariants: every change of state is an event, emitted in the order in which the ledger applied it; no batch
is handed out against the staleness bound; a sample is started only if the strategy asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import islice
from typing import Any, Protocol

from rollover.batch import Batch, WasteCause
from rollover.errors import DataError, RunError
from rollover.rollout.actions import Action, ConsumeBatch, StartSample, StopAll
from rollover.rollout.config import Limits
from rollover.rollout.events import (
    BatchConsumed,
    CheckpointSaved,
    Event,
    GroupDropped,
    GroupOpened,
    Observed,
    SampleFailed,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.records import FAILED, GroupRecord, SampleRecord, SampleState
from rollover.rollout.state import RolloutState
from rollover.rollout.strategy import OnFull, Strategy
from rollover.types import MAX_REWARD, Observation, Prompt, SampleId, Score, Segment, Trajectory


class Source(Protocol):
    """Returns prompts by number. It is a pure function, so that a restart needs only a cursor.

    Example: ``prompt(7)`` returns the same eighth prompt in every process, whatever was requested before.
    """

    def prompt(self, index: int) -> Prompt: ...


class EachSample:
    """Hands out each prompt of another source ``num_samples`` times, for samples that are trained one by one, each in a
    group of its own.
    """

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source = source
        self._num_samples = num_samples

    def prompt(self, index: int) -> Prompt:
        return self._source.prompt(index // self._num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The rules by which prompts are passed over and groups are compared; by default, every group is trained.

    Examples:
        Dynamic sampling drops groups of equal rewards, and others take their place:

        >>> rules = GroupRules(keep_group=lambda rewards: len({*rewards}) > 1)
        >>> rules.keep_group([1.0, 1.0]), rules.keep_group([1.0, 0.0])
        (False, True)
    """

    keep_group: Callable[[Sequence[Any]], bool] = lambda rewards: True
    """Returns whether a group with these rewards is worth training."""
    compared: Callable[[SampleRecord], Any] = lambda sample: sample.reward
    """Returns what ``keep_group`` gets of a sample."""
    shaping: Callable[[int], float] = lambda num_tokens: 0.0
    """Returns what the algorithm adds to the reward of a response with this number of tokens before it compares; those
    that were observed count too, as for the limit."""
    passes_over: Callable[[Prompt], bool] = lambda prompt: False
    """Returns whether a prompt of the source is left out."""


class SamplePlacement(Protocol):
    """The places for samples in an engine whose members come and go and serve several versions of the weights."""

    def room(self) -> int:
        """Return how many samples can be decoded at the same time at present."""
        ...

    def takes_one(self, least_version: int, num_waiting: int) -> bool:
        """Return whether ``reserve`` would now promise a place to any sample."""
        ...

    def reserve(self, sample_id: SampleId, least_version: int, num_waiting: int) -> int | None:
        """Promise a place to a sample. Returns the version of the member, or ``None`` when the sample has to wait; then
        all others have to wait too until something changes other than that fewer of them wait. ``num_waiting``: samples
        that are to be placed beside it."""
        ...


class _Phase(Enum):
    IDLE = auto()
    """No batch is wanted, and nothing is started."""
    COLLECTING = auto()
    """A batch is wanted: samples are started until it is full."""
    ENDING = auto()
    """The batch is full: nothing is started, and it is consumed once the running samples have stopped or ended."""
    OVERLAPPING = auto()
    """Samples are started while the trainer has the last batch."""


_IDLE, _COLLECTING, _ENDING, _OVERLAPPING = _Phase
_STOP, _CONSUME = (StopAll(),), (ConsumeBatch(),)


class Scheduler:
    """Decides about rollouts: it asks the strategy, emits the events and tells its shell what to do.

    Examples:
        One step of a loop over it, in which both samples of a group decode two tokens:

        >>> class Sums:
        ...     def prompt(self, index):
        ...         return Prompt(prompt_id=f"sums/{index}@0", token_ids=(1, index), text=f"{index}+1", source="sums")
        >>> engine = Capabilities(max_running=2, max_context_tokens=64)
        >>> sync = strategy("sync", engine, rollout_batch_size=1, group_size=2)
        >>> scheduler = Scheduler(strategy=sync, source=Sums(), state=RolloutState(), max_running=2)
        >>> scheduler.begin_round()
        >>> started = list(scheduler.decide(now_s=0.0))
        >>> [str(action.sample_id) for action in started]
        ['g0.0', 'g0.1']
        >>> for action in started:
        ...     segment = Segment(0, (5, 7), (-0.1, -0.2), FinishReason.STOP, 0, 0.0, 1.0)
        ...     scheduler.segment_ended(action.sample_id, segment, 1.0)
        ...     scheduler.scored(action.sample_id, 1.0, 1.0)
        >>> list(scheduler.decide(now_s=1.0))
        [ConsumeBatch()]
        >>> batch = scheduler.consume(1.0)
        >>> batch.step, batch.num_tokens
        (0, 4)
        >>> scheduler.published(1, 2.0, pause_s=0.5)  # the batch is trained, and the engine has the new weights
        >>> scheduler.trajectory(started[0].sample_id).token_ids
        (5, 7)
        >>> scheduler.saved(1, 3.0)  # a checkpoint is on disk, so batch 0 is never handed out again

    Args:
        state: the ledger and the statistics; nothing else may apply events to them while the scheduler works.
        max_running: samples the engine decodes at the same time, or a function that returns how many at present.
        placement: where samples are placed, if the members of the engine come and go; ``max_running`` is then ignored.
        compares_siblings: whether the samples of a group of this source are scored together, once each has ended.
        emit: called with each event once the ledger has applied it.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        source: Source,
        state: RolloutState,
        max_running: int | Callable[[], int],
        limits: Limits | None = None,
        placement: SamplePlacement | None = None,
        emit: Callable[[Event], None] = lambda event: None,
        rules: GroupRules | None = None,
        compares_siblings: Callable[[str], bool] = lambda source: False,
    ) -> None:
        self.ledger = state.ledger
        self._state = state
        self._view = state.view
        self.strategy = strategy
        self._phase = _IDLE
        self._is_paused = False
        self._keeps_running = strategy.on_full is OnFull.KEEP
        self._source = source
        self._placement = placement
        self._room = (
            placement.room if placement else max_running if callable(max_running) else partial(int, max_running)
        )
        self._limits = limits or Limits()
        self._rules = rules or GroupRules()
        self._compares_siblings = compares_siblings
        self._emit = emit
        self._num_failed_in_a_row = 0
        self._num_dropped_in_a_row = self._num_hopeless_in_a_row = 0
        self._last_failure = ""
        self._unsettled = [group for group in self.ledger.ready.values() if self._is_hopeless(group)]
        """Groups to drop, which a process that ended did not record."""

    def record(self, event: Event) -> None:
        self._state.apply(event)
        self._emit(event)

    # -- what to do ------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Ask for a batch: from now on ``decide`` starts samples for it. Raises ``RunError`` if the engine's weights
        are too old for the batch."""
        step, version, bound = self.ledger.next_step, self.ledger.policy_version, self.strategy.max_staleness
        if not self.ledger.replay and version < step - bound:
            raise RunError(
                f"batch {step} is asked for, but the engine samples from weights of version {version}, and"
                f" max_staleness is {bound}: call published (or the driver's update_weights) with version {step} after"
                " each training step"
            )
        self._phase = _COLLECTING

    def halt(self) -> None:
        """Start nothing until the next round begins."""
        self._phase = _IDLE

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make no decisions within this context: neither starts nor stops nor batches."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def decide(self, now_s: float) -> Sequence[Action]:
        """Return what the shell has to do now. Groups that the strategy opens are on record when this returns.

        While a round collects, samples are started. Once its batch is full, nothing more is started and running samples
        are stopped, or end by themselves; then the batch is consumed, or the round collects again if groups
        of the batch were dropped meanwhile. A strategy that keeps its samples running starts more of them even while
        the batch is full and while the trainer has it. A batch that was handed out before a restart is consumed again
        without any of this.
        """
        phase = self._phase
        if phase is _IDLE or self._is_paused:
            return ()
        while self._unsettled:
            self._settle(self._unsettled.pop().samples[0].sample_id, now_s)
        if self.ledger.replay:
            return _CONSUME if phase is _COLLECTING else ()
        if phase is _COLLECTING and not self._keeps_running and self._batch_is_full:
            phase = self._phase = _ENDING
            if self.strategy.on_full is not OnFull.WAIT:
                return _STOP
        if phase is _ENDING:
            if self._is_ending:
                return ()
            if self._batch_is_full:
                return _CONSUME
            self._phase = _COLLECTING  # groups of the batch were dropped while its round ended
        starts = self._start_samples(now_s)
        if phase is _COLLECTING and self._keeps_running and self._batch_is_full:
            return (*starts, *_CONSUME)
        return starts

    @property
    def has_batch(self) -> bool:
        """Return whether the next round can hand out its batch without starting anything."""
        return bool(self.ledger.replay) or (not self._keeps_running and self._batch_is_full)

    @property
    def _batch_is_full(self) -> bool:
        ready, strategy = self.ledger.ready, self.strategy
        return len(ready) >= strategy.batch_size and strategy.select_batch(self._view) is not None

    @property
    def _is_ending(self) -> bool:
        """Return whether anything still runs. A strategy that waits for the last token waits for the last reward
        too, unless that compares a sample with siblings that have yet to be decoded."""
        ledger = self.ledger
        waits = self.strategy.on_full is OnFull.WAIT
        return bool(ledger.running) or (waits and any(self._is_being_scored(i.group) for i in ledger.unscored))

    def _is_being_scored(self, group_id: int) -> bool:
        group = self.ledger.groups[group_id]
        return not (group.num_startable and self._compares_siblings(group.prompt.source))

    def _start_samples(self, now_s: float) -> Sequence[StartSample]:
        ledger, strategy, view = self.ledger, self.strategy, self._view
        if (num_groups := strategy.groups_to_open(view)) > 0:
            takes_returned = strategy.takes_returned(view)
            for _ in range(num_groups):
                self._open_group(now_s, takes_returned=takes_returned)
        room = self._room() - len(ledger.running)
        if room <= 0 or not (ledger.waiting or ledger.parked) or self._all_have_to_wait:
            return ()
        starts: list[StartSample] = []
        is_refused = False
        for sample_id in list(islice(strategy.samples_to_start(view), room)):
            if is_refused and ledger.groups[sample_id.group].start_version is None:
                continue  # it would be refused like the previous one
            start = self._start(sample_id, now_s)
            if start is None:
                is_refused = True
            else:
                starts.append(start)
        return starts

    @property
    def _num_startable(self) -> int:
        return len(self.ledger.waiting) + len(self.ledger.parked)

    @property
    def _all_have_to_wait(self) -> bool:
        """Return whether every startable sample needs a place and there is none. This is the usual case while the
        engine is busy and thousands may wait, so it is checked without looking at any of them."""
        if self._placement is None or self.ledger.num_fresh < self._num_startable:
            return False
        least_version = self.strategy.least_start_version(self._view)
        return not self._placement.takes_one(least_version, self._num_startable - 1)

    def _open_group(self, now_s: float, *, takes_returned: bool) -> None:
        ledger = self.ledger
        if takes_returned and ledger.returned:
            prompt, cursor = ledger.returned[0], ledger.cursor
        else:
            cursor = ledger.cursor
            while self._rules.passes_over(prompt := self._source.prompt(cursor)):
                cursor += 1
            cursor += 1
        self.record(
            GroupOpened(
                time_s=now_s,
                group_id=ledger.next_group_id,
                prompt=prompt,
                group_size=self.strategy.group_size,
                cursor=cursor,
            )
        )

    def _start(self, sample_id: SampleId, now_s: float) -> StartSample | None:
        view, strategy = self._view, self.strategy
        version = self.ledger.policy_version
        if self._placement is not None and self.ledger.groups[sample_id.group].start_version is None:
            least_version = strategy.least_start_version(view)
            placed = self._placement.reserve(sample_id, least_version, self._num_startable - 1)
            if placed is None:
                return None
            version = placed
        start = StartSample(sample_id, strategy.token_budget(view, sample_id))
        self.record(SampleStarted(now_s, sample_id, version))
        return start

    def trajectory(self, sample_id: SampleId) -> Trajectory:
        """Return a sample as it is now: its prompt, and the tokens that a call which starts it continues after."""
        return self.ledger.sample(sample_id).trajectory

    # -- what happened ---------------------------------------------------------------------------------------

    def segment_ended(self, sample_id: SampleId, segment: Segment, now_s: float) -> None:
        self.record(SegmentEnded(now_s, sample_id, segment))

    def observed(self, sample_id: SampleId, observation: Observation, now_s: float) -> None:
        """Record the answer of an episode's environment to its last turn."""
        self.record(Observed(now_s, sample_id, observation))

    def scored(self, sample_id: SampleId, reward: float, now_s: float) -> None:
        """Record the reward of a sample, or its failure if the reward cannot be trained on.

        Raises:
            DataError: under the same conditions as ``failed``, or ``reward`` is no number.
        """
        if not isinstance(reward, Score):
            try:
                reward = float(reward)  # NumPy and torch have numbers of their own, which the journal cannot hold
            except Exception:
                raise DataError(f"the reward of {sample_id} is {reward!r:.60}: a scorer must return a number") from None
        if not abs(reward) <= MAX_REWARD:  # written so that NaN fails too
            self.failed(sample_id, f"its reward is {reward}: not a finite number within {MAX_REWARD:g}", now_s)
            return
        self._num_failed_in_a_row = 0
        shaping = self._rules.shaping(self.ledger.sample(sample_id).limited_tokens)
        if isinstance(reward, Score):
            event = SampleScored(now_s, sample_id, float(reward), shaping, reward.components, reward.solved)
        else:
            event = SampleScored(now_s, sample_id, reward, shaping)
        self.record(event)
        self._settle(sample_id, now_s)

    def failed(self, sample_id: SampleId, reason: str, now_s: float, *, cause: WasteCause = WasteCause.FAILED) -> None:
        """Give up the sample.

        Raises:
            DataError: too many failed in a row, so it is hardly the sample's fault.
        """
        self.record(SampleFailed(time_s=now_s, sample_id=sample_id, reason=reason, cause=cause))
        self._last_failure = reason
        self._settle(sample_id, now_s)
        self._num_failed_in_a_row += 1
        per_batch = self.strategy.batch_size * self.strategy.group_size
        if self._num_failed_in_a_row >= self._limits.max_failed_batches * per_batch:
            end = "all failed" if cause is WasteCause.FAILED else "have no reward"
            raise DataError(f"the last {self._num_failed_in_a_row} samples {end}, the last one with: {reason}")

    def published(self, version: int, now_s: float, *, pause_s: float) -> None:
        """Record that the engine samples from weights ``version``. Raises ``RunError`` if the version goes back, or is
        ahead of the batches that were handed out."""
        oldest, newest = self.ledger.policy_version, self.ledger.next_step
        if not oldest <= version <= newest:
            raise RunError(
                f"weights of version {version} are published, but the version must be between {oldest}, the present"
                f" one, and {newest}, the number of batches handed out: a batch of step s is trained into version s + 1"
            )
        self.record(VersionPublished(time_s=now_s, policy_version=version, pause_s=pause_s))

    def saved(self, step: int, now_s: float) -> None:
        """Let go of the batches before ``step``: a checkpoint of that step is on disk, and none older is resumed."""
        self.record(CheckpointSaved(time_s=now_s, step=step))

    def _settle(self, sample_id: SampleId, now_s: float) -> None:
        """Decide, once all siblings are scored or failed, whether the group is worth training. A lone survivor is not:
        its advantage would be 0.

        Raises:
            RunError: no group has been worth training for a long time.
        """
        group = self.ledger.groups[sample_id.group]
        if group.num_unsettled:
            return
        if self._is_hopeless(group):
            causes = {sample.cause for sample in group.samples}
            cause = WasteCause.FAILED if WasteCause.FAILED in causes else WasteCause.NO_REWARD
            self._num_hopeless_in_a_row += 1
        elif self._rules.keep_group([self._rules.compared(s) for s in group.samples if s.reward is not None]):
            self._num_dropped_in_a_row = self._num_hopeless_in_a_row = 0
            return
        else:
            cause = WasteCause.FILTER_ZERO_SIGNAL
        self._drop(group.group_id, cause, now_s, prompt_returned=False)
        self._num_dropped_in_a_row += 1
        num_dropped, num_hopeless = self._num_dropped_in_a_row, self._num_hopeless_in_a_row
        if num_dropped > self._limits.max_dropped_batches * self.strategy.batch_size:
            why = "the samples of each have the same reward"
            if num_hopeless:
                why = f"{num_hopeless} of them have too few rewards to compare (the last failure: {self._last_failure})"
                why += ", and the samples of each other have the same reward" * (num_dropped > num_hopeless)
            raise RunError(
                f"the last {num_dropped} groups gave no signal: {why}. If the reward is at fault, mend it and resume;"
                " else start a new run with easier or harder prompts, or with algorithm.group_filter = 'none'"
            )

    def _is_hopeless(self, group: GroupRecord) -> bool:
        """Return whether too few samples of a settled group have a reward."""
        return group.num_scored < min(2, self.strategy.group_size)

    # -- the batch -------------------------------------------------------------------------------------------

    def drop_tokens_of(self, engine: str, now_s: float, *, since: int) -> int:
        """Drop the unconsumed groups with tokens that ``engine`` sampled under version ``since`` or later; their
        prompts are used again. Returns how many tokens they had."""
        before = self.ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE]
        for group in list(self.ledger.unconsumed()):
            segments = (s for sample in group.samples if sample.state is not FAILED for s in sample.segments)
            if any(s.engine == engine and s.token_ids and s.policy_version >= since for s in segments):
                self._drop(group.group_id, WasteCause.UNTRUSTED_ENGINE, now_s, prompt_returned=True)
        return self.ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE] - before

    def consume(self, now_s: float) -> Batch:
        """Hand out the batch that ``decide`` announced: after a restart the recorded batch, otherwise the batch that
        the strategy selects. Before it the strategy's unfinished groups and its surplus are dropped: what follows a
        batch is void if a deterministic run collects the next one again."""
        ledger, strategy = self.ledger, self.strategy
        step, is_replay = ledger.next_step, bool(ledger.replay)
        discards = strategy.on_full is OnFull.DISCARD and not is_replay
        if discards:
            self._discard_unfinished(now_s)
        group_ids = ledger.batches[step] if is_replay else strategy.select_batch(self._view)
        assert group_ids is not None, "decide has announced a full batch"
        batch = Batch(step=step, groups=self._view.groups(group_ids))
        oldest = min(g.oldest_version for g in batch.groups)
        assert step - oldest <= strategy.max_staleness, f"batch {step} holds a token of version {oldest}"
        if not is_replay:
            for group_id in [i for i in strategy.surplus(self._view) if i not in group_ids]:
                # The prompt returns if the prompts of other late groups do.
                self._drop(group_id, WasteCause.SURPLUS_GROUP, now_s, prompt_returned=discards)
        self.record(BatchConsumed(time_s=now_s, step=step, group_ids=group_ids))
        self._phase = _OVERLAPPING if self._keeps_running and not is_replay else _IDLE
        return batch

    def _discard_unfinished(self, now_s: float) -> None:
        """Drop the groups that still have tokens to decode. Those that only wait for a reward are complete and stay."""
        unfinished = (SampleState.WAITING, SampleState.PARKED, SampleState.ACTING)
        for group in list(self.ledger.open.values()):
            if any(s.state in unfinished for s in group.samples):
                self._drop(group.group_id, WasteCause.DISCARDED_ON_ABORT, now_s, prompt_returned=True)

    def _drop(self, group_id: int, cause: WasteCause, now_s: float, *, prompt_returned: bool) -> None:
        self.record(GroupDropped(time_s=now_s, group_id=group_id, cause=cause, prompt_returned=prompt_returned))
