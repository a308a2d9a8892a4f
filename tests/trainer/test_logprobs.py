from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rollover.trainer.logprobs as logprobs_module
from rollover.trainer.logprobs import all_logprobs, is_measured, response_logprobs
from rollover.trainer.models import open_model
from rollover.trainer.packing import TrainingSample, pack
from tests.trainer.builders import (
    assert_gradients,
    make_folder,
    make_model,
    make_samples,
    separate_logits,
    separate_logprobs,
    to_float64,
)


def packed(model: Any, samples: list[TrainingSample], temperature: float, *, budget: int = 100) -> torch.Tensor:
    rows = pack(samples, budget)
    return all_logprobs(model, rows, temperature, num_tokens=sum(len(s.response_ids) for s in samples))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_logprobs_equal_those_of_separate_forwards(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(family, tie_word_embeddings=tied)
    policy = open_model(make_folder(tmp_path, family, tie_word_embeddings=tied))
    samples = make_samples(24)
    for temperature in (1.0, 0.6):
        with torch.no_grad():
            expected = separate_logprobs(model, samples, temperature)
        assert expected.std() > 1  # peaked distributions: a wrong mask would show
        torch.testing.assert_close(packed(policy, samples, temperature), expected, atol=1e-5, rtol=1e-5)


def test_logprobs_do_not_depend_on_the_packing(tmp_path: Path) -> None:
    policy = to_float64(open_model(make_folder(tmp_path)))
    samples = make_samples(24)
    alone = packed(policy, samples, 0.8, budget=1)
    for budget in (40, 10**6):
        torch.testing.assert_close(packed(policy, samples, 0.8, budget=budget), alone, atol=1e-12, rtol=0)


def test_gradients_through_a_packed_row_equal_those_of_separate_forwards(tmp_path: Path) -> None:
    model, policy = to_float64(make_model()), to_float64(open_model(make_folder(tmp_path)))
    samples = make_samples(12)
    weights = torch.randn(sum(len(s.response_ids) for s in samples), dtype=torch.float64)
    expected = separate_logprobs(model, samples, 0.8)
    assert_gradients(policy, model, expected, samples, weights, 0.8, atol=1e-12, rtol=1e-10)


def test_a_head_in_chunks_gives_the_same_values_and_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = to_float64(open_model(make_folder(tmp_path)))
    row = pack(make_samples(12), 10**6)[0]

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        policy.zero_grad()
        values = response_logprobs(policy, row, 0.8)
        (values**2).sum().backward()
        return values.detach(), [p.grad.clone() for p in policy.parameters()]

    whole, whole_gradients = run()
    monkeypatch.setattr(logprobs_module, "LOGITS_PER_CHUNK", 40 * 7)
    parts, parts_gradients = run()
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(parts_gradients, whole_gradients, atol=1e-10, rtol=1e-10)


def test_entropies_are_of_the_whole_vocabulary_at_some_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy = make_model(), open_model(make_folder(tmp_path))
    samples = make_samples(12)
    monkeypatch.setattr(logprobs_module, "_ENOUGH", 20)
    monkeypatch.setattr(logprobs_module, "LOGITS_PER_CHUNK", 40 * 7)
    measured_2T = torch.full((2, sum(len(s.response_ids) for s in samples)), torch.nan, dtype=torch.float64)
    entropy_T, mass_T = measured_2T
    for row in pack(samples, 70):
        response_logprobs(policy, row, 0.8, measured_2T=measured_2T).sum().backward()
    with torch.no_grad():
        logits_TV = torch.cat([separate_logits(model, sample) for sample in samples])
    expected_T = torch.distributions.Categorical(logits=logits_TV / 0.8).entropy().double()
    measured_T = is_measured(torch.arange(len(entropy_T)), len(entropy_T))
    assert len(entropy_T) > 3 * measured_T.sum() > 30 and torch.equal(~entropy_T.isnan(), measured_T)
    torch.testing.assert_close(entropy_T[measured_T], expected_T[measured_T], atol=1e-5, rtol=1e-5)
    assert (mass_T[measured_T] == 1).all()


@pytest.mark.parametrize("length", [2, 3, 8, 32, 233, 256])
def test_entropies_are_measured_at_every_place_of_responses_alike(length: int) -> None:
    for num_tokens, share, within in ((length * 2**13, 1 / 32, 0.01), (length, 1.0, 0.0)):
        measured_T = is_measured(torch.arange(num_tokens), num_tokens)
        by_place = measured_T.view(-1, length).double().mean(0)
        torch.testing.assert_close(by_place, torch.full_like(by_place, share), rtol=0, atol=within)


def test_logits_are_made_at_predicting_positions_alone(tmp_path: Path) -> None:
    policy = open_model(make_folder(tmp_path))
    samples = [TrainingSample(prompt_ids=(3,) * 50, response_ids=(4, 5))]
    seen = []
    policy.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[1:])))
    packed(policy, samples, 1.0)
    assert seen == [(2, 40)]


def test_bfloat16_autocast_keeps_the_log_softmax_in_float32(tmp_path: Path) -> None:
    policy = open_model(make_folder(tmp_path))
    row = pack(make_samples(12), 10**6)[0]
    with torch.no_grad():
        exact = response_logprobs(policy, row, 1.0)
        rounded = response_logprobs(policy, row, 1.0, autocast=True)
    assert rounded.dtype == torch.float32 and (rounded != rounded.bfloat16().float()).any()
    difference = (rounded - exact).abs()
    assert difference.max() > 1e-4 and difference.mean() < 0.1  # bfloat16 was used, and is near


def test_a_model_for_packed_rows_refuses_an_ordinary_batch(tmp_path: Path) -> None:
    policy = open_model(make_folder(tmp_path))
    with pytest.raises(TypeError, match="packed_row"):
        policy(input_ids=torch.tensor([[1, 2, 3]]))
