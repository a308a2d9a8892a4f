"""A run under virtual time: the production scheduler, ledger and strategies; engines, trainer and rewards are models.

This is the scheduler's second shell, beside the asyncio driver, and does in its turn what that and the loop do:
carry out what the scheduler decides, train, publish, continue. The same arguments give the same events
to the byte.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from rollover.batch import Batch
from rollover.errors import ConfigError, RunError
from rollover.garbage import rare_collections
from rollover.rollout.actions import ConsumeBatch, StartSample, StopAll
from rollover.rollout.config import Limits
from rollover.rollout.events import Event
from rollover.rollout.scheduler import GroupRules, Scheduler
from rollover.rollout.state import RolloutState, View
from rollover.rollout.strategy import OnFull, Strategy
from rollover.sim.dispatch import ReplicaPool
from rollover.sim.replica import Call, Replica
from rollover.sim.result import Meter, Simulation, StepRecord, step_record
from rollover.sim.rewards import Accuracies
from rollover.sim.scenario import Latency, Scenario
from rollover.sim.strategies.fast_lane import FastLane
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment
from rollover.workload.base import Workload
from rollover.workload.source import read_lengths

_as_long_as = lru_cache(maxsize=2**16)(range)
"""Stands for a number of tokens without taking any room; one for all segments of a length."""


def _segment_of(version: int, num_tokens: int, *others: Any) -> Segment:
    tokens = _as_long_as(num_tokens)
    return Segment(version, tokens, tokens, *others)


_goes_on = lru_cache(maxsize=2**12)(_segment_of)
"""One for all samples that decoded equally many tokens on a replica when the weights changed under them."""

# What an entry of the agenda is about. Of those at the same time, the first kind comes first.
_REPLICA, _ANSWERED, _SCORED, _TRAINED = range(4)

NEW_OBJECTS = 1_000_000
"""Between two collections of garbage, fewer than a gigabyte: a simulation keeps millions of records and makes no cycles
among them."""


class WorkloadSource:
    """Prompts without tokens: what a simulation needs of one is its number, and that of the sample where each of the
    ``num_siblings`` samples of a prompt is a group of its own."""

    def __init__(self, workload: Workload, num_siblings: int) -> None:
        self._workload = workload
        self._num_siblings = num_siblings

    def prompt(self, index: int) -> Prompt:
        index, sample = divmod(index, self._num_siblings)
        prompt_id = self._workload.prompt_id(index)
        columns = {"index": index, "sample": sample}
        return Prompt(prompt_id=prompt_id, token_ids=(), text="", source="", columns=columns)


def simulate(
    strategy: Strategy,
    workload: Workload | str,
    scenario: Scenario,
    *,
    steps: int,
    seed: int = 0,
    observer: Callable[[Event], None] | None = None,
    limits: Limits | None = None,
) -> Simulation:
    """Train ``steps`` batches under virtual time.

    Examples:
        Trained tokens per second of two strategies on one replica, whose iteration takes 10 ms for few samples and
        20 ms for 64. A comparison should take more than three steps, and leave out the first of them:

        >>> scenario = Scenario(replicas=(ReplicaModel(c0_s=0.01, b0=64.0),))
        >>> shared = {"rollout_batch_size": 4, "group_size": 2}
        >>> sync = simulate(strategy("sync", scenario.capabilities, **shared), "light-8k", scenario, steps=3)
        >>> april = simulate(strategy("april", scenario.capabilities, **shared), "light-8k", scenario, steps=3)
        >>> [round(run.after(0).trained_tokens / run.after(0).seconds) for run in (sync, april)]
        [489, 683]

    Args:
        workload: response lengths, or their source: a preset such as ``r1-16k``, a workload file, a file of
            lengths, or a run directory.
        seed: seed of latencies and rewards, and of the lengths of a workload given by name.
        observer: called with each event after it has been applied to the ledger.

    Raises:
        ConfigError: the strategy generates while the trainer trains, but on devices that the trainer is using.
        RunError: nothing runs and the batch does not fill up, or the group filter keeps nothing.
    """
    if scenario.colocated and strategy.on_full is OnFull.KEEP:
        raise ConfigError(
            "the strategy generates while the trainer trains, but with colocated = true replicas and trainer take"
            " turns: choose a strategy that stops for the trainer, or omit colocated"
        )
    if isinstance(workload, str):
        workload = read_lengths(workload).workload(seed)
    state = RolloutState()
    scheduler = Scheduler(
        strategy=strategy,
        source=WorkloadSource(workload, strategy.num_siblings),
        state=state,
        max_running=scenario.max_running,
        limits=limits or Limits(),
        rules=GroupRules(keep_group=_has_signal) if scenario.filter_zero_signal else None,
        emit=observer or (lambda event: None),
    )
    with rare_collections(NEW_OBJECTS):
        return _Run(scheduler, state.view, workload, scenario, seed).train(steps)


class _Run:
    def __init__(self, scheduler: Scheduler, view: View, workload: Workload, scenario: Scenario, seed: int) -> None:
        self._scheduler = scheduler
        self._strategy = scheduler.strategy
        self._view = view
        self._ledger = view.ledger
        self._workload = workload
        self._scenario = scenario
        self._rng = random.Random(seed)
        siblings = self._strategy.group_size * self._strategy.num_siblings
        self._accuracies = Accuracies(scenario, workload, siblings, seed)
        self._pool = ReplicaPool([Replica(model, i) for i, model in enumerate(scenario.replicas)])
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, int, Any]] = []
        self._num_entries = 0
        self._waking: list[float] = [math.inf] * len(scenario.replicas)
        self._batch_is_due = False
        """The scheduler's last word was to consume a batch."""
        self._attempts: dict[tuple[int, int], int] = {}
        """Number of times that each prompt was discarded and drawn again."""
        self._lengths: dict[int, tuple[int, ...]] = {}
        """Response lengths by group."""
        self._records: list[StepRecord] = []
        self._meter = Meter()
        """The counters at the end of the last step."""
        self._admitted: list[int] = []

    def train(self, steps: int) -> Simulation:
        self._scheduler.begin_round()
        self._decide()
        happen = (self._wake, self._observe, self._score, self._publish)  # by kind
        while len(self._records) < steps:
            if not self._agenda:
                raise RunError(self._stuck())
            self._now_s, kind, _, what = heapq.heappop(self._agenda)
            happen[kind](what)
            if self._batch_is_due and len(self._records) < steps:
                self._consume()
        self._ledger.check()
        return Simulation(
            steps=tuple(self._records),
            tokens=self._ledger.tokens,
            admitted_lengths=tuple(self._admitted),
        )

    # -- what happens ----------------------------------------------------------------------------------------

    def _wake(self, index: int) -> None:
        if self._waking[index] != self._now_s:
            return  # it was asked to come earlier or later since
        self._waking[index] = math.inf
        replica = self._pool.replicas[index]
        replica.advance(self._now_s)
        for call in replica.finished():
            self._pool.eased(replica)
            self._end(call, replica)
        self._schedule(replica)

    def _end(self, call: Call, replica: Replica) -> None:
        """End a call that has decoded all it was asked for."""
        sample_id = call.sample_id
        if sample_id not in self._ledger.running:  # stopped by what a sibling's end led to, and reported there
            return
        self._segment(call, self._reason(call), call.num_decoded - call.num_reported)
        if not call.is_whole:
            self._pool.parked(sample_id, replica)
        self._decide()
        if sample_id in self._ledger.acting:
            self._act(sample_id)
        elif call.is_whole:
            self._finish(sample_id)

    def _act(self, sample_id: SampleId) -> None:
        """Have the environment answer a turn."""
        turns, now_s = self._scenario.turns, self._now_s
        assert turns is not None
        self._enter(now_s + turns.answer.seconds(0, self._rng), _ANSWERED, (sample_id, now_s))

    def _observe(self, answered: tuple[SampleId, float]) -> None:
        sample_id, start_s = answered
        if sample_id not in self._ledger.acting:  # its group was dropped
            return
        turns, sampled = self._scenario.turns, self._ledger.sample(sample_id).num_tokens
        is_over = sampled == self._lengths_of(sample_id.group)[sample_id.index]
        assert turns is not None
        ids, end = ((), FinishReason.STOP) if is_over else (_as_long_as(turns.observed_tokens), None)
        self._scheduler.observed(sample_id, Observation(ids, end=end, start_s=start_s, end_s=self._now_s), self._now_s)
        self._decide()
        if is_over:
            self._finish(sample_id)

    def _finish(self, sample_id: SampleId) -> None:
        if sample_id not in self._ledger.unscored:  # its group was dropped
            return
        reward_s = 0.0 if self._scenario.reward.is_zero else self._latency(self._scenario.reward, sample_id)
        if reward_s:
            self._enter(self._now_s + reward_s, _SCORED, sample_id)
        else:
            self._score(sample_id)

    def _score(self, sample_id: SampleId) -> None:
        if sample_id not in self._ledger.unscored:  # its group was dropped
            return
        index = self._ledger.groups[sample_id.group].prompt.columns["index"]
        reward = float(self._rng.random() < self._accuracies.of_prompt(index))
        self._scheduler.scored(sample_id, reward, self._now_s)
        self._decide()

    def _consume(self) -> None:
        """Hand a batch to the trainer."""
        ledger = self._ledger
        num_trained = ledger.tokens.trained
        self._batch_is_due = False
        batch = self._scheduler.consume(self._now_s)
        seconds = self._scenario.trainer.seconds(ledger.tokens.trained - num_trained, self._rng)
        self._enter(self._now_s + seconds, _TRAINED, batch)

    def _publish(self, batch: Batch) -> None:
        """Publish new weights once the trainer is done, and begin the next round."""
        ledger, scheduler = self._ledger, self._scheduler
        version = batch.step + 1
        self._pool.advance(self._now_s)
        meter = Meter.read(self._pool.replicas, self._now_s)
        self._records.append(step_record(batch, meter.since(self._meter)))
        self._meter = meter
        for replica in self._pool.replicas:
            for call, num_decoded in replica.progress():
                if num_decoded > call.num_reported:
                    self._segment(call, None, num_decoded - call.num_reported)
                call.policy_version = version
            if self._scenario.kv_on_update == "recompute":
                replica.recompute(version)
            replica.stall(replica.model.swap_pause_s)
        pause_s = max(r.swap_pause_s for r in self._scenario.replicas)
        scheduler.published(version, self._now_s, pause_s=pause_s)
        scheduler.saved(version, self._now_s)
        self._lengths = {i: lengths for i, lengths in self._lengths.items() if i in ledger.groups}
        scheduler.begin_round()
        self._decide()
        for replica in self._pool.replicas:
            self._schedule(replica)

    # -- doing as told ---------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._batch_is_due = False
        starts: list[StartSample] = []
        for action in self._scheduler.decide(self._now_s):
            match action:
                case StartSample():
                    starts.append(action)
                case StopAll():
                    self._stop()
                    self._decide()
                case ConsumeBatch():
                    self._batch_is_due = True
        if starts:
            self._start(starts)

    def _start(self, starts: Sequence[StartSample]) -> None:
        changed: dict[int, Replica] = {}
        turns = self._scenario.turns
        for sample_id, budget in starts:
            entry = self._ledger.sample(sample_id)
            index = entry.prompt.columns["index"]
            left = self._lengths_of(sample_id.group)[sample_id.index] - entry.num_tokens
            wanted = left if turns is None else min(left, turns.tokens - entry.num_tokens % turns.tokens)
            num_tokens = wanted if budget is None else min(wanted, budget)
            replica = self._pool.place(sample_id, fast_lane=self._wants_fast_lane(sample_id))
            replica.advance(self._now_s)
            changed[replica.index] = replica
            replica.add(
                Call(
                    sample_id=sample_id,
                    prompt=index,
                    prompt_tokens=self._workload.prompt_tokens(index),
                    response_tokens=entry.num_tokens + entry.num_observed,
                    num_tokens=num_tokens,
                    is_whole=num_tokens == left,
                    is_turn=turns is not None and num_tokens == wanted,
                    start_s=self._now_s,
                    policy_version=self._ledger.policy_version,
                )
            )
        for replica in changed.values():
            self._schedule(replica)

    def _wants_fast_lane(self, sample_id: SampleId) -> bool:
        return isinstance(self._strategy, FastLane) and self._strategy.wants_fast_lane(self._view, sample_id)

    def _stop(self) -> None:
        """Park everything that runs."""
        if not self._ledger.running:
            return
        self._pool.advance(self._now_s)
        for replica in self._pool.replicas:
            self._end_all(replica)

    def _end_all(self, replica: Replica) -> None:
        """End all calls of a replica; one that had just decoded its last token has finished: a finish that races with
        an abort wins."""
        done: list[SampleId] = []
        for call in replica.stop():
            is_done = call.num_decoded == call.num_tokens
            reason = self._reason(call) if is_done else FinishReason.ABORT
            self._segment(call, reason, call.num_decoded - call.num_reported)
            if is_done and (call.is_whole or call.is_turn):
                done.append(call.sample_id)
            if not (is_done and call.is_whole):
                self._pool.parked(call.sample_id, replica)
        self._pool.eased(replica)
        for sample_id in done:
            if sample_id in self._ledger.acting:
                self._act(sample_id)
            else:
                seconds = self._latency(self._scenario.reward, sample_id)
                self._enter(self._now_s + seconds, _SCORED, sample_id)

    def _segment(self, call: Call, reason: FinishReason | None, num_tokens: int) -> None:
        now_s = self._now_s
        segment = (_goes_on if reason is None else _segment_of)(
            call.policy_version, num_tokens, reason, call.kv_version, call.start_s, now_s, call.num_prefilled_tokens
        )
        call.num_reported += num_tokens
        call.num_prefilled_tokens = 0
        call.start_s = now_s
        self._scheduler.segment_ended(call.sample_id, segment, now_s)

    def _reason(self, call: Call) -> FinishReason:
        if call.is_whole:
            sampled = self._ledger.sample(call.sample_id).num_tokens + call.num_tokens - call.num_reported
            if sampled >= self._workload.cap:
                return FinishReason.LENGTH
        if call.is_turn:
            return FinishReason.TURN
        return FinishReason.STOP if call.is_whole else FinishReason.ABORT

    def _latency(self, latency: Latency, sample_id: SampleId) -> float:
        return latency.seconds(self._ledger.sample(sample_id).num_tokens, self._rng)

    # -- the agenda ------------------------------------------------------------------------------------------

    def _enter(self, time_s: float, kind: int, what: Any) -> None:
        self._num_entries += 1
        heapq.heappush(self._agenda, (time_s, kind, self._num_entries, what))

    def _schedule(self, replica: Replica) -> None:
        """Look at the replica again when something happens there."""
        next_s = replica.next_s()
        if next_s != self._waking[replica.index]:
            self._waking[replica.index] = next_s
            if next_s < math.inf:
                self._enter(next_s, _REPLICA, replica.index)

    def _lengths_of(self, group_id: int) -> tuple[int, ...]:
        """Return the lengths of a group's responses; they are drawn when its first sample starts."""
        lengths = self._lengths.get(group_id)
        if lengths is None:
            columns = self._ledger.groups[group_id].prompt.columns
            index, sample = columns["index"], columns["sample"]
            attempt = self._attempts.get((index, sample), -1) + 1
            self._attempts[index, sample] = attempt
            group_size = self._strategy.group_size
            num_samples = group_size * self._strategy.num_siblings
            lengths = self._workload.group_lengths(index, num_samples, attempt)[sample : sample + group_size]
            self._lengths[group_id] = lengths
            self._admitted.extend(lengths)
        return lengths

    def _stuck(self) -> str:
        ledger = self._ledger
        return (
            f"step {ledger.next_step} waits forever: {len(ledger.ready)} groups are ready, {len(ledger.open)} are open,"
            f" and {len(ledger.waiting) + len(ledger.parked)} of their samples could run, but none does"
        )


def _has_signal(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) > 1
