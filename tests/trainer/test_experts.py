"""Mixtures of experts: their names on the hub, their buffers, and training that is exact against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollover.trainer.hub_names import hub_weights, named_tensors
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.models import load_policy, named_weights, save_model
from rollover.trainer.packing import pack
from rollover.trainer.proof import prove
from rollover.weights.base import specs_of
from rollover.weights.sources import MemoryWeights
from tests.trainer.builders import make_samples, separate_logprobs
from tests.trainer.test_families import config_of

LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EIGHT, "moe_intermediate_size": 16},
    "qwen2_moe": {**EIGHT, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4},
    "olmoe": EIGHT,
    "flex_olmo": EIGHT,
    "deepseek_v3": {**LATENT, **ROUTED, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "glm4_moe": ROUTED,
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "hunyuan_v1_moe": {"num_experts": 4},
}


def make_experts(folder: Path, family: str = "qwen3_moe", **changes: Any) -> Any:
    """Write a model with peaked routers, as transformers does, and return it."""
    torch.manual_seed(0)
    config = config_of(family, **{"initializer_range": 0.3, **FAMILIES[family], **changes})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, buffer in model.state_dict().items():
        if name.endswith("correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_packed_exactly_and_saved_as_transformers_does(family: str, tmp_path: Path) -> None:
    prove(config_of(family, **FAMILIES[family]))
    make_experts(tmp_path / "theirs", family)
    policy = load_policy(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_model(policy, tmp_path / "ours", companions={})
    theirs, ours = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    again = named_tensors(load_policy(tmp_path / "ours"))
    assert all(torch.equal(again[name], tensor) for name, tensor in named_tensors(policy).items())


def test_gradients_are_those_of_separate_samples(tmp_path: Path) -> None:
    model = make_experts(tmp_path)
    policy, samples = load_policy(tmp_path), make_samples(6)
    separate_logprobs(model, samples, 1.0).sum().backward()
    for row in pack(samples, 64):
        response_logprobs(policy, row, 1.0).sum().backward()
    expected = dict(model.named_parameters())
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-4)


def test_published_weights_follow_the_model_and_are_announced_unmade(tmp_path: Path) -> None:
    make_experts(tmp_path)
    policy = load_policy(tmp_path)
    weights, made = named_weights(policy), load_file(tmp_path / "model.safetensors")
    specs = {spec.name: (spec.shape, spec.dtype) for spec in MemoryWeights(7, weights).manifest.tensors}
    assert specs == {name: (tuple(tensor.shape), "float32") for name, tensor in made.items()}
    with torch.no_grad():
        policy.model.layers[1].mlp.experts.down_proj[3] += 1
    changed = {name for name, tensor in named_weights(policy).items() if not torch.equal(tensor, made[name])}
    assert changed == {"model.layers.1.mlp.experts.3.down_proj.weight"}


def test_one_tensor_is_cut_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_experts(tmp_path)
    weights, cuts = named_weights(load_policy(tmp_path)), []
    real = hub_weights.__globals__["revert_weight_conversion"]
    monkeypatch.setitem(
        hub_weights.__globals__, "revert_weight_conversion", lambda *args: cuts.append(1) or real(*args)
    )
    assert len(specs_of(weights)) == len(dict(weights.items())) == 69
    assert len(cuts) == 4
