"""What it takes to resume a long run, to report on it and to show its samples: peak memory and time.

    python benchmarks/journal.py --out benchmarks/results/journal-DATE.json  # 100 M tokens, some minutes, 1 GB of disk
    python benchmarks/journal.py --tokens 1000000                              # to see that it works

The journal is that of a run under ``april``: 16 groups of 8 responses of 4,096 tokens a step, half of the next
step's groups parked halfway, progress saved every 256 tokens, a checkpoint every ten steps, two of them kept. Each job
runs in a process of its own; printed is the height of its resident memory beyond that before it began. Live tokens are
those of parked samples and of batches that are handed out again: 20 steps at most.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollover.report.metrics import MetricsWriter
from rollover.report.record import JOURNAL, read_run
from rollover.report.run_report import render_report
from rollover.report.samples import read_batch
from rollover.rollout.events import (
    BatchConsumed,
    BatchTrained,
    CheckpointSaved,
    Event,
    GroupOpened,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.journal import Journal, restart
from rollover.types import FinishReason, Prompt, SampleId, Segment

GROUPS, GROUP_SIZE, TOKENS, SAVED, EVERY = 16, 8, 4096, 256, 10
STEP_TOKENS = GROUPS * GROUP_SIZE * TOKENS
IDS, LOGPROBS = tuple(range(1000, 1000 + SAVED)), (-0.5,) * SAVED
PROMPT = tuple(range(1000, 1200))


def run_events(num_steps: int) -> Iterator[list[Event]]:
    """Yield the events of one step after the other."""
    for step in range(num_steps):
        events: list[Event] = []
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        parked_before = groups[: GROUPS // 2] if step else groups[:0]
        for group in groups:
            if group not in parked_before:
                events += _open(group, step)
            events += _decode(group, step, TOKENS // 2 if group in parked_before else 0, TOKENS)
        for group in range(groups.stop, groups.stop + GROUPS // 2):
            events += [*_open(group, step), *_decode(group, step, 0, TOKENS // 2)]
        events.append(BatchConsumed(time_s=step + 0.9, step=step, group_ids=tuple(groups)))
        events.append(BatchTrained(time_s=step + 0.95, step=step, untrained={}))
        events.append(VersionPublished(time_s=step + 0.99, policy_version=step + 1, pause_s=0.01))
        if (step + 1) % EVERY == 0:
            events.append(CheckpointSaved(time_s=step + 0.995, step=max(0, step + 1 - EVERY)))
        yield events


def _open(group: int, now_s: float) -> list[Event]:
    prompt = Prompt(prompt_id=f"sums/{group}@0", token_ids=PROMPT, text=f"{group} + 1 = " * 60, source="sums")
    return [GroupOpened(time_s=now_s, group_id=group, prompt=prompt, group_size=GROUP_SIZE, cursor=group + 1)]


def _decode(group: int, step: int, start: int, end: int) -> Iterator[Event]:
    for sample_id in (SampleId(group, i) for i in range(GROUP_SIZE)):
        yield SampleStarted(step, sample_id, step)
        for at in range(start, end, SAVED):
            last = at + SAVED == end
            reason = None if not last else FinishReason.STOP if end == TOKENS else FinishReason.ABORT
            begin_s, end_s = step + at / TOKENS * 0.8, step + (at + SAVED) / TOKENS * 0.8
            yield SegmentEnded(end_s, sample_id, Segment(step, IDS, LOGPROBS, reason, step, begin_s, end_s))
        if end == TOKENS:
            yield SampleScored(step + 0.8, sample_id, float(sample_id.index % 2))


def write_run(folder: Path, num_steps: int) -> None:
    (folder / "config.json").write_text(json.dumps({"steps": num_steps, "meta": {"seed": 0}}))
    journal = Journal(folder / JOURNAL)
    with MetricsWriter(folder) as metrics:
        for step, events in enumerate(run_events(num_steps)):
            journal.append(events)
            values = {"loss": 0.1, "reward/mean": 0.5, "time/step_s": 1.0, "perf/trained_tokens_per_s": STEP_TOKENS}
            metrics.write("step", step, step + 1.0, values)
    journal.close()


def resume(folder: Path, num_steps: int) -> dict[str, int]:
    """Resume from the newest checkpoint. Returns what the ledger then holds."""
    journal = Journal(folder / JOURNAL)
    ledger = restart(journal, step=num_steps // EVERY * EVERY, redo_round=False).ledger
    journal.close()
    return {"decoded_tokens": ledger.tokens.decoded, "live_tokens": ledger.tokens.live}


def report(folder: Path, num_steps: int) -> dict[str, int]:
    return {"page_bytes": len(render_report(read_run(folder)))}


def samples(folder: Path, num_steps: int) -> dict[str, int]:
    return {"samples": len(read_batch(folder).samples)}


def measured(job: str, folder: Path, num_steps: int) -> dict[str, Any]:
    """Run a job in a process of its own."""
    command = [sys.executable, __file__, "--job", job, "--run", str(folder), "--steps", str(num_steps)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{job:7} {found['peak_mb']:7.1f} MB beyond {found['before_mb']:.1f}, {found['seconds']:6.1f} s", found)
    return found


def work(job: str, folder: Path, num_steps: int) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.perf_counter()
    found = {"resume": resume, "report": report, "samples": samples}[job](folder, num_steps)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    print(json.dumps({**found, "peak_mb": peak, "before_mb": before, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", choices=("resume", "report", "samples"))
    parser.add_argument("--run", type=Path)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    if args.job:
        work(args.job, args.run, args.steps)
        return
    from engine import machine

    num_steps = max(EVERY, -(-args.tokens // STEP_TOKENS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, num_steps)
        result = {
            "machine": machine(),
            "num_steps": num_steps,
            "journal_bytes": (folder / JOURNAL).stat().st_size,
            "report": measured("report", folder, num_steps),
            "samples": measured("samples", folder, num_steps),
            "resume": measured("resume", folder, num_steps),
        }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
