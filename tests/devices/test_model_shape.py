"""Shapes of models: counts equal transformers', to the parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollover.devices import model_shape as model
from rollover.errors import ModelError
from tests.planner.kit import QWEN_7B

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
QWEN2_EXPERTS = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 56, **EXPERTS}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 without a head's width": {"model_type": "qwen3"},
    "qwen3 experts without a head's width": {"model_type": "qwen3_moe", **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2 experts": QWEN2_EXPERTS,
    "qwen2 every other": QWEN2_EXPERTS | {"decoder_sparse_step": 2},
    "qwen3 experts": {"model_type": "qwen3_moe", "head_dim": 16, "mlp_only_layers": [0], **EXPERTS},
    "deepseek v2": {"model_type": "deepseek_v2", **LATENT},
    "deepseek v2 lite": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None},
    "deepseek v3": {"model_type": "deepseek_v3", **LATENT},
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = SMALL | SHAPES[name]
    kind = keys["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in keys.items() if k != "model_type"})
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(config)
    shape = model.parse(keys, name=name)
    assert shape.parameters == sum(p.numel() for p in peer.parameters())
    routed = [p for n, p in peer.named_parameters() if ".experts." in n]
    assert shape.expert_parameters == sum(p.numel() for p in routed)
    visited = shape.expert_parameters * shape.experts_per_token // max(1, shape.num_experts)
    assert shape.active_parameters == shape.parameters - shape.expert_parameters + visited
    tied = keys.get("tie_word_embeddings", False)
    assert shape.embedding_parameters == (0 if tied else 128 * 64)


def test_a_config_that_transformers_has_written_is_the_same_model() -> None:
    from transformers import AutoConfig

    keys = SMALL | SHAPES["qwen3 experts"]
    again = AutoConfig.for_model(**keys).to_dict()
    assert "num_experts" not in again
    assert model.parse(again, name="again") == model.parse(keys, name="again")


def test_a_published_model_by_hand() -> None:
    """Qwen2.5-7B: 7,615,616,512 parameters, 28 layers of 2 x 4 x 128 cached scalars."""
    shape = model.parse(QWEN_7B, name="Qwen2.5-7B")
    assert shape.parameters == 7_615_616_512
    assert shape.kv_width == 1024
    assert shape.query_width == 3584
    assert shape.multiplied_parameters == 7_615_616_512 - 152064 * 3584


def test_latent_attention_caches_one_vector() -> None:
    shape = model.parse(SMALL | SHAPES["deepseek v3"], name="latent")
    assert shape.kv_width == 24 + 8
    assert shape.kv_heads == 1


def test_a_folder_and_a_file_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | SHAPES["qwen3"]))
    assert model.read_shape(tmp_path) == model.read_shape(tmp_path / "config.json")
    assert model.read_shape(tmp_path).name == tmp_path.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen33"}, "model_type 'qwen33' is not supported; did you mean 'qwen3'?"),
        ({"hidden_size": -1}, "hidden_size must be a whole number above zero, got -1"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number above zero, got None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window: sliding-window attention"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL | {"model_type": "qwen2"} | change))
    with pytest.raises(ModelError) as caught:
        model.read_shape(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize("scaling", ["yarn", {"rope_type": "linear", "factor": "4"}, {"rope_type": "llama3"}])
def test_a_rope_that_no_engine_of_ours_can_read_is_for_others(scaling: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(SMALL | {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": scaling})
    )
    assert model.read_shape(tmp_path).not_embedded


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such folder; give a folder with a config\.json, or a hub id"):
        model.read_shape("nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json; is it a Hugging Face model folder"):
        model.read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"is not a model config: it cannot be read"):
        model.read_shape(tmp_path)
