"""A driver with everything around it, in virtual time, watched: the laws are checked after every event."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollover.batch import Batch, WasteCause
from rollover.engine.base import CallPlacement, Capabilities, Chunk, GenerateRequest
from rollover.errors import EngineError
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.environment import Environment
from rollover.rollout.events import BatchTrained, CheckpointSaved, Event
from rollover.rollout.generation import sample_seed
from rollover.rollout.journal import Journal
from rollover.rollout.ledger import Ledger
from rollover.rollout.scheduler import EachSample, GroupRules
from rollover.rollout.state import RolloutState
from rollover.rollout.strategies import STRATEGIES
from rollover.rollout.strategy import Strategy
from rollover.sim.strategies import SimulatedRollout
from rollover.types import FinishReason, Prompt, SamplingParams, Trajectory
from tests.engine.fake import FakeEngine, logprob_at, token_at
from tests.virtual_time import VirtualClock, run
from tests.weights.kit import FakeWeights

SEED = 3
NAMES = tuple(STRATEGIES)
"""The strategies that production runs."""
VARIANTS = (*NAMES, "rollover, overlap")
"""Also with what changes how they decide."""
ON_FULL = ("sync", "oversample", "april", "bounded_async")
"""One for each thing that can happen to running samples when the batch is full: wait, discard, park, keep."""


class Prompts:
    """An endless source; ``drawn`` keeps the indices that were asked for."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def prompt(self, index: int) -> Prompt:
        self.drawn.append(index)
        name, row = f"toy/{index}@0", {"row": index}
        return Prompt(prompt_id=name, token_ids=(5, 6, 7), text=f"prompt {index}", source="toy", columns=row)


class ParityScorer:
    """Reward 1 for an odd sum of tokens, ``delay_s`` after the sample finished."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.scored: Counter[Any] = Counter()

    async def score(self, trajectory: Trajectory) -> float:
        await asyncio.sleep(self.delay_s)
        self.scored[trajectory.sample_id] += 1
        return float(sum(trajectory.token_ids) % 2)


class LockstepEngine(FakeEngine):
    """Decodes on only when each consumer has come back for more, and then at once: within that very call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._num_in_hand = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        call = self._open(request)
        self._streams[request.request_id] = call.stream
        try:
            while True:
                item = await call.stream.get()
                self._num_in_hand += 1
                try:
                    if isinstance(item, EngineError):
                        raise item
                    yield item
                finally:
                    self._num_in_hand -= 1
                    self._decode_on()
                if item.finish_reason is not None:
                    return
        finally:
            del self._streams[request.request_id]
            self._end(call, FinishReason.ABORT)

    async def _run(self) -> None:
        """Begins to decode; what follows is decoded when the consumers are back."""
        assert self.clock is not None
        while self._calls:
            await self.clock.sleep(self.tick_s)
            self._decode_on()

    def _decode_on(self) -> None:
        while self._calls and not self._num_in_hand and all(s.empty() for s in self._streams.values()):
            for call in list(self._calls.values())[: self.capabilities.max_running]:
                self._decode(call)


class StrictEngine(FakeEngine):
    """Takes new weights only while nothing runs."""

    async def load(self, version: int, source: Any) -> None:
        assert self.stats().num_running == 0, "weights under a running call"
        await super().load(version, source)


def lognormal(median: float, sigma: float, cap: int = 60, *, salt: int = 0) -> Callable[[GenerateRequest], int]:
    """Long-tailed response lengths, a function of the sample alone."""

    @functools.cache
    def of_seed(seed: int) -> int:
        draw = random.Random(seed + salt).lognormvariate(0.0, sigma)
        return max(1, min(cap, int(median * draw)))

    return lambda request: of_seed(request.seed)


def config_of(name: str, **config: Any) -> SimulatedRollout:
    """``name``: a strategy, and behind commas the options that are switched on, as in "april, drop_surplus"."""
    kind, *switched_on = name.split(", ")
    return SimulatedRollout.of(kind, **dict.fromkeys(switched_on, True), **config)


def strategy_of(name: str, *, max_running: int = 64, **config: Any) -> Strategy:
    engine = Capabilities(max_running=max_running, max_context_tokens=2**20)
    return config_of(name, **config).build_strategy(engine)


@dataclass
class Rig:
    driver: RolloutDriver
    engine: FakeEngine
    state: RolloutState
    strategy: Strategy
    sampling: SamplingParams
    source: Prompts
    scorer: Any
    events: list[Event]

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    async def publish(self, version: int, *, load_s: float = 0.0) -> None:
        async def load() -> None:
            await self.engine.pause()
            await asyncio.sleep(load_s)
            await self.engine.load(version, FakeWeights(version))
            await self.engine.resume()

        await self.driver.update_weights(version, load)

    async def train(
        self,
        until_step: int,
        *,
        train_s: float = 0.0,
        checkpoint_every: int = 0,
        untrained: Callable[[Batch], Mapping[WasteCause, int]] | None = None,
    ) -> dict[int, Batch]:
        """Batches by step. Between two batches ``train_s`` seconds pass and new weights are published. ``untrained``:
        what the trainer says of a batch; journals that are older than that news have none."""
        batches: dict[int, Batch] = {}
        while self.ledger.next_step < until_step:
            batch = await self.driver.next_batch()
            batches[batch.step] = batch
            await asyncio.sleep(train_s)
            if untrained is not None:
                time_s = asyncio.get_running_loop().time()
                self.driver.record(BatchTrained(time_s=time_s, step=batch.step, untrained=untrained(batch)))
            if checkpoint_every and (batch.step + 1) % checkpoint_every == 0:
                time_s = asyncio.get_running_loop().time()
                self.driver.record(CheckpointSaved(time_s=time_s, step=batch.step + 1))
            await self.publish(batch.step + 1)
        return batches


def make_rig(
    name: str = "april",
    *,
    length: Callable[[GenerateRequest], int] | None = None,
    engine: FakeEngine | None = None,
    max_running: int = 64,
    stream_interval_tokens: int = 1,
    source: Prompts | None = None,
    scorer: Any = None,
    environment: Environment | None = None,
    state: RolloutState | None = None,
    journal: Journal | None = None,
    limits: Limits | None = None,
    keep_group: Callable[[Sequence[float]], bool] = lambda rewards: True,
    shaping: Callable[[int], float] = lambda num_tokens: 0.0,
    observer: Callable[[Event], None] = lambda event: None,
    lockstep: bool = False,
    in_flight_update: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    watched: bool = True,
    placement: CallPlacement | None = None,
    **config: Any,
) -> Rig:
    """Defaults: batches of 2 groups of 2 samples, at most 60 tokens each."""
    config = {"rollout_batch_size": 2, "group_size": 2, "max_new_tokens": 60} | config
    state = state or RolloutState()
    ledger = state.ledger
    clock = VirtualClock()
    engine = engine or (LockstepEngine if lockstep else FakeEngine if in_flight_update else StrictEngine)(
        length or lognormal(6, 1.0),
        auto=True,
        clock=clock,
        max_running=max_running,
        stream_interval_tokens=stream_interval_tokens,
        version=ledger.policy_version,
    )
    if not in_flight_update:
        engine.capabilities = replace(engine.capabilities, in_flight_update=False)
    strategy = strategy_of(name, max_running=engine.capabilities.max_running, **config)
    sampling = config_of(name, **config).sampling(stop_token_ids)
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        if watched:
            assert_lawful(ledger, strategy, engine)
        observer(event)

    source, scorer = source or Prompts(), scorer or ParityScorer()
    driver = RolloutDriver(
        engine=engine,
        strategy=strategy,
        source=EachSample(source, strategy.num_siblings),
        scorer=scorer,
        environment=environment,
        sampling=sampling,
        seed=SEED,
        clock=clock,
        state=state,
        journal=journal,
        limits=limits,
        rules=GroupRules(keep_group=keep_group, shaping=shaping),
        observer=watch,
        lockstep=lockstep,
        placement=placement,
    )
    return Rig(driver, engine, state, strategy, sampling, source, scorer, events)


# -- the laws -----------------------------------------------------------------------------------------------


def assert_lawful(ledger: Ledger, strategy: Strategy, engine: FakeEngine) -> None:
    """What holds after every event, whoever caused it."""
    ledger.check()
    assert_bounded(ledger, strategy.batch_size, strategy.max_staleness)
    assert len(ledger.running) <= engine.capabilities.max_running


def num_due(ledger: Ledger, deadline: int, max_staleness: int) -> int:
    """D(t): started, unconsumed groups with a deadline of at most ``deadline``."""
    return sum(g.start_version is not None and g.start_version + max_staleness <= deadline for g in ledger.unconsumed())


def assert_bounded(ledger: Ledger, batch_size: int, max_staleness: int) -> None:
    """The invariant of the theorem: D(t) <= N (t - s + 1) for every t >= s; and nobody is past its deadline."""
    if ledger.replay:  # the state before the crash, some steps behind: the batches to be replayed are not in it
        return
    step = ledger.next_step
    starts = [g.start_version for g in ledger.unconsumed() if g.start_version is not None]
    assert all(v + max_staleness >= step for v in starts), f"a group is too old for step {step}"
    for t in {v + max_staleness for v in starts}:
        assert num_due(ledger, t, max_staleness) <= batch_size * (t - step + 1), f"too many groups are due at {t}"


def assert_exact(trajectory: Trajectory, sampling: SamplingParams) -> None:
    """Every token, log-prob and version is what the engine's script has at that place."""
    seed = sample_seed(SEED, trajectory.sample_id)
    versions = trajectory.policy_versions
    tokens = [token_at(seed, p, v) for p, v in enumerate(versions)]
    if trajectory.finish_reason is FinishReason.STOP and sampling.stop_token_ids:
        tokens[-1] = sampling.stop_token_ids[0]
    assert list(trajectory.token_ids) == tokens
    assert list(trajectory.rollout_logprobs) == [logprob_at(seed, p, v) for p, v in enumerate(versions)]
    assert len(trajectory.token_ids) == len(trajectory.rollout_logprobs) == len(versions)
    assert list(versions) == sorted(versions)
    assert 1 <= trajectory.num_tokens <= sampling.max_new_tokens
    assert trajectory.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert (trajectory.finish_reason is FinishReason.LENGTH) <= (trajectory.num_tokens == sampling.max_new_tokens)


def assert_trainable(batches: dict[int, Batch], rig: Rig) -> None:
    """The batches are exact, within the bound, and no group is in two of them."""
    ids = [g.group_id for b in batches.values() for g in b.groups]
    assert len(set(ids)) == len(ids), "a group was trained twice"
    for step, batch in batches.items():
        assert len(batch.groups) == rig.strategy.batch_size
        for trajectory in batch.trajectories:
            assert_exact(trajectory, rig.sampling)
            assert trajectory.reward == float(sum(trajectory.token_ids) % 2)
            assert all(0 <= step - v <= rig.strategy.max_staleness for v in trajectory.policy_versions)


def content(batch: Batch) -> list[Any]:
    """All that training sees of a batch: everything but the times."""
    return [
        (
            t.sample_id,
            t.prompt,
            t.reward,
            [(s.policy_version, s.kv_version, s.token_ids, s.rollout_logprobs, s.finish_reason) for s in t.segments],
        )
        for t in batch.trajectories
    ]


async def with_stop(rig: Rig, work: Awaitable[Any]) -> Any:
    """``work``, and an orderly stop behind it."""
    try:
        return await work
    finally:
        await rig.driver.stop()
        rig.ledger.check()


def play(num_steps: int, name: str = "april", **options: Any) -> tuple[Rig, dict[int, Batch]]:
    """A whole run in virtual time. ``options``: of ``Rig.train`` and ``make_rig``."""
    training = {key: options.pop(key) for key in ("train_s", "checkpoint_every", "untrained") if key in options}

    async def work() -> tuple[Rig, dict[int, Batch]]:
        rig = make_rig(name, **options)
        return rig, await with_stop(rig, rig.train(num_steps, **training))

    return run(work())
