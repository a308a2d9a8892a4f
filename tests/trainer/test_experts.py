"""Mixtures of experts: their names on the hub, their buffers, and training that is exact against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollover.errors import ConfigError
from rollover.trainer.checks import SHARDED, check_suits
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.hub_names import hub_weights, named_tensors
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.memory import training_memory
from rollover.trainer.models import named_weights, open_model, save_model
from rollover.trainer.packing import pack
from rollover.trainer.proof import prove
from rollover.trainer.sharded import open_sharded
from rollover.trainer.world import World
from rollover.weights.base import specs_of
from rollover.weights.sources import MemoryWeights
from tests.trainer.builders import (
    assert_gradients_of_separate_samples,
    assert_same,
    make_batch,
    make_samples,
    make_trainer,
    trained,
)
from tests.trainer.rank_pool import RankPool
from tests.trainer.test_families import config_of
from tests.trainer.test_sharded import BUDGET, assert_alike_on, train

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

SHARDED_FAMILIES = [family for family in FAMILIES if family in SHARDED]


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
    assert prove(config_of(family, **FAMILIES[family])) == "packed"
    make_experts(tmp_path / "theirs", family)
    policy = open_model(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_model(policy, tmp_path / "ours", companions={})
    theirs, ours = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert_same(ours, theirs)
    assert_same(named_tensors(open_model(tmp_path / "ours")), named_tensors(policy))


def test_a_bias_that_only_chooses_experts_has_no_moments_and_resumes(tmp_path: Path) -> None:
    make_experts(tmp_path / "model", "ernie4_5_moe")
    trainer = trained(tmp_path / "model")
    trainer.save(tmp_path / "step_1")
    resumed = make_trainer(tmp_path / "model", resume_from=tmp_path / "step_1")
    for each in (trainer, resumed):
        each.step(make_batch(step=1))
    assert_same(trainer.weights(), resumed.weights())


def test_gradients_are_those_of_separate_samples(tmp_path: Path) -> None:
    model = make_experts(tmp_path)
    assert_gradients_of_separate_samples(open_model(tmp_path), model, make_samples(6))


def test_published_weights_follow_the_model_and_are_announced_unmade(tmp_path: Path) -> None:
    make_experts(tmp_path)
    policy = open_model(tmp_path)
    weights, made = named_weights(policy), load_file(tmp_path / "model.safetensors")
    specs = {spec.name: (spec.shape, spec.dtype) for spec in MemoryWeights(7, weights).manifest.tensors}
    assert specs == {name: (tuple(tensor.shape), "float32") for name, tensor in made.items()}
    with torch.no_grad():
        policy.model.layers[1].mlp.experts.down_proj[3] += 1
    changed = {name for name, tensor in named_weights(policy).items() if not torch.equal(tensor, made[name])}
    assert changed == {"model.layers.1.mlp.experts.3.down_proj.weight"}


def test_one_tensor_is_cut_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_experts(tmp_path)
    weights, cuts = named_weights(open_model(tmp_path)), []
    real = hub_weights.__globals__["revert_weight_conversion"]
    monkeypatch.setitem(
        hub_weights.__globals__, "revert_weight_conversion", lambda *args: cuts.append(1) or real(*args)
    )
    assert len(specs_of(weights)) == len(dict(weights.items())) == 69
    assert len(cuts) == 4


@pytest.mark.parametrize("family", SHARDED_FAMILIES)
def test_ranks_train_and_save_what_one_process_does(three: RankPool, family: str, tmp_path: Path) -> None:
    """Three ranks do not divide eight experts."""
    make_experts(tmp_path, family)
    given = [make_batch(step=step, num_groups=5) for step in range(2)]
    assert_alike_on(three, folder=tmp_path, given=given, algorithm="dapo", micro_batch_tokens=BUDGET)


def parts(world: World, *, folder: Path) -> int:
    return len(open_sharded(folder, TrainerConfig(device="cpu", num_devices=2), world).hf.state_dict())


def test_ranks_leave_out_layers_that_predict_further_tokens(two: RankPool, tmp_path: Path) -> None:
    """As one process does, by the model's own list."""
    model = make_experts(tmp_path, "glm4_moe")
    path = tmp_path / "model.safetensors"
    save_file(
        {**load_file(path), "model.layers.46.eh_proj.weight": torch.ones(32, 64)}, path, metadata={"format": "pt"}
    )
    open_model(tmp_path)
    assert two.call(parts, folder=tmp_path) == [len(model.state_dict())] * 2


def test_ranks_share_rows_of_heads_that_have_other_sizes_for_values(two: RankPool, tmp_path: Path) -> None:
    make_experts(tmp_path, "deepseek_v3")
    settings = {"folder": tmp_path, "given": [make_batch(num_groups=5)], "micro_batch_tokens": BUDGET}
    assert_alike_on(two, devices={"num_devices": 2, "context_parallel": 2}, algorithm="dapo", **settings)


def test_ranks_train_adapters_as_one_process_does_and_publish_them_merged(two: RankPool, tmp_path: Path) -> None:
    make_experts(tmp_path)
    given = [make_batch(step=step, num_groups=5) for step in range(2)]
    lora = LoraConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    settings = {"lora": lora, "learning_rate": 1e-2, "micro_batch_tokens": BUDGET}
    alone = assert_alike_on(two, weights=5e-6, folder=tmp_path, given=given, **settings)
    before = load_file(tmp_path / "model.safetensors")
    assert alone.weights.keys() == before.keys()
    moved = {name for name, tensor in alone.weights.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.split(".")[-2] in lora.targets}


def test_adapters_beside_experts_are_refused_by_name() -> None:
    model = config_of("qwen3_moe", **FAMILIES["qwen3_moe"]).to_dict()
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: .* its attention alone: set it to \['q_proj',"):
        check_suits(TrainerConfig(lora=LoraConfig()), model)


def test_bfloat16_reaches_experts_and_leaves_routers_in_float32(two: RankPool, tmp_path: Path) -> None:
    make_experts(tmp_path)
    policy, seen = open_model(tmp_path), {}
    layer = policy.model.layers[0].mlp

    def note(name: str) -> Any:
        return lambda module, given, output: seen.update({name: output[0].dtype})

    layer.gate.register_forward_hook(note("router"))
    layer.experts.act_fn.register_forward_hook(lambda module, given, output: seen.update({"experts": output.dtype}))
    (row,) = pack(make_samples(6), 1000)
    response_logprobs(policy, row, 1.0, autocast=True).sum().backward()
    assert seen == {"router": torch.float32, "experts": torch.bfloat16}
    assert layer.experts.down_proj.grad.dtype == torch.float32
    given = {"folder": tmp_path, "given": [make_batch(num_groups=5)]}
    exact = train(None, **given).metrics[0]["grad_norm"]
    halves = [two.call(train, **given, dtype="bfloat16")[0], train(None, **given, dtype="bfloat16")]
    assert [half.metrics[0]["grad_norm"] for half in halves] == pytest.approx([exact] * 2, rel=0.05)


def test_memory_counts_experts_of_all_layers() -> None:
    config = config_of("deepseek_v3", **FAMILIES["deepseek_v3"], num_hidden_layers=6)
    found = training_memory(
        TrainerConfig(device="cpu"), config.to_dict(), max_prompt_tokens=1, max_response_tokens=9, batch_samples=4
    )
    config.first_k_dense_replace = 0
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
