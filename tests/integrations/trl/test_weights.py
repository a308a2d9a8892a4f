"""Weights of a model in training reach the engine by the names and with the values of the model without adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollover.errors import ModelError, RunError
from rollover.hf.weights import read_weight_infos
from rollover.integrations.trl.weights import model_folder, next_logits, policy_source
from tests.integrations.trl.kit import journaled, logged, trainer
from tests.trainer.test_experts import make_experts

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and peft's own

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def adapted(model: Path, **changes: Any) -> Any:
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**(LORA | changes)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return made


def test_adapters_are_merged_and_the_model_stays_as_it_is(tiny_model: Path) -> None:
    model = adapted(tiny_model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    published = dict(policy_source(model, 3).tensors())
    merged = copy.deepcopy(model).merge_and_unload()
    assert published.keys() == dict(merged.named_parameters()).keys()
    for name, expected in merged.named_parameters():
        torch.testing.assert_close(published[name], expected.detach(), rtol=0, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    differing = {name for name, tensor in published.items() if not torch.equal(tensor, plain[name])}
    assert {name.rsplit(".", 2)[1] for name in differing} == {"q_proj", "down_proj"}


def test_adapters_beside_experts_leave_them_under_the_names_of_the_hub(tmp_path: Path) -> None:
    make_experts(tmp_path)
    model = adapted(tmp_path, target_modules=["q_proj"])
    published, plain = dict(policy_source(model, 0).tensors()), load_file(tmp_path / "model.safetensors")
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert published.keys() == plain.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, merged[name].detach() if "q_proj" in name else plain[name])


@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"modules_to_save": ["norm"]}, {"target_modules": ["embed_tokens"]}]
)
def test_adapters_of_other_kinds_are_refused(tiny_model: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="cannot be merged"):
        policy_source(adapted(tiny_model, **changes), 0)


def test_weights_without_adapters_are_the_models_own(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    published = dict(policy_source(model, 0).tensors())
    assert all(published[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())


def test_experts_leave_under_the_names_of_the_hub(tmp_path: Path) -> None:
    model = make_experts(tmp_path)
    published = dict(policy_source(model, 0).tensors())
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj
    half = gate_up.shape[1] // 2
    assert torch.equal(published["model.layers.1.mlp.experts.3.gate_proj.weight"], gate_up[3, :half])
    assert torch.equal(published["model.layers.1.mlp.experts.3.up_proj.weight"], gate_up[3, half:])
    assert published.keys() == read_weight_infos(tmp_path).keys()


def test_a_model_of_no_folder_is_written_for_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model_folder(loaded, None, tmp_path / "m", is_untrained=True) == tiny_model
    made = AutoModelForCausalLM.from_config(loaded.config)
    made.config._name_or_path = ""
    from transformers import AutoTokenizer

    folder = model_folder(made, AutoTokenizer.from_pretrained(tiny_model), tmp_path / "m", is_untrained=True)
    again = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert all(torch.equal(again[name], p) for name, p in made.named_parameters())
    assert model_folder(made, None, folder, is_untrained=True) == folder
    with torch.no_grad():
        made.model.norm.weight[0] += 1
    assert model_folder(made, None, folder, is_untrained=False) == folder
    with pytest.raises(RunError, match=r"this run began with another model .* by calling transformers\.set_seed"):
        model_folder(made, None, folder, is_untrained=True)


def test_the_next_logits_are_those_of_evaluation(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).train()
    found = next_logits(model, [(3, 4, 5), (6,)])
    expected = model.eval()(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1]
    assert torch.equal(torch.tensor(found[0]), expected.detach())
    assert found.shape == (2, model.config.vocab_size)


def test_a_run_with_adapters_samples_from_the_merged_model(tiny_model: Path, tmp_path: Path) -> None:
    trained = trainer(tiny_model, tmp_path, peft_config=LoraConfig(**LORA), max_steps=4, learning_rate=0.05)
    trained.train()
    assert len(journaled(tmp_path)) == 4
    changed = [p for name, p in trained.model.named_parameters() if "lora_B" in name]
    assert max(float(p.detach().abs().max()) for p in changed) > 0.01, "nothing was learned, so nothing is shown"
    ratios = []
    for seen in trained.seen[1:]:
        for row, fresh in zip(seen.output["importance_sampling_ratio"].tolist(), seen.answers.fresh, strict=True):
            ratios += [ratio for ratio, is_fresh in zip(row, fresh, strict=False) if is_fresh]
    assert len(ratios) > 100
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3
    assert logged(trained, "loss")
