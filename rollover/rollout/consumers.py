"""The consumers of finished calls: the environment, which answers the turns of episodes, and the scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext

from rollover.batch import WasteCause
from rollover.clock import Clock
from rollover.errors import NoReward, RewardError, RolloverError
from rollover.rollout.environment import Environment
from rollover.rollout.events import Event, GroupDropped, SampleFailed, SampleScored
from rollover.rollout.records import FINISHED, SETTLED
from rollover.rollout.scheduler import Scheduler
from rollover.rollout.scorer import Scorer, compares_siblings, scores_of
from rollover.types import Observation, SampleId


class Consumers:
    """Has turns answered and finished samples scored, and reports the results to the scheduler.

    Args:
        act: carries out the scheduler's decisions.
        lockstep: one call is consumed at a time, in order of arrival, and ``consume`` returns when it is. Otherwise
            tasks do the work, and ``consume`` returns at once.
        on_done: called when a task has ended.
        on_error: called with whatever ends the run.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        scorer: Scorer,
        scheduler: Scheduler,
        clock: Clock,
        act: Callable[[], None],
        lockstep: bool,
        on_done: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.environment = environment
        self.answering: dict[SampleId, asyncio.Task[None]] = {}
        """Turns that the environment is answering."""
        self.scoring: dict[SampleId, asyncio.Task[None]] = {}
        self.last_result_s = 0.0
        """Run clock at the last answer or score."""
        self._scorer = scorer
        self._scheduler = scheduler
        self._ledger = scheduler.ledger
        self._clock = clock
        self._act = act
        self._turn = asyncio.Lock() if lockstep else None
        self._on_done, self._on_error = on_done, on_error

    @property
    def are_busy(self) -> bool:
        return bool(self.answering or self.scoring)

    def tasks(self) -> Iterator[asyncio.Task[None]]:
        yield from self.answering.values()
        yield from self.scoring.values()

    def take_up(self, *, but: Set[SampleId]) -> None:
        """Start whatever is due and not in hand, as after a restart, ``but`` for samples that hand over themselves."""
        for sample_id in self._ledger.acting.keys() - self.answering.keys() - but:
            self._start_answering(sample_id)
        for sample_id in self._ledger.unscored.keys() - self.scoring.keys() - but:
            self._start_scoring(self._due(sample_id))

    async def consume(self, sample_id: SampleId) -> None:
        """Have a turn answered or a finished sample scored, now that a call has ended, and act."""
        async with self._turn or nullcontext():
            if sample_id in self._ledger.acting:
                if self._turn is None:
                    self._start_answering(sample_id)
                else:
                    self.answering[sample_id] = asyncio.create_task(self._answer(sample_id))
                    await self.answering[sample_id]
            await self._go_on(sample_id)
            if self._turn is not None:
                await asyncio.sleep(0)  # new calls and aborts reach the engine before it continues

    def see(self, event: Event) -> None:
        """Let go of samples that are settled."""
        match event:
            case GroupDropped(group_id=group_id):
                for tasks in (self.scoring, self.answering):
                    for sample_id in [i for i in tasks if i.group == group_id]:
                        tasks.pop(sample_id).cancel()
                for index in range(self._scheduler.strategy.group_size):
                    self.environment.leave(SampleId(group_id, index))
            case SampleScored(sample_id=sample_id) | SampleFailed(sample_id=sample_id):
                self.environment.leave(sample_id)

    async def _go_on(self, sample_id: SampleId) -> None:
        """Have whatever is due for its reward scored, and act."""
        due = self._due(sample_id)
        self._start_scoring(due)
        if self._turn is not None and due:
            await asyncio.wait([self.scoring[due[0]]])
        self._act()

    # -- turns -----------------------------------------------------------------------------------------------

    def _start_answering(self, sample_id: SampleId) -> None:
        self.answering[sample_id] = asyncio.create_task(self._answer_alone(sample_id))

    async def _answer_alone(self, sample_id: SampleId) -> None:
        """Have a turn answered, and act on the answer."""
        try:
            await self._answer(sample_id)
            async with self._turn or nullcontext():
                await self._go_on(sample_id)
        except Exception as e:
            self._on_error(e)
        self._on_done()

    async def _answer(self, sample_id: SampleId) -> None:
        """Have the environment answer the last turn of an episode."""
        observation: Observation | RewardError
        try:
            trajectory = self._ledger.sample(sample_id).trajectory
            observation = await self.environment.act(trajectory, self._clock.now_s())
        except RewardError as e:
            observation = e
        finally:
            self.answering.pop(sample_id, None)
        now_s = self.last_result_s = self._clock.now_s()
        if isinstance(observation, RewardError):
            self._scheduler.failed(sample_id, str(observation), now_s)
        else:
            self._scheduler.observed(sample_id, observation._replace(end_s=now_s), now_s)

    # -- rewards ---------------------------------------------------------------------------------------------

    def _due(self, sample_id: SampleId) -> tuple[SampleId, ...]:
        """Return the samples to score now that this one has ended: itself if it is finished, or, if their reward
        compares siblings, all finished ones of its group once each has ended."""
        group = self._ledger.groups.get(sample_id.group)
        if group is None or not compares_siblings(self._scorer, group.prompt.source):
            return (sample_id,) if sample_id in self._ledger.unscored else ()
        if any(sample.state is not FINISHED and sample.state not in SETTLED for sample in group.samples):
            return ()
        finished = (sample.sample_id for sample in group.samples if sample.state is FINISHED)
        return tuple(one for one in finished if one not in self.scoring)

    def _start_scoring(self, sample_ids: tuple[SampleId, ...]) -> None:
        if sample_ids:
            self.scoring.update(dict.fromkeys(sample_ids, asyncio.create_task(self._score(sample_ids))))

    async def _score(self, sample_ids: tuple[SampleId, ...]) -> None:
        try:
            scores = await scores_of(self._scorer, [self._ledger.sample(i).trajectory for i in sample_ids])
        except RolloverError as e:
            self._on_error(e)
            return
        finally:
            for sample_id in sample_ids:
                self.scoring.pop(sample_id, None)
        now_s = self.last_result_s = self._clock.now_s()
        try:
            for sample_id, score in zip(sample_ids, scores, strict=True):
                if isinstance(score, RewardError):
                    cause = WasteCause.NO_REWARD if isinstance(score, NoReward) else WasteCause.FAILED
                    self._scheduler.failed(sample_id, str(score), now_s, cause=cause)
                else:
                    self._scheduler.scored(sample_id, score, now_s)
            self._act()
        except Exception as e:
            self._on_error(e)
        self._on_done()
