"""A made-up run: a small rollout simulation that emits the same events and metrics as a real one."""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.batch import WasteCause
from rollover.report.metrics import Kind, MetricRow, MetricsWriter
from rollover.report.record import RunRecord
from rollover.report.throughput import of_step
from rollover.report.timeline import Timeline
from rollover.rollout.events import (
    BatchConsumed,
    BatchTrained,
    Event,
    GroupOpened,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.journal import Journal
from rollover.types import FinishReason, Prompt, SampleId
from tests.segments import segment

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
    """``april`` when ``over_sampling > 1``: launch more groups than a step needs and park the unfinished."""

    def __init__(
        self, *, num_steps: int, groups_per_step: int = 8, over_sampling: float = 1.75, seed: int = 0, engine: str = ""
    ) -> None:
        self.num_steps, self.needed, self.engine = num_steps, groups_per_step, engine
        self.launched = round(groups_per_step * over_sampling)
        self.rng = random.Random(seed)
        self.now_s = 2.0
        self.events: list[Event] = []
        self.rows: list[tuple[Kind, int, float, dict[str, float]]] = []
        self.lengths: dict[SampleId, int] = {}
        self.done: dict[SampleId, int] = {}
        self.rewards: dict[SampleId, float] = {}
        self.versions: dict[SampleId, list[tuple[int, int]]] = {}
        self.open: dict[int, set[SampleId]] = {}
        self.ready: deque[int] = deque()
        self.num_groups = 0
        self._eval(0)
        for step in range(num_steps):
            self._step(step)
        self._eval(num_steps)

    def _eval(self, step: int) -> None:
        accuracy = 0.22 + 0.55 * step / (step + 6)
        self.now_s += 1.0
        values = {"accuracy/sums": accuracy, "accuracy_se/sums": 0.02, "accuracy": accuracy, "accuracy_se": 0.02}
        self.rows.append(("eval", step, self.now_s, values))

    def _step(self, step: int) -> None:
        began_s = self.now_s
        decoded = self._rollout(step)
        rollout_s = self.now_s - began_s
        batch = tuple(self.ready.popleft() for _ in range(self.needed))
        self.events.append(BatchConsumed(time_s=self.now_s, step=step, group_ids=batch))
        ids = [SampleId(g, i) for g in batch for i in range(GROUP_SIZE)]
        equal = [g for g in batch if len({self.rewards[SampleId(g, i)] for i in range(GROUP_SIZE)}) == 1]
        untrained = sum(self.lengths[SampleId(g, i)] for g in equal for i in range(GROUP_SIZE))
        trained = sum(self.lengths[i] for i in ids) - untrained
        self.now_s += TRAIN_S
        causes = {WasteCause.ZERO_ADVANTAGE: untrained} if untrained else {}
        self.events.append(BatchTrained(time_s=self.now_s, step=step, untrained=causes))
        self.now_s += PUBLISH_S
        self.events.append(VersionPublished(time_s=self.now_s, policy_version=step + 1, pause_s=PUBLISH_S))
        step_s = self.now_s - began_s
        lags = [step - v for i in ids for v, n in self.versions[i] for _ in range(n)]
        reward = 0.25 + 0.5 * step / (step + 6) + self.rng.gauss(0, 0.03)
        values = {
            "reward/mean": reward,
            "reward/std": 0.4,
            "loss": 0.05 - 0.002 * step + self.rng.gauss(0, 0.004),
            "grad_norm": 0.8 + self.rng.gauss(0, 0.1),
            "staleness/mean": sum(lags) / len(lags),
            **of_step(trained_tokens=trained, decoded_tokens=decoded, step_s=step_s, decoding_s=rollout_s),
            "time/rollout_s": rollout_s,
            "time/train_s": TRAIN_S,
            "time/publish_s": PUBLISH_S,
            "reward/work_s": 0.02,
            "memory/peak_bytes": 9e8 + 1e6 * step,
            "response/mean_tokens": (trained + untrained) / len(ids),
            "response/truncated": sum(self.lengths[i] == MAX_TOKENS for i in ids) / len(ids),
        }
        self.rows.append(("step", step, self.now_s, values))
        if (step + 1) % 5 == 0 and step + 1 < self.num_steps:
            self._eval(step + 1)

    def _rollout(self, step: int) -> int:
        while len(self.open) + len(self.ready) < self.launched:
            self._open()
        began_s, decoded = self.now_s, 0
        queue: list[tuple[float, SampleId]] = []
        for sample_id in sorted(s for samples in self.open.values() for s in samples):
            self.events.append(SampleStarted(time_s=began_s, sample_id=sample_id, policy_version=step))
            left = self.lengths[sample_id] - self.done[sample_id]
            heapq.heappush(queue, (began_s + left * TOKEN_S, sample_id))
        while queue and len(self.ready) < self.needed:
            self.now_s, sample_id = heapq.heappop(queue)
            decoded += self._end(sample_id, step, began_s, FinishReason.STOP)
            self.rewards[sample_id] = float(self.rng.random() < 0.5)
            self.events.append(SampleScored(time_s=self.now_s, sample_id=sample_id, reward=self.rewards[sample_id]))
            self.open[sample_id.group].discard(sample_id)
            if not self.open[sample_id.group]:
                del self.open[sample_id.group]
                self.ready.append(sample_id.group)
        for _, sample_id in sorted(queue, key=lambda entry: entry[1]):
            decoded += self._end(sample_id, step, began_s, FinishReason.ABORT)
        return decoded

    def _open(self) -> None:
        group, self.num_groups = self.num_groups, self.num_groups + 1
        prompt = Prompt(
            prompt_id=f"sums/{group}@0",
            token_ids=(1, 2),
            text=f"What is {group} + {group * 7 % 10}?<|im_end|>\n<|im_start|>assistant\n",
            source="sums",
        )
        self.events.append(
            GroupOpened(time_s=self.now_s, group_id=group, prompt=prompt, group_size=GROUP_SIZE, cursor=group + 1)
        )
        self.open[group] = {SampleId(group, i) for i in range(GROUP_SIZE)}
        for sample_id in sorted(self.open[group]):
            # Long-tailed: the median is about 30.
            self.lengths[sample_id] = max(3, min(MAX_TOKENS, int(self.rng.lognormvariate(3.4, 1.1))))
            self.done[sample_id] = 0
            self.versions[sample_id] = []

    def _end(self, sample_id: SampleId, version: int, began_s: float, reason: FinishReason) -> int:
        left = self.lengths[sample_id] - self.done[sample_id]
        n = left if reason is FinishReason.STOP else min(left - 1, int((self.now_s - began_s) / TOKEN_S))
        times = {"start_s": began_s, "end_s": self.now_s}
        beside = {"num_prefilled_tokens": self.done[sample_id], "engine": self.engine}
        decoded = segment((5,) * n, reason, version=version, **times, **beside)
        self.done[sample_id] += n
        self.versions[sample_id].append((version, n))
        self.events.append(SegmentEnded(self.now_s, sample_id, decoded))
        return n


def write_run(run_dir: Path, simulation: Simulation, *, strategy: str = "april") -> Path:
    """Store a run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "rollout": {"strategy": strategy, "group_size": GROUP_SIZE, "groups_per_step": simulation.needed},
        "trainer": {"algorithm": "grpo", "lr": 1e-4},
        "meta": {"version": "0.1.0", "git_commit": "abc1234", "seed": 0, "machine": "2 cores"},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    with MetricsWriter(run_dir) as writer:
        for row in simulation.rows:
            writer.write(*row)
    journal = Journal(run_dir / "journal.sqlite")
    journal.append(simulation.events)
    journal.close()
    return run_dir
