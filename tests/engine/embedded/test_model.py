"""The decoder computes what transformers computes, and refuses what it would compute wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollover.errors import EngineError, ModelError
from rollover.hf.architecture import Architecture
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import request
from tests.engine.embedded.harness import BOTH, core_of, run
from tests.engine.models import FAMILIES, greedy, saved, tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases and one head group": ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama with scaled rotary frequencies": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2 with linear rotary scaling": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
}
MODELS |= FAMILIES
PROMPTS = [tuple(range(1, n)) for n in (2, 5, 6, 20, 41)]


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_their_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    model = tiny_model(kind, **config)
    core = core_of(saved(model, tmp_path), prefill_chunk_tokens=16)
    prompts = [*PROMPTS, PROMPTS[-1]]
    asked = [request(str(i), prompt_ids=p, max_new_tokens=40, temperature=0.0) for i, p in enumerate(prompts)]
    calls = run(core, *asked)
    for req in asked:
        assert calls.tokens(req.request_id) == greedy(model, req.prompt_ids, 40)
    calls.assert_logprobs_of(model, *asked, within=1e-4)


@BOTH
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_logprobs_are_the_log_softmax_of_logits_over_temperature(temperature: float, tmp_path: Path) -> None:
    model = tiny_model(sharpness=2.0)
    asked = request("a", max_new_tokens=60, temperature=temperature)
    calls = run(core_of(saved(model, tmp_path)), asked)
    calls.assert_logprobs_of(model, asked, within=1e-4)
    assert len(set(calls.tokens("a#0"))) > 5


@BOTH
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = tiny_model(sharpness=1.0)
    asked = request("a", max_new_tokens=30)
    run(core_of(saved(model, tmp_path), dtype="bfloat16"), asked).assert_logprobs_of(model, asked, within=0.1)


def continuations(folder: Path) -> None:
    """The embedded engine's tokens and log-probs, against transformers' reading of the same folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    core = core_of(folder, kv_cache_bytes=2**24)
    asked = [request(str(i), prompt_ids=p, max_new_tokens=20) for i, p in enumerate(PROMPTS)]
    run(core, *asked).assert_logprobs_of(model, *asked, within=1e-4)


@BOTH
@pytest.mark.parametrize("own", ["another", "the same", "alone"])
def test_matrices_are_tied_where_transformers_ties_them(own: str, tmp_path: Path) -> None:
    """A config that ties them beside an output matrix that is another, is the same, or is the only one there."""
    folder = saved(tiny_model(tie_word_embeddings=True), tmp_path)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.flip(0) if own == "another" else embedding.clone()
    if own == "alone":
        del weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    continuations(folder)


def test_weights_with_two_matrices_do_not_fit_a_model_that_has_one(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    core = core_of(saved(model, tmp_path))
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    core.load(1, MemoryWeights(1, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    with pytest.raises(EngineError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        core.load(2, MemoryWeights(2, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].flip(0)}))


@pytest.mark.parametrize(
    ("kind", "shape", "change"),
    [
        ("qwen3", {"head_dim": 128}, {"head_dim": ...}),
        ("qwen3", {"num_attention_heads": 32, "num_key_value_heads": 32}, {"num_key_value_heads": ...}),
        ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4}, {"num_key_value_heads": None}),
        ("llama", {}, {"architectures": ..., "quantization_config": None, "rope_parameters": {"rope_theta": 777.0}}),
        ("qwen3", {}, {"rope_parameters": ..., "rope_theta": 500.0}),
        (
            "qwen3",
            {},
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
                "rope_scaling": {"type": "linear", "factor": 3.0},
            },
        ),
        ("llama", {}, {"rope_parameters": {k: v for k, v in LLAMA3.items() if not k.startswith("original")}}),
        ("llama", {}, {"rope_parameters": LLAMA3, "original_max_position_embeddings": 64}),
    ],
)
def test_missing_or_doubled_config_keys_mean_what_transformers_reads(
    kind: str, shape: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tiny_model(kind, **shape), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    continuations(folder)


def test_weights_come_from_sharded_and_from_single_files_alike(tmp_path: Path) -> None:
    model = tiny_model()
    one, many = saved(model, tmp_path / "one"), saved(model, tmp_path / "many", max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    req = request("a", max_new_tokens=30)
    assert run(core_of(one), req).tokens("a#0") == run(core_of(many), req).tokens("a#0")


def test_a_weight_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    for broken, message in (
        ({k: v for k, v in weights.items() if k != "model.norm.weight"}, "missing.*model.norm.weight"),
        (weights | {"model.extra": torch.zeros(1)}, "unknown.*model.extra"),
        (weights | {"model.norm.weight": torch.zeros(3)}, r"model.norm.weight.*\[3\].*\[32\]"),
    ):
        save_file(broken, folder / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            core_of(folder)
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match="is not a safetensors file"):
        core_of(folder)


@BOTH
def test_a_refused_load_changes_no_weight(tmp_path: Path) -> None:
    model = tiny_model()
    core = core_of(saved(model, tmp_path))
    before = run(core, request("a", max_new_tokens=30)).tokens("a#0")
    other = tiny_model(seed=1).state_dict()
    del other["model.norm.weight"]
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        core.load(1, MemoryWeights(1, other))
    assert core.policy_version == 0
    assert run(core, request("b", max_new_tokens=30)).tokens("b#0") == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2' is not supported by the embedded engine"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification.*Qwen3ForCausalLM"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "from layer to layer"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope.*yarn"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
        ({"quantization_config": {}}, "quantised"),
    ],
)
def test_mathematics_that_is_not_implemented_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        Architecture.from_folder(folder)


def test_what_is_not_a_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        core_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        core_of(tmp_path)
