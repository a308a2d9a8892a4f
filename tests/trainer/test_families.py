"""Decoders of many families are packed exactly, or refused with the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollover.batch import Batch, Group
from rollover.errors import ConfigError, ModelError
from rollover.trainer import attention, logprobs
from rollover.trainer.checks import check_suits
from rollover.trainer.config import LoraConfig, SFTConfig, TrainerConfig
from rollover.trainer.models import named_weights, open_model
from rollover.trainer.packing import TrainingSample, pack
from rollover.trainer.proof import BOUND, prove
from rollover.trainer.setup import SFTSetup
from rollover.trainer.sft import SFTTrainer
from rollover.types import Prompt, SampleId
from tests.trainer.builders import (
    VOCAB,
    assert_gradients_of_separate_samples,
    make_samples,
    make_trainer,
    make_trajectory,
    separate_logprobs,
)

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "ministral", "phi", "phi3", "olmo", "olmo2", "olmo3", "smollm3"),
    *("glm", "glm4", "gemma", "gemma2", "gemma3_text", "granite", "cohere", "cohere2", "exaone4", "starcoder2"),
    *("nanochat", "gpt_neox", "helium", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "arcee", "vaultgemma"),
    *("opt", "gpt2"),
)
CONVOLVED = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
PADDED: dict[str, dict[str, Any]] = {"stablelm": {}, "nemotron": {}, "bloom": {"n_head": 4}, "lfm2": CONVOLVED}
REFUSED = ("bert",)


def config_of(family: str, **changes: Any) -> Any:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return AutoConfig.for_model(family, **(settings | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_packed_exactly(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.trainer.proof.MODEL_CLASSES", {})
    assert prove(config_of(family)) == "packed"


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_packed_is_refused(family: str) -> None:
    found = "log-probs of packed rows differ .* nats at .*, and log-probs of padded rows differ"
    with pytest.raises(ModelError, match=f"model_type '{family}' cannot be trained: {found}"):
        prove(config_of(family))


@pytest.mark.parametrize("family", PADDED)
def test_what_is_not_packed_exactly_is_padded(family: str, tmp_path: Path) -> None:
    """With the log-probs and gradients of separate samples, also of rows of several lengths."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(family, **PADDED[family])).eval()
    model.save_pretrained(tmp_path)
    policy, samples = open_model(tmp_path), make_samples(6)
    assert policy.is_padded
    alone = separate_logprobs(model, samples, 1.0).detach()
    with torch.no_grad():
        found = [(row.token_T, logprobs.response_logprobs(policy, row, 1.0)) for row in pack(samples, 64)]
    for token_T, logprobs_T in found:
        torch.testing.assert_close(logprobs_T, alone[token_T], atol=1e-4, rtol=1e-4)
    assert_gradients_of_separate_samples(policy, model, samples)


def test_passes_of_a_padded_model_are_within_their_budget(tmp_path: Path) -> None:
    """Siblings do not share their prompt there, in training and in a warm-up."""
    AutoModelForCausalLM.from_config(config_of("lfm2", **PADDED["lfm2"])).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    prompt, responses = (3,) * 60, [(4, 5, 6, 7, 8, i) for i in range(5)]
    trainer = make_trainer(tmp_path, micro_batch_tokens=140)
    warmup = SFTTrainer(SFTSetup(config=SFTConfig(micro_batch_tokens=140)), tmp_path, device="cpu")
    widths: list[int] = []
    for model in (trainer._model, warmup._policy.model):
        model.base_model.register_forward_pre_hook(
            lambda module, args, given: widths.append(given["input_ids"].numel()), with_kwargs=True
        )
    ids = Prompt(prompt_id="p", token_ids=prompt, text="", source="test")
    found = [make_trajectory(SampleId(0, i), ids, r, reward=i, version=0) for i, r in enumerate(responses)]
    trainer.step(Batch(step=0, groups=(Group(group_id=0, prompt=ids, trajectories=tuple(found)),)))
    warmup.step(0, [TrainingSample(prompt_ids=prompt, response_ids=r) for r in responses])
    assert widths == [130, 130, 65] * 2


@pytest.mark.parametrize(
    ("family", "fault"),
    [("mistral", "no window"), ("gemma2", "no soft cap"), ("gpt_neox", "no head"), ("granite", "bare head")],
)
def test_a_planted_fault_is_found(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "no window":
        monkeypatch.setattr(attention.PackedMask, "block", lambda self, length, query: None)
    elif fault == "no soft cap":
        monkeypatch.setattr(attention, "_USUAL", attention._USUAL | {"softcap"})
    elif fault == "no head":
        monkeypatch.setattr(
            logprobs.OutputHead, "__call__", lambda self, hidden_TD: hidden_TD @ hidden_TD.new_ones(32, 512)
        )
    else:
        monkeypatch.setattr(
            logprobs.OutputHead, "__call__", lambda self, hidden_TD: self._model.get_output_embeddings()(hidden_TD)
        )
    changes = {
        "granite": {"logits_scaling": 2.0},
        "mistral": {"sliding_window": 64},
        "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    }
    config = config_of(family, **changes.get(family, {}))
    if "head" not in fault:  # the model's own attention has no such fault
        assert prove(config) == "padded"
        return
    with pytest.raises(ModelError, match=r"packed rows differ .* nats at token .*, and log-probs of padded rows"):
        prove(config)


@pytest.mark.parametrize(("family", "changes"), [("mistral", {"sliding_window": 6}), ("gemma2", {"sliding_window": 6})])
def test_gradients_are_those_of_separate_samples(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation="eager")
    model.eval().save_pretrained(tmp_path)
    policy = open_model(tmp_path)
    assert_gradients_of_separate_samples(policy, model, make_samples(6))
    assert named_weights(policy).keys() <= dict(model.named_parameters()).keys()


def test_what_a_family_cannot_do_yet_is_said() -> None:
    model = config_of("mistral").to_dict()
    with pytest.raises(ConfigError, match=r"trainer\.num_devices is 2, and a model of type 'mistral' trains on one"):
        check_suits(TrainerConfig(num_devices=2), model)
    with pytest.raises(ConfigError, match="adapters of a model of type 'mistral' are not supported"):
        check_suits(TrainerConfig(lora=LoraConfig()), model)


def test_the_page_says_how_many_families_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "own-data.md").read_text()
    assert f"proves {len(FAMILIES)} families" in page


def test_the_bound_is_far_from_both_sides() -> None:
    assert 3e-4 < BOUND < 0.04
