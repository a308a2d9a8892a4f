"""Runs that train adapters, from the command line to an exported model."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollover import cli
from rollover.run.export import export
from rollover.trainer.models import open_model
from tests import runs
from tests.runs import Say

pytestmark = pytest.mark.usefixtures("experiment")

LORA = ("--trainer.lora.rank", "4", "--trainer.learning_rate", "0.01", "--checkpoint.every_steps", "2")


def train(*argv: str) -> int:
    return cli.main(["train", *argv])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_model(folder).named_parameters())


def test_engines_sample_from_the_merged_weights() -> None:
    """Recorded log-probs are the merged model's, in the version that each token is labelled with."""
    every = ("--checkpoint.every_steps", "1", "--checkpoint.keep_last", "10")
    assert train("run.toml", "--run-dir", "out", *LORA, *every, "--steps", "4") == 0
    trajectories = runs.trajectories(Path("out"))
    versions = {v for t in trajectories for v in t.policy_versions}
    assert len(versions) > 1
    for version in versions - {0}:
        export(Path("out"), Path(f"merged/checkpoints/step_{version}"), step=version)
    assert runs.largest_logprob_error(Path("merged"), Path("model"), trajectories) < 1e-4


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_a_half_precision_model_trains_on_a_cpu_with_default_settings(publish: str, refused: Say) -> None:
    """The trainer computes beside bfloat16 weights, the engine in float32: the run counts the difference as rounding,
    though ``trainer.dtype`` is float32. A tolerance for float32 alone would stop the run."""
    open_model(Path("model"), dtype=torch.bfloat16).save_pretrained("half")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("model") / file, "half")
    args = ("run.toml", "--model.path", "half", *LORA, "--trainer.lora.publish", publish, "--steps", "2")
    assert train(*args, "--run-dir", "out") == 0
    message = refused("train", *args, "--run-dir", "strict", "--engine.logprob_tolerance", "0.0001")
    assert "use engine.kind 'vllm' or 'sglang'" in message and "engine.dtype" not in message


def test_a_run_that_publishes_adapters_alone_is_the_run_that_merges_them() -> None:
    """Bit for bit, also from where it was stopped, on the way that it was not begun on."""
    exact = (*LORA, "--deterministic", "true", "--rollout.strategy", "sync")
    alone = ("--trainer.lora.publish", "adapter")
    assert train("run.toml", "--run-dir", "merged", *exact, "--steps", "4") == 0
    assert train("run.toml", "--run-dir", "alone", *exact, *alone, "--steps", "4") == 0
    assert train("run.toml", "--run-dir", "stopped", *exact, "--steps", "2") == 0
    assert train("--resume", "stopped", *alone, "--steps", "4") == 0
    merged, *others = (runs.sampled(Path(run)) for run in ("merged", "alone", "stopped"))
    assert others == [merged, merged]
    sizes = {run: {row["weights/bytes"] for row in runs.rows(Path(run))} for run in ("merged", "alone")}
    assert all(len(found) == 1 for found in sizes.values()) and min(sizes["alone"]) < min(sizes["merged"]) / 2
    assert all(row["weights/load_s"] > 0 and row["weights/stage_s"] > 0 for row in runs.rows(Path("alone")))
    for run in ("merged", "alone", "stopped"):
        export(Path(run), Path(f"{run}-model"))
    ours, *others = (weights(Path(f"{run}-model")) for run in ("merged", "alone", "stopped"))
    assert all(torch.equal(ours[name], theirs[name]) for theirs in others for name in ours)


def test_a_run_is_exported_and_evaluated(refused: Say, done: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("run.toml", "--run-dir", "out", *LORA, "--steps", "2") == 0
    steps = []

    def noted(run: Path, target: Path, *, step: int | None = None) -> Path:
        steps.append(step)
        return export(run, target, step=step)

    with monkeypatch.context() as patched:
        patched.setattr("rollover.run.export.export", noted)
        for run, expected in (("first", [2]), ("second", [2]), ("third", [2, 2])):
            if run == "third":  # as by a run that went on from an earlier checkpoint
                os.utime("out/checkpoints/step_2", (time.time() + 60,) * 2)
            assert cli.main(["eval", "out", "--run-dir", run, "--eval.num_prompts", "4"]) == 0
            assert steps == expected, "merged once for each checkpoint; the newest may be another one by now"
    assert "step_2" in done("export", "out", "exported")
    initial = weights(Path("model"))
    ours = AutoModelForCausalLM.from_pretrained("exported")
    assert any(not torch.equal(initial[name], p) for name, p in ours.named_parameters())
    assert "exported exists" in refused("export", "out", "exported")
    told = refused("export", "out", "other", "--step", "7")
    assert "no checkpoint after step 7; it keeps those after: 2" in told
    assert "rollover export" in refused("train", "run.toml", "--model.path", "out/checkpoints/step_2", "--steps", "1")


def test_adapters_are_not_merged_into_another_model(refused: Say) -> None:
    assert train("run.toml", "--run-dir", "out", *LORA, "--steps", "2") == 0
    Path("model").unlink()
    runs.save_model(Path("model"), seed=8)
    assert "is not the model that the run started from" in refused("export", "out", "exported")
    assert not Path("exported").exists()


def test_a_full_checkpoint_is_exported_without_what_only_training_needs() -> None:
    assert train("run.toml", "--run-dir", "out", "--steps", "1") == 0
    checkpoint = export(Path("out"), Path("exported"))
    left_out = {path.name for path in checkpoint.iterdir()} - {path.name for path in Path("exported").iterdir()}
    assert left_out == {"trainer", "trainer.json"}
    ours, theirs = weights(Path("exported")), weights(checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
