from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rollover.errors import DataError
from rollover.trainer.config import SFTConfig
from rollover.trainer.models import load_policy
from rollover.trainer.sft import SFTProgress, run_sft
from tests.trainer.builders import make_folder, make_model, make_samples, separate_logprobs

EXAMPLES = [(s.prompt_ids, s.response_ids) for s in make_samples(8, max_response=12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "policy")


def config(**settings: object) -> SFTConfig:
    defaults = {"num_steps": 1, "batch_size": 8, "device": "cpu", "max_grad_norm": 0}
    return SFTConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def test_the_first_loss_and_gradient_are_those_of_transformers_with_prompts_masked(
    folder: Path, tmp_path: Path
) -> None:
    model = make_model()
    ids = [torch.tensor([[*p, *r]]) for p, r in EXAMPLES]
    total = sum(len(r) for _, r in EXAMPLES)
    loss = torch.zeros(())
    for x, (p, r) in zip(ids, EXAMPLES, strict=True):
        labels = x.clone()
        labels[0, : len(p)] = -100
        loss = loss + model(input_ids=x, labels=labels).loss * len(r) / total
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for budget in (1, 10**6):
        steps: list[SFTProgress] = []
        run_sft(
            folder,
            EXAMPLES,
            config(micro_batch_tokens=budget),
            output=tmp_path / "o",
            on_progress=steps.append,
        )
        assert steps[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert steps[0].grad_norm == pytest.approx(norm, rel=1e-4)


def test_it_learns_what_it_is_shown_and_saves_that(folder: Path, tmp_path: Path) -> None:
    metrics = run_sft(
        folder,
        itertools.cycle(EXAMPLES),
        config(num_steps=60, learning_rate=1e-2, schedule="cosine", warmup_steps=5),
        output=tmp_path / "warm",
    )
    assert metrics["loss/first"] > 3 and metrics["loss/last_20_steps"] < 0.3
    model = make_model()
    model.load_state_dict(load_policy(tmp_path / "warm").state_dict())
    with torch.no_grad():
        assert separate_logprobs(model, make_samples(8, max_response=12), 1.0).mean() > -0.3


def test_the_same_config_gives_the_same_model(folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        settings = config(num_steps=3, learning_rate=1e-3)
        run_sft(folder, itertools.cycle(EXAMPLES), settings, output=tmp_path / name, deterministic=True)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_progress_tells_each_step_once_with_its_tokens(folder: Path, tmp_path: Path) -> None:
    steps: list[SFTProgress] = []
    settings = config(num_steps=4, batch_size=2, schedule="linear", learning_rate=1e-3)
    run_sft(folder, EXAMPLES, settings, output=tmp_path / "o", on_progress=steps.append)
    assert [s.step for s in steps] == [0, 1, 2, 3]
    pairs = [EXAMPLES[i : i + 2] for i in range(0, 8, 2)]
    assert [s.num_tokens for s in steps] == [sum(len(r) for _, r in pair) for pair in pairs]
    assert [s.learning_rate for s in steps] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3, 0])


def test_too_few_examples_are_an_error_and_no_model_is_left(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ran out at step 1 of 2: lower sft\.num_steps"):
        run_sft(folder, EXAMPLES, config(num_steps=2, batch_size=5), output=tmp_path / "o")
    assert not (tmp_path / "o").exists()
