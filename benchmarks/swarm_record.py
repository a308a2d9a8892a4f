"""What a run of the swarm benchmark left behind, as one JSON object: by step and in sum.

What it keeps true: everything is read from the run directory; seconds count from the end of the evaluation before the
first step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.batch import Batch
from rollover.report.metrics import read_metrics
from rollover.report.record import JOURNAL
from rollover.rollout.events import CheckpointSaved, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.rollout.lag import BatchLag
from rollover.rollout.state import RolloutState
from rollover.trainer.checkpoint import list_checkpoints, read_manifest

Record = dict[str, Any]


def record_of(run: Path, rooms: Mapping[str, int]) -> Record:
    """Read a finished run. ``rooms``: places of each member, none for a co-located run."""
    events = [event for _, event in read_events(run / JOURNAL, effective=True)]
    folded = RolloutState(event for event in events if not isinstance(event, CheckpointSaved))
    view = folded.view
    batches = [Batch(step=step, groups=view.groups(ids)) for step, ids in sorted(folded.ledger.batches.items())]
    rows = read_metrics(run)
    start_s = next(row.time_s for row in rows if row.kind == "eval" and row.step == 0)
    steps = [row for row in rows if row.kind == "step"]
    end_s = steps[-1].time_s
    segments = [event.segment for event in events if isinstance(event, SegmentEnded)]
    lags: Counter[int] = Counter()
    for batch in batches:
        lags.update(BatchLag.of(batch).tokens)
    tokens = folded.ledger.tokens
    return {
        "wall_s": end_s - start_s,
        "steps": [
            {
                "step": row.step,
                "time_s": round(row.time_s - start_s, 4),
                "reward": row.values["reward/mean"],
                "tokens": batch.num_tokens,
                "longest": max(t.num_tokens for t in batch.trajectories),
                "staleness_mean": row.values["staleness/mean"],
                "staleness_max": row.values["staleness/max"],
                **{key: round(row.values[f"time/{key}"], 4) for key in ("rollout_s", "train_s", "publish_s", "step_s")},
            }
            for row, batch in zip(steps, batches, strict=True)
        ],
        "staleness": {
            "mean": sum(lag * n for lag, n in lags.items()) / lags.total(),
            "max": max(lags),
            "share_by_lag": {str(lag): n / lags.total() for lag, n in sorted(lags.items())},
        },
        "decoded_tokens": tokens.decoded,
        "trained_tokens": tokens.trained,
        "wasted_tokens": {str(cause): n for cause, n in tokens.wasted.items() if n},
        "idle": {
            "trainer": sum(row.values["time/rollout_s"] for row in steps) / (end_s - start_s),
            "members": {name: _idle(segments, name, room, start_s, end_s) for name, room in rooms.items()},
        },
        "weights": _weights(run / "swarm" / "weights.jsonl"),
        "batches": [fingerprint(batch) for batch in batches],
        "checkpoints": {
            str(read_manifest(folder).version): hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            for folder in list_checkpoints(run / "checkpoints")
        },
        "lengths": [[t.num_tokens for t in group.trajectories] for batch in batches for group in batch.groups],
        "prompt_tokens": round(statistics.fmean(len(t.prompt.token_ids) for b in batches for t in b.trajectories)),
    }


def fingerprint(batch: Batch) -> dict[str, str]:
    """Digests of a batch's tokens, and of these with their log-probs and rewards, in order."""
    tokens, all_of_it = hashlib.sha256(), hashlib.sha256()
    for t in batch.trajectories:
        ids = json.dumps([str(t.sample_id), t.token_ids]).encode()
        tokens.update(ids)
        all_of_it.update(ids + json.dumps([t.rollout_logprobs, t.reward]).encode())
    return {"tokens": tokens.hexdigest()[:16], "logprobs": all_of_it.hexdigest()[:16]}


def _idle(segments: Sequence[Any], member: str, room: int, start_s: float, end_s: float) -> dict[str, float]:
    """The share of the time in which a member has no call, and in which a place of it has none."""
    spans = sorted(
        (max(s.start_s, start_s), min(s.end_s, end_s))
        for s in segments
        if s.engine == member and s.end_s > start_s and s.start_s < end_s
    )
    busy_s, until_s = 0.0, start_s
    for begin_s, finish_s in spans:
        busy_s += max(0.0, finish_s - max(begin_s, until_s))
        until_s = max(until_s, finish_s)
    taken_s = sum(finish_s - begin_s for begin_s, finish_s in spans)
    whole_s = end_s - start_s
    return {"machine": 1 - busy_s / whole_s, "places": 1 - taken_s / (room * whole_s)}


def _weights(log: Path) -> Record | None:
    """Bytes and seconds of publications and of members' changes, but for the first, which opens the engines."""
    records: list[Record] = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
    made = [r for r in records if r["record"] == "publication"]
    changes = [r for r in records if r["record"] == "change"]
    if not made:
        return None
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for publication in made:
        by_kind[publication["kind"]].append(publication)
    later = [c for c in changes if c["version"] > 0]
    reached: dict[int, list[float]] = defaultdict(list)
    for change in later:
        reached[change["version"]].append(change["after_s"])
    return {
        "full_bytes": made[0]["full_bytes"],
        "publications": {
            kind: {
                "number": len(of_kind),
                "wire_bytes": statistics.fmean(p["wire_bytes"] for p in of_kind),
                "elapsed_s": statistics.fmean(p["elapsed_s"] for p in of_kind),
            }
            for kind, of_kind in by_kind.items()
        },
        "changes": len(later),
        "wire_bytes": sum(c["wire_bytes"] for c in changes),
        "prepare_s": _spread([c["prepare_s"] for c in later]),
        "pause_s": _spread([c["pause_s"] for c in later]),
        "after_s": _spread([c["after_s"] for c in later]),
        "convergence_s": _spread([max(times) for times in reached.values()]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": ordered[len(ordered) // 2],
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


# -- accuracy --------------------------------------------------------------------------------------------------------


def evaluate(config: Path, model: Path, checkpoints: Path, samples_per_prompt: int, out: Path) -> None:
    """Write the accuracy of ``model`` and of every checkpoint to ``out``: {version: {"accuracy": ..., ...}}. The same
    prompts and noise for all."""
    import torch

    torch.set_num_threads(1)
    out.write_text(json.dumps(asyncio.run(_evaluate(config, model, checkpoints, samples_per_prompt))))


async def _evaluate(config_file: Path, model: Path, checkpoints: Path, samples_per_prompt: int) -> Record:
    from rollover.clock import SystemClock
    from rollover.engine.embedded.config import EmbeddedConfig
    from rollover.engine.embedded.engine import EmbeddedEngine
    from rollover.environments.scorer import RewardScorer
    from rollover.hf.tokenizer import open_tokenizer, stop_token_ids
    from rollover.rollout.environment import NoEnvironment
    from rollover.run.building import build_config
    from rollover.run.evaluation import Evaluator
    from rollover.tasks.open import eval_sources
    from rollover.weights.sources import FolderWeights

    config = build_config(config_file)
    config = replace(config, eval=replace(config.eval, max_new_tokens=None, samples_per_prompt=samples_per_prompt))
    tokenizer = open_tokenizer(model)
    engine = EmbeddedEngine.from_folder(model, EmbeddedConfig(max_running=384, kv_cache_bytes=2**27))
    sources = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
    scorer = RewardScorer([spec for source in sources for spec in source.reward_specs], tokenizer)
    found: Record = {}
    try:
        for version, folder in [(0, model), *((read_manifest(c).version, c) for c in list_checkpoints(checkpoints))]:
            if version:
                await engine.load(version, FolderWeights(version, folder))
            evaluator = Evaluator(
                config,
                engine=engine,
                sources=sources,
                scorer=scorer,
                environment=NoEnvironment(),
                stops=stop_token_ids(model, tokenizer),
                clock=SystemClock(),
                on_progress=lambda done, total: None,
            )
            found[str(version)] = (await evaluator.run()).metrics()
    finally:
        await engine.close()
        await scorer.close()
    return found
