"""What an error advises can be done: the run goes on by ``--resume`` with the setting that the message names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rollover import cli
from rollover.engine.embedded.core import EngineCore
from rollover.trainer.local import LocalTrainer
from tests import runs
from tests.runs import Say

BEGUN = ("train", "run.toml", "--run-dir", "out", "--steps", "4")
RESUMED = ("train", "--resume", "out")


pytestmark = pytest.mark.usefixtures("experiment")


def resume(*changes: str, argv: tuple[str, ...] = RESUMED) -> None:
    """Bring the run to its end."""
    assert cli.main([*argv, *changes]) == 0
    assert len(runs.batches(Path("out"))) == 4
    runs.ledger(Path("out"))


@pytest.fixture
def begun(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stopped after its first checkpoint, for want of memory."""
    step = LocalTrainer.step

    def short_of_memory(trainer: LocalTrainer, batch: object) -> object:
        if trainer.version == 2 and trainer._config.micro_batch_tokens > 256:
            raise torch.OutOfMemoryError
        return step(trainer, batch)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "step", short_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cli.main(BEGUN)
    assert Path("out/checkpoints/step_2").is_dir()


def test_training_out_of_memory_goes_on_with_smaller_passes(refused: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.Tensor.backward

    def short_of_memory(loss: torch.Tensor) -> None:
        if not Path("smaller").exists():
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", short_of_memory)
    told = refused(*BEGUN)
    assert "lower trainer.micro_batch_tokens (now 8192) or set trainer.gradient_checkpointing = true" in told
    assert told.endswith("once that is fixed, resume with: rollover train --resume out")
    Path("smaller").touch()
    resume("--trainer.micro_batch_tokens", "64", "--trainer.gradient_checkpointing", "true")
    assert json.loads(Path("out/config.json").read_text())["trainer"]["micro_batch_tokens"] == 64


def test_an_engine_out_of_memory_goes_on_with_a_smaller_cache(refused: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    step = EngineCore.step

    def short_of_memory(core: EngineCore) -> object:
        if not Path("smaller").exists():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(core)

    monkeypatch.setattr(EngineCore, "step", short_of_memory)
    told = refused(*BEGUN)
    assert "lower engine.kv_cache_bytes, engine.prefill_chunk_tokens or engine.max_running" in told
    Path("smaller").touch()
    smaller = ("--engine.kv_cache_bytes", "2097152", "--engine.prefill_chunk_tokens", "64", "--engine.max_running", "4")
    resume(*smaller)


def test_a_cache_that_is_too_small_says_how_large_it_must_be(refused: Say) -> None:
    told = refused(*BEGUN, "--engine.kv_cache_bytes", "3000")
    least = told.split("raise it to ")[1].split()[0].rstrip(",")
    resume("--engine.kv_cache_bytes", least, argv=BEGUN)


@pytest.mark.usefixtures("begun")
def test_a_setting_that_a_resume_could_not_work_with_is_not_kept(refused: Say) -> None:
    assert "cannot be used" in refused(*RESUMED, "--trainer.device", "cuda:99")
    other = Path("letters.jsonl").read_text().replace("a", "b")
    Path("other.jsonl").write_text(other)
    refused(*RESUMED, "--tasks.train.0.path", "other.jsonl")
    resume()


def test_a_run_whose_rewards_were_late_goes_on_with_more_patience(refused: Say) -> None:
    slow = "import asyncio, os\nasync def slow(prompts, completions, answer, **columns):\n"
    slow += (
        '    await asyncio.sleep(0 if os.path.exists("quick") else 30)\n    return [0.5 + len(completions[0]) % 2]\n'
    )
    Path("slow_reward.py").write_text(slow)
    function = ("--tasks.train.0.reward.function", "slow_reward:slow")
    told = refused(*BEGUN, *function, "--tasks.train.0.reward.timeout_s", "0.2")
    assert "all failed" in told and "timed out after 0.2 s (reward.timeout_s)" in told
    Path("quick").touch()
    resume("--rollout.stall_timeout_s", "60", "--tasks.train.0.reward.timeout_s", "30")


@pytest.mark.usefixtures("begun")
def test_a_model_and_a_dataset_that_were_moved_are_named_anew(refused: Say) -> None:
    Path("elsewhere").mkdir()
    shutil.copytree("model", "elsewhere/model")
    Path("model").unlink()
    Path("letters.jsonl").rename("elsewhere/letters.jsonl")
    for dry in ([], ["--dry-run"]):
        told = refused(*RESUMED, *dry)
        assert "a dataset of this run is missing" in told and "give its new path on --resume" in told
    told = refused(*RESUMED, "--tasks.train.0.path", "elsewhere/letters.jsonl")
    assert "model 'model' is not a folder here" in told and "or give a local folder (--model.path)" in told
    moved = ("--model.path", "elsewhere/model", "--tasks.train.0.path", "elsewhere/letters.jsonl")
    resume(*moved)


@pytest.mark.usefixtures("begun")
def test_a_model_with_another_tokenizer_is_no_model_that_was_moved(refused: Say) -> None:
    other = Path(shutil.copytree("model", "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps({**tokenizer, "truncation": None, "padding": None}))
    for dry in ([], ["--dry-run"]):
        told = refused(*RESUMED, "--model.path", "other", *dry)
        assert "other is not the model that the run started from: tokenizer.json is different" in told
    resume("--model.path", "model")


@pytest.mark.parametrize("kl_coef", ["0", "0.01"])
def test_a_resume_accepts_other_weights_unless_they_are_the_reference(refused: Say, kl_coef: str) -> None:
    """A checkpoint can then stand for a model that is gone; the reference of a KL term cannot be replaced."""
    assert cli.main([*BEGUN, "--steps", "2", "--algorithm.kl_coef", kl_coef]) == 0
    argv = ("--model.path", "out/checkpoints/step_2", "--steps", "4", "--checkpoint.keep_last", "1")
    ends = [Path(folder, "generation_config.json").read_bytes() for folder in ("model", "out/checkpoints/step_2")]
    assert ends[0] != ends[1], "a checkpoint states the ends of the run"
    if kl_coef == "0":
        resume(*argv)
        assert {path.name for path in Path("out/checkpoints").iterdir()} == {"step_2", "step_4"}
        resume()
    else:
        told = refused(*RESUMED, *argv)
        assert "step_2 is not the model that the run started from: its weights are different" in told


@pytest.mark.usefixtures("begun")
def test_a_device_that_is_gone_is_replaced(refused: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(Path("out/config.json").read_text())
    config["trainer"]["device"] = config["engine"]["device"] = "cuda:7"
    Path("out/config.json").write_text(json.dumps(config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "trainer.device 'cuda:7' cannot be used" in refused(*RESUMED)
    told = refused(*RESUMED, "--trainer.device", "cpu")
    assert "device = 'cuda:7', but PyTorch sees no GPU; use 'cpu'" in told
    resume("--trainer.device", "cpu", "--engine.device", "cpu")


@pytest.mark.usefixtures("begun")
def test_a_damaged_checkpoint_is_done_without(refused: Say) -> None:
    resume()
    weights = Path("out/checkpoints/step_4/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 4
    weights.write_bytes(content)
    told = refused(*RESUMED)
    assert f"{weights} is damaged" in told and "delete out/checkpoints/step_4 to resume from step_2" in told
    kept = shutil.copytree("out/checkpoints/step_2", "kept")
    shutil.rmtree("out/checkpoints/step_4")
    resume("--checkpoint.keep_last", "1")
    shutil.move(kept, "out/checkpoints/step_2")  # as the best one is kept, without its batches
    weights.write_bytes(content)
    advice = "or start a new run with --model.path out/checkpoints/step_2\n"
    for argv in (RESUMED, exported := ("export", "out", "to")):
        told = refused(*argv)
        assert f"{weights} is damaged" in told and "to resume" not in told and advice in f"{told}\n"
    Path("out/journal.sqlite").unlink()
    told = refused(*exported)
    assert f"{weights} is damaged" in told and "to resume" not in told and advice in f"{told}\n"
