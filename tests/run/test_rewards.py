"""Runs with several rewards, a judge and a curriculum, from the command line to the metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollover import cli
from rollover.rollout.events import BatchConsumed, CheckpointSaved, SampleScored
from tests import runs
from tests.environments.judges import JudgeServer, judge_server
from tests.runs import Cue, Processes, Say, succeeded

SIZES = (
    *("--tasks.max_prompt_tokens", "16", "--rollout.max_new_tokens", "24", "--engine.kv_cache_bytes", "4194304"),
    *("--rollout.rollout_batch_size", "4", "--rollout.group_size", "4", "--logging.progress", "off"),
    *("--engine.max_running", "24", "--engine.block_size_tokens", "4"),
)

TWELVE_LINES = """\
steps = 2
model.path = "model"
algorithm.advantage = "component_std"
[[tasks.train]]
kind = "jsonl"
name = "letters"
path = "letters.jsonl"
rewards = [
  { kind = "judge", url = "URL", model = "tiny", rubric = "short is better" },
  { kind = "function", function = "letter_reward:share", weight = 0.5 },
  { kind = "function", function = "letter_reward:rank", group = true, weight = 0.1 },
]
"""

RANK = """
def rank(completions, **columns):
    order = sorted(completions, key=len)
    return [order.index(one) / len(order) for one in completions]
"""


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    """A judge on a loop of its own. It likes short responses."""
    started, ended, servers = threading.Event(), asyncio.Event(), list[JudgeServer]()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with judge_server(lambda body: f"Score: {1 / len(body['messages'][0]['content'])}") as server:
            servers.append(server)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(60)
    yield servers[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(60)
    loop.close()


def test_twelve_lines_train_with_a_judge_a_function_and_a_rank(experiment: Path, judge: JudgeServer) -> None:
    Path("run.toml").write_text(TWELVE_LINES.replace("URL", judge.url))
    with Path("letter_reward.py").open("a") as file:
        file.write(RANK)
    assert len(TWELVE_LINES.splitlines()) == 12
    assert cli.main(["train", "run.toml", "--run-dir", "out", *SIZES]) == 0
    for row, batch in zip(runs.rows(Path("out")), runs.batches(Path("out")), strict=True):
        for name in ("judge", "share", "rank"):
            found = [t.components[name] for t in batch.trajectories]
            assert row[f"reward/component/{name}"] == pytest.approx(sum(found) / len(found))
        for t in batch.trajectories:
            parts = t.components
            assert t.reward == pytest.approx(parts["judge"] + 0.5 * parts["share"] + 0.1 * parts["rank"])
        assert row["judge/prompt_tokens"] == 100 * row["judge/requests"]
        assert row["pass_rate/source/letters"] == 0
    asked = sum(row["judge/requests"] for row in runs.rows(Path("out")))
    assert 0 < asked <= len(judge.requests)
    assert cli.main(["train", "--resume", "out", "--tasks.train.0.rewards.0.weight", "2"]) == 2


CURRICULUM = """\
[tasks.curriculum]
min_visits = 1
revisit = 0.2
"""


def test_a_curriculum_is_resumed_bit_for_bit(processes: Processes) -> None:
    config = runs.CONFIG.replace("workers = 0", "workers = 0\npass_score = 0.08")
    Path("run.toml").write_text(config + CURRICULUM)
    argv = ["train", "run.toml", "--deterministic", "true", "--steps", "10"]
    succeeded(processes.run(*argv, "--run-dir", "whole"))
    passed_over = runs.rows(Path("whole"))[-1]["curriculum/passed_over"]
    assert passed_over > 3
    for number, cue in enumerate([Cue(SampleScored, 60), Cue(CheckpointSaved, 1), Cue(BatchConsumed, 2)]):
        resumed = ["train", "--resume", "killed"] if number else [*argv, "--run-dir", "killed"]
        assert processes.run(*resumed, kill_at=cue).code == -9
    succeeded(processes.run("train", "--resume", "killed"))
    assert runs.sampled(Path("killed")) == runs.sampled(Path("whole"))
    assert runs.weights(Path("killed"), 10) == runs.weights(Path("whole"), 10)
    assert runs.rows(Path("killed"))[-1]["curriculum/passed_over"] == passed_over
    refused = processes.run("train", "--resume", "killed", "--tasks.curriculum.revisit", "0.5")
    assert refused.code == 2 and "tasks.curriculum.revisit cannot change when a run is resumed: det" in refused.err


def test_a_run_without_prompts_left_goes_on_if_more_are_revisited(experiment: Path, refused: Say) -> None:
    Path("run.toml").write_text(runs.CONFIG + CURRICULUM.replace("0.2", "0.0"))
    told = refused("train", "run.toml", "--run-dir", "out", "--steps", "9")
    assert "raise tasks.curriculum.revisit (now 0), or leave the run as it is" in told
    assert "once that is fixed, resume with: rollover train --resume out" in told
    assert cli.main(["train", "--resume", "out", "--tasks.curriculum.revisit", "1"]) == 0
    assert len(runs.batches(Path("out"))) == 9
