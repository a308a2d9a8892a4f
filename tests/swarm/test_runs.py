"""In pull mode a swarm learns what the run of one machine does, however many workers there are, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load

from rollover.run.layout import RUN_FILES
from tests import runs
from tests.swarm.chaos.stage import Stage


async def test_pull_mode_is_the_co_located_run_for_any_number_of_workers(experiment_folder: Path) -> None:
    # A batch of 32 samples needs more places than the 12 of one worker, so each that is there decodes some.
    settings = ("--rollout.strategy", "sync", "--rollout.rollout_batch_size", "16")
    argv = ("--engine.mode", "pull", "--steps", "100000", *settings)
    names = {"a", "b", "late"}
    stage = Stage(experiment_folder, argv, seed="0", speeds=dict.fromkeys(sorted(names), 1000.0), late={"late"})
    async with stage.open():
        await stage.until("the first step", lambda: stage.steps_done() > 0)
        stage.start("late")
        metrics = stage.run / "metrics.jsonl"
        await stage.until("steps of all", lambda: all(f'"drift/{name}"' in metrics.read_text() for name in names))
        steps = await stage.stop()
    alone = experiment_folder / "alone"
    done = runs.Processes(experiment_folder).run(
        "train", "run.toml", "--run-dir", "alone", "--steps", str(steps), *settings
    )
    assert done.code == 0, done.err
    assert tokens(stage.run) == tokens(alone)
    ours, theirs = (load(runs.weights(run, steps)) for run in (stage.run, alone))
    for name, tensor in theirs.items():  # the kernels compute each row alone, whatever is decoded beside it
        assert torch.equal(ours[name], tensor), name
    batches = runs.batches(stage.run)
    assert all({v for t in batch.trajectories for v in t.policy_versions} == {batch.step} for batch in batches)
    sampled_by = [{s.engine for t in batch.trajectories for s in t.segments if s.token_ids} for batch in batches]
    assert set.union(*sampled_by) == names and "late" not in sampled_by[0], "each has done its share"
    assert_weights_are_accounted(stage.run, names)
    assert {entry.name for entry in stage.run.iterdir()} <= {*RUN_FILES}, "no variant can take one of these names"


def tokens(run: Path) -> list[list[tuple[Sequence[int], Sequence[float]]]]:
    """Tokens of each batch with the log-probs that they were sampled with."""
    return [[(t.token_ids, t.rollout_logprobs) for t in batch.trajectories] for batch in runs.batches(run)]


def assert_weights_are_accounted(run: Path, members: set[str]) -> None:
    """What the record of publications says is what the metrics of the steps say."""
    records = list(map(json.loads, (run / "swarm" / "weights.jsonl").read_text().splitlines()))
    changes = [record for record in records if record["record"] == "change"]
    assert {change["member"] for change in changes} <= members
    assert len({(change["member"], change["version"]) for change in changes}) == len(changes)
    assert all(change["wire_bytes"] > 0 and change["prepare_s"] > 0 for change in changes)
    assert sorted(p["version"] for p in records if p not in changes) == list(range(len(records) - len(changes)))
    told = sum(row.get("swarm/wire_bytes", 0) for row in runs.rows(run))
    assert 0 < told <= sum(change["wire_bytes"] for change in changes)  # the last changes come behind the last step
