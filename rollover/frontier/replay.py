"""A run as a setup: its lengths, its batch shape, and the engine and trainer as its journal and metrics show them.

The engine is taken as one replica: an iteration's time is fitted to how long each segment took and how many samples
ran meanwhile. Simulating the run's own strategy then tells how far this model can be trusted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.batch import WasteCause
from rollover.errors import DataError, RunError
from rollover.frontier.timing import Segments, fit_iterations
from rollover.report.metrics import MetricRow, read_metrics
from rollover.report.record import JOURNAL, read_config, read_timeline
from rollover.report.throughput import TRAINED
from rollover.report.timeline import Timeline
from rollover.rollout.events import BatchConsumed, GroupDropped, GroupOpened, Observed, SampleScored, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.rollout.lag import LagOf
from rollover.rollout.strategies import RolloverConfig
from rollover.settings import schema, toml
from rollover.sim.scenario import Latency, ReplicaModel, Scenario, Turns
from rollover.sim.strategies import SimulatedRollout
from rollover.types import FinishReason, SampleId
from rollover.workload.source import read_run
from rollover.workload.trace import Trace

_MIN_STEPS = 4
_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)
_NO_B0 = 1e6
"""B0 above this many times the largest batch that occurred counts as infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run as the simulator needs it: lengths, setting, engine and trainer."""

    trace: Trace
    rollout: SimulatedRollout
    scenario: Scenario
    num_steps: int
    step_tokens_per_s: tuple[tuple[int, float], ...]
    """(trained tokens, seconds) of each step."""
    takes_turns: bool
    """True if trainer and engine shared a device, or a host let neither work beside the other."""
    lag_of: LagOf
    """The lag of what its loss gives the same weight: sequences or batches."""
    notes: tuple[str, ...]

    def tokens_per_s(self, warmup: int) -> float:
        """Return the measured throughput of the whole loop from step ``warmup`` on."""
        tokens, seconds = zip(*self.step_tokens_per_s[warmup:], strict=True)
        return sum(tokens) / sum(seconds)


def read_recorded(path: Path, timeline: Timeline | None = None) -> Recorded:
    """Read the run in ``path``; ``timeline`` is read if it is not given.

    Raises:
        RunError: it is not a run, or is too short.
        DataError: the time of an iteration cannot be determined from it.
    """
    config = read_config(path)
    timeline = read_timeline(path) if timeline is None else timeline
    trace = read_run(path, timeline)
    rollout = _rollout(path, config)
    tokens = {s.step: s.num_tokens for s in timeline.trained_steps}
    rows = [r for r in read_metrics(path) if r.kind == "step" and TRAINED.parts(r.values) and r.step in tokens]
    if len(rows) < _MIN_STEPS:
        raise RunError(
            f"{path}: {len(rows)} steps whose time is known; at least {_MIN_STEPS} are needed to model the run"
        )
    num_prompt_tokens, reward_s, filtered = _counted(path, config)
    turns, episodes = _turns(timeline)
    replica, how = _replica(path, timeline, config, rows, num_prompt_tokens)
    trainer = Latency(s_per_token=_trainer_s(rows) / sum(tokens[r.step] for r in rows))
    reward = Latency(base_s=reward_s)
    document = toml.Document(name="algorithm", data=config.get("algorithm") or {})
    algorithm = resolve(schema.build(AlgorithmConfig, document))
    engine, device = config.get("engine") or {}, (config.get("engine") or {}).get("device")
    one_device = engine.get("kind") == "embedded" and (config.get("trainer") or {}).get("device", device) == device
    return Recorded(
        trace=trace,
        rollout=rollout,
        scenario=Scenario(
            replicas=(replica,),
            trainer=trainer,
            reward=reward,
            turns=turns,
            kv_on_update="keep" if engine.get("kv_on_update") == "keep" else "recompute",
            colocated=engine.get("colocated") is True,
            accuracy=_accuracy(filtered, rollout.group_size),
            filter_zero_signal=filtered > 0,
        ),
        num_steps=len(rows),
        step_tokens_per_s=tuple((tokens[r.step], r.values["time/step_s"]) for r in rows),
        takes_turns=config["meta"].get("takes_turns", one_device),
        lag_of="group" if algorithm.aggregation.startswith("seq-mean") else "batch",
        notes=(
            how,
            f"Trainer: {1e6 * trainer.s_per_token:.1f} µs per trained token, rewards {1000 * reward.base_s:.1f} ms"
            " after a sample's end (means over the run).",
            *[f"The run's filter dropped {filtered:.1%} of its groups; the simulated one drops as many."]
            * (filtered > 0),
            *episodes,
        ),
    )


def _turns(timeline: Timeline) -> tuple[Turns | None, list[str]]:
    """Return the turns of the run's episodes as the simulator models them, and a note."""
    acting = [one for sample in timeline.samples for one in sample.answers]
    if not acting:
        return None, []
    times = [one.end_s - one.start_s for one in acting]
    mean_s, between = statistics.fmean(times), [one.num_tokens for one in acting if one.end is None]
    sampled = sum(sample.num_tokens for sample in timeline.samples if sample.answers)
    turns = Turns(
        tokens=max(1, round(sampled / len(acting))),
        answer_s=mean_s,
        answer_sigma=math.sqrt(math.log1p(statistics.pvariance(times) / mean_s**2)) if mean_s else 0.0,
        observed_tokens=round(statistics.fmean(between)) if between else 0,
    )
    return turns, [
        f"Episodes: each turn has {turns.tokens} tokens, an answer {turns.observed_tokens} and takes"
        f" {1000 * turns.answer_s:.0f} ms (means over {len(acting):,} answers; log deviation {turns.answer_sigma:.2f})."
    ]


def _rollout(path: Path, config: dict[str, Any]) -> SimulatedRollout:
    document = toml.Document(name=f"{path / 'config.json'}: rollout", data=config.get("rollout") or {})
    rollout = schema.build(SimulatedRollout, document)
    strategy = rollout.strategy
    told = config["meta"].get("prefill_tokens_per_iteration")  # by the engine; what the user says goes first
    if isinstance(strategy, RolloverConfig) and strategy.prefill_tokens_per_iteration is None and told is not None:
        rollout = replace(rollout, strategy=replace(strategy, prefill_tokens_per_iteration=told))
    return rollout


def _replica(
    path: Path, timeline: Timeline, config: dict[str, Any], rows: Sequence[MetricRow], num_prompt_tokens: int
) -> tuple[ReplicaModel, str]:
    timed = [
        (span.start_s, span.end_s, span.num_tokens, last is None or last.finish_reason is FinishReason.ABORT)
        for sample in timeline.samples
        for last, span in pairwise((None, *sample.spans))
        if span is not None and span.num_tokens and span.end_s > span.start_s
    ]
    found = fit_iterations(Segments.of(timed, timeline.active, timeline.end_s)) if timed else None
    if found is None:
        raise DataError(
            f"{path}: the times of its segments do not grow with their tokens, so iterations cannot be timed;"
            " give the engine in a scenario file ([engine] c0_s and b0) and the run as WORKLOAD"
        )
    per_round = (num_prompt_tokens + timeline.num_reprefilled_tokens) / len(timeline.steps)
    rate = per_round / found.start_s if per_round and found.start_s else math.inf
    pause_s = statistics.fmean(_pause_s(r) for r in rows)
    engine, most = config.get("engine") or {}, max(n for _, n in timeline.active)
    each = engine.get("max_running") or 2**31
    asked = sum(each) if isinstance(each, list) else each * max(1, len(engine.get("urls", ())))
    told = config["meta"].get("max_running", asked)  # a run of an earlier version has only asked
    model = ReplicaModel(
        c0_s=found.c0_s,
        b0=found.b0 if math.isfinite(found.b0) else _NO_B0 * most,
        prefill_tokens_per_s=rate,
        max_running=most if engine.get("kind") == "swarm" else max(most, told),  # a swarm tells its own limit
        swap_pause_s=pause_s,
    )
    b0 = f"B0 {found.b0:.1f} samples" if math.isfinite(found.b0) else "grows with no batch that occurred (no B0)"
    prefill = f"{rate:,.0f} tokens/s of prefill" if math.isfinite(rate) else "immeasurably fast prefill"
    return model, (
        f"Engine: fitted to {len(timed):,} segments, an iteration takes c0 {1000 * found.c0_s:.2f} ms and {b0},"
        f" {prefill}; mean error {found.error:.0%}. New weights take {1000 * pause_s:.0f} ms."
    )


def _trainer_s(rows: Sequence[MetricRow]) -> float:
    """Return the seconds of all steps that were neither rollout nor evaluation nor a change of weights."""
    others = ("time/rollout_s", "time/evaluate_s")
    return sum(
        max(0.0, r.values["time/step_s"] - sum(r.values.get(o, 0.0) for o in others) - _pause_s(r)) for r in rows
    )


def _pause_s(row: MetricRow) -> float:
    """Return the seconds of a step in which the engine took new weights, and gave its memory to the trainer before."""
    return row.values.get("time/publish_s", 0.0) + row.values.get("time/sleep_s", 0.0)


def _accuracy(filtered: float, group_size: int) -> float:
    """Return the accuracy at which this fraction of the groups of independent samples have equal rewards."""
    low, high = 0.0, 0.5
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if middle**group_size + (1 - middle) ** group_size > filtered else (low, middle)
    return high


def _counted(path: Path, config: dict[str, Any]) -> tuple[int, float, float]:
    """Return the tokens of all prompts, the mean time between the end of a sample (of the last sibling, where a reward
    compares siblings) and its reward, and the fraction of the finished groups that the filter dropped."""
    num_prompt_tokens, num_scored, num_trained, num_filtered, waited_s = 0, 0, 0, 0, 0.0
    sources = (config.get("tasks") or {}).get("train") or ()
    comparing = {s.get("name") for s in sources if any(r.get("group") for r in s.get("rewards") or [s["reward"]])}
    together: set[int] = set()
    ended: dict[SampleId | int, float] = {}

    def scored(sample_id: SampleId) -> SampleId | int:
        return sample_id.group if sample_id.group in together else sample_id

    for _, event in read_events(path / JOURNAL, effective=True, tokens=False):
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt):
                num_prompt_tokens += len(prompt.token_ids)
                if prompt.source in comparing:
                    together.add(group_id)
            case SegmentEnded(sample_id=sample_id, segment=segment) if segment.finish_reason in _FINISHED:
                ended[scored(sample_id)] = event.time_s
            case Observed(sample_id=sample_id, observation=observation) if observation.end is not None:
                ended[scored(sample_id)] = event.time_s
            case SampleScored(sample_id=sample_id) if scored(sample_id) in ended:
                num_scored += 1
                waited_s += event.time_s - ended[scored(sample_id)]
            case GroupDropped(cause=WasteCause.FILTER_ZERO_SIGNAL):
                num_filtered += 1
            case BatchConsumed(group_ids=group_ids):
                num_trained += len(group_ids)
    return num_prompt_tokens, waited_s / max(1, num_scored), num_filtered / max(1, num_filtered + num_trained)
