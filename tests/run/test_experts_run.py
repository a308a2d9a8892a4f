"""A mixture of experts trained from the command line by the embedded engine, with the routes of its tokens."""

from __future__ import annotations

from pathlib import Path

from rollover import cli
from rollover.report.metrics import read_metrics
from rollover.trainer.models import open_model
from tests import runs


def test_a_mixture_of_experts_is_trained_and_resumed_with_its_routes(tmp_path: Path) -> None:
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = runs.save_model(tmp_path / "experts", "qwen3_moe", **shape)
    (tmp_path / "there").mkdir()
    with runs.working_in(tmp_path / "there", model):
        assert cli.main(["train", "run.toml", "--trainer.replay_routes", "true", "--steps", "2"]) == 0
        (run,) = Path("runs").iterdir()
        assert cli.main(["train", "--resume", str(run), "--steps", "3"]) == 0
        replayed = [row.values["routes/replayed"] for row in read_metrics(run) if row.kind == "step"]
        assert replayed == [1.0] * 3
        assert all(t.routes for batch in runs.batches(run) for group in batch.groups for t in group.trajectories)
        open_model(run / "checkpoints" / "step_3")
