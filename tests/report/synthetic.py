"""A made-up run: a simulation with the events and metrics of a real one."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.batch import WasteCause
from rollover.report.metrics import MetricRow, MetricsWriter
from rollover.report.record import RunRecord
from rollover.report.throughput import of_step
from rollover.report.timeline import Timeline
from rollover.rollout.events import BatchConsumed, BatchTrained, Event, GroupOpened, SampleScored, SegmentEnded
from rollover.rollout.journal import Journal
from rollover.sim.result import StepRecord
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario
from rollover.types import Prompt, SampleId
from tests.sim.kit import Lengths, strategy_of

GROUP_SIZE = 4
TRAIN_S, PUBLISH_S, TOKEN_S = 1.1, 0.15, 0.012
MAX_TOKENS = 400


def steps(*values: Mapping[str, float]) -> tuple[MetricRow, ...]:
    """Rows of the steps from 0 on, one a second."""
    return tuple(MetricRow(kind="step", step=i, time_s=float(i), values=each) for i, each in enumerate(values))


def recorded(
    events: Sequence[Event] = (), rows: Sequence[MetricRow] = (), *, name: str = "run", **config: Any
) -> RunRecord:
    return RunRecord(name=name, config=config, meta={}, metrics=tuple(rows), timeline=Timeline.of(events))


class Simulation:
    """A run of the real scheduler, with samples of text, rows of metrics and evaluations."""

    def __init__(
        self, *, num_steps: int, groups_per_step: int = 8, strategy: str = "april", seed: int = 0, engine: str = ""
    ) -> None:
        self.strategy, self.engine = strategy, engine
        self.events: list[Event] = []
        self.rewards: dict[SampleId, float] = {}
        self.lengths: Counter[SampleId] = Counter()
        self.untrained: list[int] = []
        self.rng = random.Random(seed)

        def length(prompt: int, sample: int, attempt: int) -> int:
            """Long-tailed: the median is about 30."""
            return 3 + int(random.Random(f"{seed} {prompt} {sample}").lognormvariate(3.4, 1.1))

        replica = ReplicaModel(c0_s=TOKEN_S, b0=1e12, swap_pause_s=PUBLISH_S)
        run = simulate(
            strategy_of(strategy, rollout_batch_size=groups_per_step, group_size=GROUP_SIZE, max_new_tokens=MAX_TOKENS),
            Lengths(length, cap=MAX_TOKENS),
            Scenario(replicas=(replica,), trainer=Latency(base_s=TRAIN_S)),
            steps=num_steps,
            seed=seed,
            observer=self._observe,
        )
        ends_s = itertools.accumulate(record.duration_s for record in run.steps)
        self.rows = [self._eval(0, 0.0)]
        for record, end_s in zip(run.steps, ends_s, strict=True):
            self.rows.append(self._row(record, end_s))
            if (record.step + 1) % 5 == 0 or record.step + 1 == num_steps:
                self.rows.append(self._eval(record.step + 1, end_s))

    def _observe(self, event: Event) -> None:
        """Keep an event, with the text that simulations leave out and what the trainer says."""
        if isinstance(event, GroupOpened):
            text = f"What is {event.group_id} + {event.group_id * 7 % 10}?<|im_end|>\n<|im_start|>assistant\n"
            prompt = Prompt(prompt_id=f"sums/{event.group_id}@0", token_ids=(1, 2), text=text, source="sums")
            event = event._replace(prompt=prompt)
        if isinstance(event, SegmentEnded):
            n = len(event.segment.token_ids)
            decoded = event.segment._replace(token_ids=(5,) * n, rollout_logprobs=(-1.0,) * n, engine=self.engine)
            event = event._replace(segment=decoded)
            self.lengths[event.sample_id] += n
        if isinstance(event, SampleScored):
            self.rewards[event.sample_id] = event.reward
        self.events.append(event)
        if isinstance(event, BatchConsumed):
            groups = [[SampleId(group, i) for i in range(GROUP_SIZE)] for group in event.group_ids]
            equal = [each for group in groups if len({self.rewards[i] for i in group}) == 1 for each in group]
            self.untrained.append(sum(self.lengths[i] for i in equal))
            causes = {WasteCause.ZERO_ADVANTAGE: self.untrained[-1]} if equal else {}
            self.events.append(BatchTrained(time_s=event.time_s + TRAIN_S, step=event.step, untrained=causes))

    def _row(self, record: StepRecord, end_s: float) -> MetricRow:
        step, decoded, rollout_s = record.step, sum(record.lengths), record.duration_s - TRAIN_S
        trained = decoded - self.untrained[step]
        values = {
            "reward/mean": 0.25 + 0.5 * step / (step + 6) + self.rng.gauss(0, 0.03),
            "reward/std": 0.4,
            "loss": 0.05 - 0.002 * step + self.rng.gauss(0, 0.004),
            "grad_norm": 0.8 + self.rng.gauss(0, 0.1),
            "staleness/mean": record.lag.mean,
            **of_step(trained_tokens=trained, decoded_tokens=decoded, step_s=record.duration_s, decoding_s=rollout_s),
            "time/rollout_s": rollout_s,
            "time/train_s": TRAIN_S,
            "time/publish_s": PUBLISH_S,
            "reward/work_s": 0.02,
            "memory/peak_bytes": 9e8 + 1e6 * step,
            "response/mean_tokens": decoded / len(record.lengths),
            "response/truncated": record.lengths.count(MAX_TOKENS) / len(record.lengths),
        }
        return MetricRow(kind="step", step=step, time_s=end_s, values=values)

    def _eval(self, step: int, time_s: float) -> MetricRow:
        accuracy = 0.22 + 0.55 * step / (step + 6)
        values = {"accuracy/sums": accuracy, "accuracy_se/sums": 0.02, "accuracy": accuracy, "accuracy_se": 0.02}
        return MetricRow(kind="eval", step=step, time_s=time_s, values=values)


def write_run(run_dir: Path, simulation: Simulation) -> Path:
    """Store a run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "rollout": {"strategy": simulation.strategy, "group_size": GROUP_SIZE},
        "trainer": {"algorithm": "grpo", "lr": 1e-4},
        "meta": {"version": "0.1.0", "git_commit": "abc1234", "seed": 0, "machine": "2 cores"},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    with MetricsWriter(run_dir) as writer:
        for row in simulation.rows:
            writer.write(row.kind, row.step, row.time_s, row.values)
    journal = Journal(run_dir / "journal.sqlite")
    journal.append(simulation.events)
    journal.close()
    return run_dir
