"""The driver: the asyncio shell around the scheduler. It runs the samples that the scheduler starts and writes the
journal.

::

                        ┌────────┐ ──requests──▶ engine
                        │ driver │ ◀──chunks───
   scheduler ◀─news──── │        │ ──trajectories──▶ scorer
             ─starts──▶ └────────┘ ◀──rewards──
                             │ events
                             ▼
                          journal

====================  =======================  ===============================  ==============================
task                  consumes                 waits for                        is unblocked by
====================  =======================  ===============================  ==============================
``next_batch``        ready groups             a full batch                     a group settled; the stall limit
``_generate``, each   segments of one call     the engine, or a back-off        chunks; abort; the engine's error
``Consumers``, each   a turn of an episode, a  the environment or the scorer    its answer or reward, error or
                      finished trajectory      (off the abort path)             time-out
====================  =======================  ===============================  ==============================

Progress is a token, an answer of an environment or a reward. An abort that the driver has not requested is a failure of
the engine like any other: the sample keeps its tokens and is tried again, as described in ``rollover.rollout.retries``.
The life of one call is in ``rollover.rollout.generation``; what follows it, in ``rollover.rollout.consumers``.

Invariants: every change of state is an event, journaled in the order in which the ledger applied it; a
sample has at most one open engine call; the staleness bound holds for every batch handed out.

With ``lockstep`` each finished sample is scored and acted upon before the engine continues decoding (an engine that
declares lockstep waits for its consumers), one at a time in order of arrival: two runs then make the same decisions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial

from rollover.batch import Batch
from rollover.clock import Clock, SystemClock
from rollover.engine.base import CallPlacement, Engine
from rollover.errors import CallDisplaced, EngineError, EnginesAway, EngineTimeout
from rollover.rollout.actions import ConsumeBatch, StartSample, StopAll
from rollover.rollout.config import Limits
from rollover.rollout.consumers import Consumers
from rollover.rollout.environment import Environment, NoEnvironment
from rollover.rollout.events import Event
from rollover.rollout.generation import SampleCall
from rollover.rollout.journal import Journal
from rollover.rollout.places import EnginePlaces
from rollover.rollout.retries import Retries
from rollover.rollout.scheduler import GroupRules, Scheduler, Source
from rollover.rollout.scorer import Scorer, compares_siblings
from rollover.rollout.state import RolloutState
from rollover.rollout.strategy import Strategy
from rollover.rollout.writer import EventWriter
from rollover.types import SampleId, SamplingParams


class RolloutDriver:
    """Produces batches. One event loop owns it, and none of its methods may run in two tasks at once.

    Example: two steps of a training loop::

        for step in range(2):
            batch = await driver.next_batch()              # Batch(step=0, groups=(...))
            ...                                            # train; samples may continue decoding meanwhile
            await driver.update_weights(step + 1, load)    # ``load`` puts the new weights into the engine
            driver.saved(step + 1)                         # after your checkpoint: older batches are let go
        await driver.stop()

    Args:
        environment: acts between the turns of episodes; left out if there are none.
        clock: when left out, the machine's, which continues where the journal ends.
        observer: called after each event, when the ledger has already applied it.
        lockstep: see the module's docstring.
        placement: where calls are placed, if the members of the engine come and go and each changes its weights at its
            own time; usually the same object as ``engine``.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        strategy: Strategy,
        source: Source,
        scorer: Scorer,
        environment: Environment | None = None,
        sampling: SamplingParams,
        seed: int,
        clock: Clock | None = None,
        state: RolloutState,
        journal: Journal | None = None,
        limits: Limits | None = None,
        rules: GroupRules | None = None,
        observer: Callable[[Event], None] = lambda event: None,
        lockstep: bool = False,
        placement: CallPlacement | None = None,
    ) -> None:
        if journal is not None:
            journal.check_taken_over()
        self._limits = limits = limits or Limits()
        self._clock = clock = clock or SystemClock(0.0 if journal is None else journal.last_time_s)
        self.ledger = state.ledger
        self._scheduler = Scheduler(
            strategy=strategy,
            source=source,
            state=state,
            max_running=lambda: engine.capabilities.max_running,  # fewer while a server is out
            placement=None
            if placement is None
            else EnginePlaces(placement, state.ledger, sampling, strategy.max_staleness),
            limits=limits,
            rules=rules,
            compares_siblings=partial(compares_siblings, scorer),
            emit=self._emit,
        )
        self._engine = engine
        self._writer = EventWriter(journal, state.ledger, placement, self._break)
        self._observer = observer
        self._lockstep = lockstep
        self._consumers = Consumers(
            environment=environment or NoEnvironment(),
            scorer=scorer,
            scheduler=self._scheduler,
            clock=clock,
            act=self._act,
            lockstep=lockstep,
            on_done=self._ended,
            on_error=self._break,
        )
        self._name = secrets.token_hex(4)
        """Distinguishes request ids from the ids that another driver, or this run before a crash, has sent."""
        self._calls: dict[SampleId, SampleCall] = {}
        self._open_call = partial(
            SampleCall,
            engine=engine,
            ledger=state.ledger,
            sampling=sampling,
            seed=seed,
            clock=clock,
            max_staleness=strategy.max_staleness,
            save_every_tokens=limits.save_every_tokens,
            is_journaled=placement is not None and journal is not None,
            on_tokens=self._tokens_arrived,
        )
        self._stopping: asyncio.Task[None] | None = None
        """Stops the running samples once the scheduler says so."""
        self._batch_is_due = False
        """True if the scheduler's last decision was to consume a batch."""
        self._will_act = False  # in the next turn of the event loop, as hundreds of members may change in one
        self._changed = asyncio.Event()
        """Set when a group was settled, or something broke."""
        self._last_progress_s = clock.now_s()
        self._num_calls = 0
        self._retries = Retries(limits.max_retries)
        self._broken: Exception | None = None
        self._distrusted: dict[str, int] = {}
        """Members whose tokens have yet to be dropped, and since which version."""
        self._placement = placement
        if placement is not None:
            placement.on_change(self._act_soon)
            placement.on_distrust(self.distrust)

    # -- what the loop calls ---------------------------------------------------------------------------------

    async def next_batch(self) -> Batch:
        """Return the next batch, consumed and journaled. After a restart, the recorded ones come first.

        Raises:
            EngineTimeout: nothing was decoded for ``stall_timeout_s``, and no environment or scorer was at work; names
                the samples.
            EngineError: the engine does not work: every running sample failed, one of them more than ``max_retries``
                times.
            DataError: every sample fails, or a reward function is wrong.
            RunError: the group filter rejects everything, or the engine's weights are too old for the batch.
        """
        if self._broken is not None:
            raise self._broken
        self._scheduler.begin_round()
        if not self.ledger.replay:
            self._consumers.take_up(but=self._calls.keys())  # a call that is ending hands over its own sample
        self._last_progress_s = self._clock.now_s()
        self._act()
        await self._until(lambda: bool(self._distrusted) or self._can_consume())
        while self._distrusted:
            name, since = next(iter(self._distrusted.items()))
            await self.drop_tokens_of(name, lambda: None, since=since)
            await self._until(lambda: bool(self._distrusted) or self._can_consume())
        if self._broken is not None:
            raise self._broken
        self._batch_is_due = False
        batch = self._scheduler.consume(self._clock.now_s())
        self._writer.sync()  # a checkpoint that includes this batch may be on the disk soon
        self.ledger.check()
        return batch

    @property
    def has_batch(self) -> bool:
        """Return whether ``next_batch`` can hand out a batch without any further decoding."""
        return self._scheduler.has_batch and not self._distrusted

    async def update_weights(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Run ``load``, which puts weights ``version`` into the engine. Running samples continue during the load if the
        engine supports that; otherwise they are parked before and resumed after it. Raises
        ``RunError`` if ``version`` goes back, or is ahead of the batches that were handed out."""
        async with nullcontext() if self._engine.capabilities.in_flight_update else self._all_parked():
            start_s = self._clock.now_s()
            await load()
            now_s = self._clock.now_s()
            self._scheduler.published(version, now_s, pause_s=now_s - start_s)
        self._act()

    async def drop_tokens_of(self, engine: str, take_out: Callable[[], None], *, since: int = 0) -> int:
        """Drop the unconsumed groups with tokens that ``engine`` sampled under version ``since`` or later, so that they
        are not trained. Running samples are parked first and resumed once ``take_out`` has made sure that ``engine``
        gets no more calls. Returns how many tokens were dropped."""
        async with self._all_parked():
            since = min(since, self._distrusted.pop(engine, since))
            num_tokens = self._scheduler.drop_tokens_of(engine, self._clock.now_s(), since=since)
            take_out()
        self._act()
        return num_tokens

    async def stop(self) -> None:
        """Park the running samples, cancel pending scores, and write everything to the journal. The ledger stays
        resumable."""
        self._scheduler.halt()
        await asyncio.sleep(0)  # calls started in this turn reach the engine, so that it can stop them
        try:
            with suppress(EngineError):  # an engine that is gone has nothing to hand over
                await self._abort_running()
                for name, since in self._distrusted.items():
                    self._scheduler.drop_tokens_of(name, self._clock.now_s(), since=since)
                self._distrusted.clear()
        finally:
            tasks = (call.task for call in self._calls.values())
            pending = [*tasks, *self._consumers.tasks()]
            if pending:
                for task in pending:
                    task.cancel()
                await asyncio.wait(pending, timeout=self._limits.abort_timeout_s)
            self.flush()

    def saved(self, step: int) -> None:
        """See ``Scheduler.saved``. The event is in the journal when this returns."""
        self._scheduler.saved(step, self._clock.now_s())
        self.flush()

    def run_ended(self) -> None:
        """Release the members of the engine, since the run is over."""
        if self._placement is not None:
            self._placement.run_ended()

    def flush(self) -> None:
        """Write all events so far to the journal."""
        self._writer.flush()

    def record(self, event: Event) -> None:
        """Record an event of the loop (what became of a batch) and write it to the journal."""
        self._scheduler.record(event)
        self.flush()

    # -- deciding --------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Carry out the scheduler's decisions."""
        self._will_act = False
        if self._broken is not None:
            return
        self._batch_is_due = False
        for action in self._scheduler.decide(self._clock.now_s()):
            match action:
                case StartSample(sample_id=sample_id):
                    self._num_calls += 1
                    prompt = self.ledger.groups[sample_id.group].prompt
                    call = self._calls[sample_id] = self._open_call(
                        request_id=f"{self._name}.{sample_id}#{self._num_calls}.",
                        start=action,
                        turn_limit=self._consumers.environment.turn_limit(prompt),
                        back_off_s=self._retries.back_off_s(sample_id),
                    )
                    call.task = asyncio.create_task(self._generate(call))
                case StopAll():
                    self._stopping = asyncio.create_task(self._stop_all())
                case ConsumeBatch():
                    self._batch_is_due = True
                    self._changed.set()

    def distrust(self, name: str, since: int = 0) -> None:
        """Arrange that no unconsumed token that a member of the engine sampled under version ``since`` or later is
        handed out from now on. The member must get no more calls. May be called at any time."""
        self._distrusted[name] = min(since, self._distrusted.get(name, since))
        self._changed.set()

    def _act_soon(self) -> None:
        if not self._will_act:
            self._will_act = True
            asyncio.get_running_loop().call_soon(self._act_later)

    def _act_later(self) -> None:
        try:
            self._act()
        except Exception as e:
            self._break(e)

    def _can_consume(self) -> bool:
        """Return whether a batch is due. In lockstep, calls that have ended are closed and scored first."""
        in_hand = self._lockstep and (self._consumers.are_busy or self._calls.keys() - self.ledger.running.keys())
        return self._batch_is_due and not in_hand

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._broken is not None:
                raise self._broken
            if self._stopping not in (None, asyncio.current_task()):
                await asyncio.wait([self._stopping])  # it has a deadline of its own
                continue
            self._changed.clear()
            idle_s = self._clock.now_s() - max(self._last_progress_s, self._consumers.last_result_s)
            if self._consumers.are_busy:  # environments and scorers have deadlines of their own
                idle_s = 0.0
            if idle_s >= self._limits.stall_timeout_s:
                raise EngineTimeout(self._stalled(idle_s))
            waited_for = self._calls or self._consumers.are_busy or self._placement
            assert waited_for, "no batch, and nothing is running, acting or being scored"
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.stall_timeout_s - idle_s):
                    await self._changed.wait()

    def _stalled(self, idle_s: float) -> str:
        names = ", ".join(str(i) for i in sorted(self._calls)[:8]) or "none"
        return (
            f"no token and no reward for {idle_s:.0f} s (rollout.stall_timeout_s; with servers, plus"
            " engine.all_down_timeout_s or engine.launch_timeout_s; with a swarm, plus engine.away_timeout_s);"
            f" {len(self._calls)} samples decoding: {names};"
            f" the engine is {self._engine!r}"
        )

    async def _stop_all(self) -> None:
        try:
            await self._abort_running()
            self._stopping = None
            self._act()
        except Exception as e:
            self._stopping = None
            self._break(e)

    @asynccontextmanager
    async def _all_parked(self) -> AsyncIterator[None]:
        """Park the running samples, and start none within this context."""
        with self._scheduler.paused():
            await asyncio.sleep(0)  # as in stop
            await self._abort_running()
            yield

    async def _abort_running(self) -> None:
        """Stop every open call, and return when each has handed over its tokens."""
        calls = dict(self._calls)
        if not calls:
            return
        try:
            async with asyncio.timeout(self._limits.abort_timeout_s):
                for call in calls.values():
                    call.stop()
                await self._engine.abort([call.request_id for call in calls.values()])
                await asyncio.wait([call.task for call in calls.values()])
        except TimeoutError:
            if late := ", ".join(str(i) for i in calls if i in self.ledger.running):
                raise EngineTimeout(
                    f"the engine did not acknowledge the abort of {late} within {self._limits.abort_timeout_s:.0f} s"
                ) from None
            await self._until(lambda: not self._calls)  # in lockstep they are being scored

    # -- one sample ------------------------------------------------------------------------------------------

    async def _generate(self, call: SampleCall) -> None:
        """Record the segments of one call, and act on its end."""
        sample_id, failure, acted = call.start.sample_id, None, False
        try:
            try:
                async for segment in call.segments():
                    self._scheduler.segment_ended(sample_id, segment, segment.end_s)
                    if call.is_over and self._lockstep:
                        await self._consumers.consume(sample_id)  # the engine waits until this returns
                        acted = True
            except EngineError as e:
                failure = e
            finally:
                if not call.is_over:  # failed or cancelled
                    segment = call.cut_off()
                    self._scheduler.segment_ended(sample_id, segment, segment.end_s)
                if self._calls.get(sample_id) is call:  # otherwise it is already running again
                    del self._calls[sample_id]
                self._ended()
            if failure is not None:
                self._call_failed(sample_id, failure)
            if not acted:
                await self._consumers.consume(sample_id)
        except Exception as e:  # a bug, or a prompt that cannot be read: next_batch raises it
            self._break(e)

    def _tokens_arrived(self, sample_id: SampleId) -> None:
        self._last_progress_s = self._clock.now_s()
        self._retries.decoded(sample_id)

    def _call_failed(self, sample_id: SampleId, error: EngineError) -> None:
        """Leave the sample parked for another attempt. After too many failures give up the sample, or the run if all
        running samples fail or all servers stay away."""
        if isinstance(error, EnginesAway):
            raise error
        if isinstance(error, CallDisplaced) or self._retries.failed(sample_id) or self._broken is not None:
            return
        if self._retries.all_failing(self._calls.keys()):
            raise error
        self._scheduler.failed(sample_id, str(error), self._clock.now_s())

    def _ended(self) -> None:
        """Wake the waiting caller when a call or a score has ended, but only in lockstep or when no call is left;
        otherwise it is woken when a batch is due."""
        if self._lockstep or not self._calls:
            self._changed.set()

    def _emit(self, event: Event) -> None:
        self._consumers.see(event)
        self._writer.add(event)
        self._observer(event)

    def _break(self, error: Exception) -> None:
        """End the run: ``next_batch`` raises the first ``error`` reported here."""
        self._broken = self._broken or error
        self._changed.set()
