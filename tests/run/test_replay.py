"""Whole runs with truncated sampling: the sets that tokens were drawn from reach the trainer, whatever happens between."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.rollout.events import CheckpointSaved, SegmentEnded
from rollover.rollout.journal import FORMAT_VERSION, Journal, read_events
from rollover.types import Trajectory
from tests import runs
from tests.runs import Cue, Processes, Say

CUT = ("--rollout.top_p", "0.9")


def of_a_killed_run(folder: Path, *argv: str) -> list[Trajectory]:
    """Train, kill and resume; return what was trained, some of it sampled under several versions."""
    processes = Processes(folder)
    every = ("--checkpoint.every_steps", "1", "--checkpoint.keep_last", "10")
    begun = processes.run("train", "run.toml", "--run-dir", "out", *argv, *every, kill_at=Cue(SegmentEnded, 30))
    resumed = processes.run("train", "--resume", "out")
    assert (begun.code, resumed.code) == (-9, 0), resumed.err
    trajectories = runs.trajectories(Path("out"))
    assert any(t.num_resumes and len(set(t.policy_versions)) > 1 for t in trajectories)
    runs.ledger(Path("out"))
    return trajectories


@pytest.mark.parametrize("changes", [(), ("--engine.cpu_kernels", "torch")], ids=["compiled", "torch"])
def test_a_killed_run_trains_over_kept_sets(experiment: Path, tiny_model: Path, changes: tuple[str, ...]) -> None:
    run, trajectories = Path("out"), of_a_killed_run(experiment, "--steps", "6", *CUT, *changes)
    assert all(len(t.kept) == t.num_tokens for t in trajectories)
    assert runs.largest_logprob_error(run, tiny_model, trajectories) < 1e-4
    assert runs.largest_logprob_error(run, tiny_model, trajectories, replays=False) > 0.05, "what is avoided"
    rows = runs.rows(run)
    assert all(row["kept/tokens"] > 1 and 0.8 < row["kept/mass"] < 1 for row in rows)
    assert rows[0]["is_weight/max"] == pytest.approx(1, abs=1e-3)


def test_a_killed_run_trains_each_token_with_the_experts_that_sampled_it(tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = runs.save_model(tmp_path / "model of experts", "qwen3_moe", **sizes)
    with runs.working_in(tmp_path, folder):
        trajectories = of_a_killed_run(tmp_path, "--steps", "4", "--trainer.replay_routes", "true")
        routes = [route for t in trajectories for route in t.routes]
        assert len(routes) == sum(t.num_tokens for t in trajectories)
        assert all(row["routes/replayed"] == 1 for row in runs.rows(Path("out")))
        assert {len(route) for route in routes} == {2 * 2} and {e for route in routes for e in route} == {*range(8)}
        of_one_version = [t for t in trajectories if len(set(t.policy_versions)) == 1]
        assert runs.largest_logprob_error(Path("out"), folder, of_one_version) < 1e-4


def test_a_journal_of_the_format_before_is_continued(experiment: Path) -> None:
    path = experiment / "journal.sqlite"
    journal, saved = Journal(path), CheckpointSaved(time_s=1.0, step=0)
    journal.append([saved])
    journal._db.execute("UPDATE format SET version = 1")
    journal.close()
    Journal(path).close()
    assert Journal(path)._db.execute("SELECT version FROM format").fetchone() == (FORMAT_VERSION,)
    assert list(read_events(path)) == [(1, saved)]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (CUT, "each token is drawn from at most 512 tokens (rollout.top_k), which are stored with it"),
        (("--rollout.min_p", "0.1", "--rollout.top_k", "20"), "each token is drawn from at most 20 tokens"),
        ((*CUT, "--rollout.accept_truncation_bias", "true"), "importance ratios and gradients are biased"),
    ],
)
@pytest.mark.usefixtures("experiment")
def test_a_dry_run_states_what_becomes_of_tokens_left_out(done: Say, argv: tuple[str, ...], expected: str) -> None:
    assert expected in done("train", "run.toml", "--dry-run", *argv)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--rollout.top_k", "4097"), "rollout.top_k must be at most 4,096, got 4,097"),
        (("--rollout.top_k", "1"), "nothing to train"),
        (("--rollout.min_p", "1"), "min_p must lie in [0, 1)"),
        (("--rollout.accept_truncation_bias", "true"), "accept_truncation_bias has no effect"),
        ((*CUT, "--engine.kind", "vllm", "--engine.launch", "true"), "rollout.accept_truncation_bias = true"),
    ],
)
@pytest.mark.usefixtures("experiment")
def test_what_cannot_be_replayed_is_refused_at_the_start(refused: Say, argv: tuple[str, ...], expected: str) -> None:
    assert expected in refused("train", "run.toml", *argv)
