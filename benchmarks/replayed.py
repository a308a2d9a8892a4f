"""Rollouts whose lengths are known beforehand: the production driver over the embedded engine, decoding for real, and
the simulator over a model of it. Both take lengths from the same ``Workload``, so that they are paired.

What it keeps true: a sample ends at its workload's length, whatever is sampled; both say what they did in the records
of ``rollover.sim.result``, step by step; between steps the engine's weights are really others.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollover.clock import SystemClock
from rollover.engine.base import Capabilities, Chunk, Engine, EngineStats, GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.core import CPU_PREFILL_TOKENS
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.rollout.config import Limits, RolloutConfig
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.events import CheckpointSaved, Event, SampleStarted, SegmentEnded
from rollover.rollout.records import Tokens
from rollover.rollout.scheduler import EachSample
from rollover.rollout.state import RolloutState
from rollover.rollout.strategies import RolloverConfig
from rollover.rollout.strategy import Strategy
from rollover.sim.result import Meter, StepRecord, Window, step_record, whole_rounds
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario, Turns
from rollover.types import FinishReason, Observation, Prompt, SampleId, Trajectory
from rollover.weights.sources import MemoryWeights
from rollover.workload.base import Workload
from rollover.workload.source import PRESETS
from rollover.workload.trace import Replay, Trace, TracePrompt

MAX_RUNNING = 128
"""More than any setting has in flight: what is started is the strategy's decision alone."""
KV_CACHE_BYTES = 2**28
"""More than any setting fills."""
LAW_PROMPTS = 1408
"""Prompts drawn from a law of lengths, as many as ``lengths.json`` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A strategy with its options, and what happens to caches."""

    name: str
    config: RolloutConfig
    kv_on_update: Literal["keep", "recompute"] = "keep"
    max_running: int = MAX_RUNNING
    lag_of: str = ""
    """The setting whose lag this one is to have."""
    training_s: float = 0.0
    """Seconds of a training step, on devices of its own."""

    @property
    def strategy(self) -> Strategy:
        return self.config.build_strategy(self.capabilities)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the engine on this machine, whatever the model of it says."""
        prefill = CPU_PREFILL_TOKENS if self.kv_on_update == "recompute" else math.inf
        return Capabilities(
            max_running=self.max_running, max_context_tokens=sys.maxsize, prefill_tokens_per_iteration=prefill
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a rollout came to, real or simulated."""

    steps: tuple[StepRecord, ...]
    tokens: Tokens
    """Account of the whole run."""

    def after(self, warmup: int) -> Window:
        return Window(whole_rounds(self.steps, warmup))


def read_lengths(source: str, group_size: int, scale: float, prompt_tokens: int) -> Trace:
    """Response lengths from a file with a list of lists, or from a packaged law of this name, divided by ``scale``. A
    longer row makes several prompts, which follow one another after all rows have had their first."""
    rows: Sequence[Sequence[int]]
    if source in PRESETS:
        law = PRESETS[source].workload()
        rows = [law.group_lengths(prompt, group_size) for prompt in range(LAW_PROMPTS)]
    else:
        rows = json.loads(Path(source).read_text())
    starts = range(0, min(map(len, rows)) - group_size + 1, group_size)
    groups = [tuple(max(1, round(n / scale)) for n in row[i : i + group_size]) for i in starts for row in rows]
    prompts = [
        TracePrompt(prompt_id=str(i), prompt_tokens=prompt_tokens, lengths=group) for i, group in enumerate(groups)
    ]
    return Trace(name=source, cap_tokens=max(map(max, groups)), prompts=tuple(prompts))


def mean_context(trace: Trace) -> float:
    """Cached tokens of a sample in mid-response, mean over decoded tokens."""
    lengths, _, _ = trace.columns()
    return float(trace.prompts[0].prompt_tokens + (lengths * (lengths + 1) / 2).sum() / lengths.sum())


# -- for real ----------------------------------------------------------------------------------------------------


class Replayed:
    """An engine whose samples end where the workload says and never by themselves. Needs a strategy that discards
    nothing, so that groups are numbered as prompts are."""

    def __init__(self, engine: Engine, workload: Workload, config: RolloutConfig, turns: Turns | None = None) -> None:
        self._engine = engine
        self._turns = turns
        self._workload = workload
        self._samples_per_prompt = config.group_size
        self._samples_per_group = config.group_size // config.num_siblings

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def length(self, sample_key: str) -> int:
        group, index, *turn = map(int, re.findall(r"\d+", sample_key))
        prompt, sample = divmod(group * self._samples_per_group + index, self._samples_per_prompt)
        length = self._workload.group_lengths(prompt, self._samples_per_prompt)[sample]
        if self._turns is None:
            return length
        return min(self._turns.tokens, length - sum(turn) * self._turns.tokens)

    def whole_length(self, sample_id: SampleId) -> int:
        """Tokens of all turns of an episode."""
        prompt, sample = divmod(sample_id.group * self._samples_per_group + sample_id.index, self._samples_per_prompt)
        return self._workload.group_lengths(prompt, self._samples_per_prompt)[sample]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        length = self.length(request.sample_key)
        params = replace(request.params, max_new_tokens=length)
        calls: Any = self._engine.generate(replace(request, params=params))
        async with aclosing(calls) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is FinishReason.LENGTH and length < request.params.max_new_tokens:
                    chunk = replace(chunk, finish_reason=FinishReason.STOP)
                yield chunk

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._engine.abort(request_ids)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()


class SleepyTools:
    """Answers turns after a while, until the episode has all its tokens."""

    def __init__(self, turns: Turns, engine: Replayed) -> None:
        self._turns = turns
        self._engine = engine

    def turn_limit(self, prompt: Prompt) -> int:
        return 2 * self._turns.tokens

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        await asyncio.sleep(self._turns.answer_s)
        if trajectory.num_tokens >= self._engine.whole_length(trajectory.sample_id):
            return Observation((), end=FinishReason.STOP, start_s=now_s)
        return Observation((7,) * self._turns.observed_tokens, start_s=now_s)

    def leave(self, sample_id: SampleId) -> None:
        pass


class SlotTime:
    """Adds up the seconds that samples have spent in the engine, from the events of a run."""

    def __init__(self) -> None:
        self._num_running, self._last_s, self._sum_s = 0, 0.0, 0.0

    def __call__(self, event: Event) -> None:
        self.until(event.time_s)
        self._num_running += isinstance(event, SampleStarted)
        self._num_running -= isinstance(event, SegmentEnded) and event.segment.finish_reason is not None

    def until(self, now_s: float) -> float:
        self._sum_s += self._num_running * (now_s - self._last_s)
        self._last_s = now_s
        return self._sum_s


class RandomPrompts:
    """Prompts of random tokens, as long as the workload's."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def prompt(self, index: int) -> Prompt:
        token_ids = np.random.default_rng([1, index]).integers(2, 2000, self._workload.prompt_tokens(index))
        return Prompt(
            prompt_id=self._workload.prompt_id(index), token_ids=tuple(token_ids.tolist()), text="", source="replayed"
        )


class ConstantReward:
    async def score(self, trajectory: Trajectory) -> float:
        return 1.0


async def swap(engine: EmbeddedEngine, version: int, weights: Mapping[str, Any]) -> None:
    """Put weights into the engine as the publisher does."""
    await engine.pause()
    try:
        await engine.load(version, MemoryWeights(version, weights))
    finally:
        await engine.resume()


class RestingClock(SystemClock):
    """Stands still between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self._rests_at: float | None = None

    def now_s(self) -> float:
        return super().now_s() if self._rests_at is None else self._rests_at

    def rest(self) -> None:
        self._rests_at = self.now_s()

    def go_on(self) -> None:
        if self._rests_at is not None:
            super().__init__(origin_s=self._rests_at)
        self._rests_at = None


class Rolling:
    """A rollout that goes on step by step, at rest in between, so that several can take turns on one machine. Version v
    has ``weights[v % len(weights)]``. A step ends with its weights in place; a trainer of its own is a pause, in which
    the engine decodes what the strategy lets it. What others do between two steps is not counted."""

    def __init__(
        self,
        setting: Setting,
        workload: Workload,
        folder: Path,
        weights: Sequence[Mapping[str, Any]],
        turns: Turns | None = None,
    ) -> None:
        config = setting.config
        embedded = EmbeddedConfig(
            device="cpu",
            dtype="float32",
            max_running=setting.max_running,
            kv_cache_bytes=KV_CACHE_BYTES,
            kv_on_update=setting.kv_on_update,
        )
        self.setting = setting
        self._engine = EmbeddedEngine.from_folder(folder, embedded)
        self._weights = weights
        state = RolloutState()
        self._ledger = state.ledger
        self._clock = RestingClock()
        replayed = Replayed(self._engine, workload, config, turns)
        self._slots = None if turns is None else SlotTime()
        self._driver = RolloutDriver(
            observer=self._slots or (lambda event: None),
            engine=replayed,
            environment=None if turns is None else SleepyTools(turns, replayed),
            strategy=setting.strategy,
            source=EachSample(RandomPrompts(workload), config.num_siblings),
            scorer=ConstantReward(),
            sampling=config.sampling(),
            seed=0,
            clock=self._clock,
            state=state,
            limits=Limits.from_config(config),
        )
        self._records: list[StepRecord] = []
        self._meter = Meter()

    async def step(self) -> None:
        self._clock.go_on()
        await self._engine.resume()
        start_s = self._clock.now_s()
        batch = await self._driver.next_batch()
        await self._clock.sleep(self.setting.training_s)
        version = batch.step + 1
        weights = self._weights[version % len(self._weights)]
        await self._driver.update_weights(version, lambda: swap(self._engine, version, weights))
        await self._engine.pause()
        self._clock.rest()
        self._driver.record(CheckpointSaved(time_s=self._clock.now_s(), step=version))
        took_s, before, stats = self._clock.now_s() - start_s, self._meter, self._engine.stats()
        self._meter = Meter(
            now_s=before.now_s + took_s,
            iterations=stats.decode_iterations,
            sample_s=stats.decoded_tokens / max(stats.decode_iterations, 1) * (before.now_s + took_s)
            if self._slots is None
            else self._slots.until(self._clock.now_s()),
            prefilled_tokens=stats.prefilled_tokens,
        )
        self._records.append(step_record(batch, self._meter.since(before)))

    async def close(self) -> Run:
        self._clock.go_on()
        await self._engine.resume()
        await self._driver.stop()
        await self._engine.close()
        return Run(steps=tuple(self._records), tokens=self._ledger.tokens)


# -- foretold ----------------------------------------------------------------------------------------------------


def foretell(setting: Setting, workload: Workload, model: ReplicaModel, steps: int, turns: Turns | None = None) -> Run:
    """The same by the simulator."""
    scenario = Scenario(
        replicas=(replace(model, max_running=setting.max_running),),
        kv_on_update=setting.kv_on_update,
        trainer=Latency(base_s=setting.training_s),
        accuracy=1.0,
        turns=turns,
    )
    found = simulate(setting.strategy, workload, scenario, steps=steps)
    return Run(steps=found.steps, tokens=found.tokens)


def target_for(lag: float, ours: Setting, workload: Workload, model: ReplicaModel, steps: int, warmup: int) -> Setting:
    """``ours`` with the lag target of a grid that is fastest in simulation among those whose lag there is at most
    ``lag``. The highest need not be: where caches are lost, what is carried over is paid for."""
    strategy = ours.config.strategy
    assert isinstance(strategy, RolloverConfig)
    options = [
        replace(ours, config=replace(ours.config, strategy=replace(strategy, lag_target=round(share * lag, 3))))
        for share in np.arange(0.2, 1.05, 0.05).tolist()
    ]
    windows = [foretell(option, workload, model, steps).after(warmup) for option in options]
    found = [(window.tokens_per_s, i) for i, window in enumerate(windows) if window.lag.batch <= lag]
    return options[max(found)[1]] if found else options[0]


def trained_length_drift(window: Window, workload: Replay, config: RolloutConfig) -> float:
    """Mean trained length over that of the prompts which the window's steps train where nothing overtakes, minus 1."""
    size = config.rollout_batch_size
    prompts = range(window.steps[0].step * size, (window.steps[-1].step + 1) * size)
    lengths = [n for i in prompts for n in workload.group_lengths(i, config.group_size)]
    return window.mean_length / (sum(lengths) / len(lengths)) - 1
