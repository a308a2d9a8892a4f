"""The estimate of a training step's memory against what processes really take, and laws that it keeps."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollover.trainer import memory
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.memory import TrainingMemory, training_memory
from tests.trainer.builders import make_model

WIDE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SHAPE_OF_WIDE = {key: value for key, value in WIDE.items() if key not in ("model_type", "head_dim")}
RESPONSE = 256
CONFIG = TrainerConfig(micro_batch_tokens=6 * RESPONSE, device="cpu", learning_rate=1e-4)


@functools.cache
def estimate(config: TrainerConfig, layers: int = 4, **changes: Any) -> TrainingMemory:
    given = {"max_prompt_tokens": 1, "max_response_tokens": RESPONSE, "batch_samples": 99, "base_dtype": torch.float32}
    return training_memory(config, {**WIDE, "num_hidden_layers": layers}, **{**given, **changes})


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_a_step_takes_its_estimated_memory_within_15_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond weights and optimizer, in the rank that takes most."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    benchmark = importlib.import_module("memory")
    way, model = "two devices, adapters, bfloat16", benchmark.model_of("small")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(tmp_path)
    sizes = {"max_prompt_tokens": 1, "max_response_tokens": benchmark.RESPONSE, "batch_samples": benchmark.SAMPLES}
    found = training_memory(benchmark.WAYS[way], model, base_dtype=torch.float32, **sizes)
    assert benchmark.measure(str(tmp_path), way) == pytest.approx(found.activations + found.gathered, rel=0.15)


def test_the_depth_of_a_family_has_a_name_of_its_own() -> None:
    shape = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 64, "model_type": "gpt2"}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    sizes = {"max_prompt_tokens": 8, "max_response_tokens": 8, "batch_samples": 4}
    found = training_memory(TrainerConfig(), shape, **sizes)
    assert found.num_parameters == sum(p.numel() for p in model.parameters())


def test_state_is_16_bytes_per_parameter_and_a_copy_for_a_reference() -> None:
    alone, compared = estimate(CONFIG), estimate(CONFIG, needs_ref=True)
    count = sum(p.numel() for p in make_model("qwen3", **SHAPE_OF_WIDE).parameters())
    assert alone.num_parameters == count
    assert alone.weights + alone.gradients + alone.optimizer == 16 * count
    assert (alone.reference, compared.reference) == (0, 4 * count)
    assert compared.total - alone.total == 4 * count


def test_adapters_are_float32_beside_a_base_in_its_own_format() -> None:
    config = replace(CONFIG, lora=LoraConfig(rank=8, targets=("q_proj", "down_proj")))
    found = estimate(config, needs_ref=True, base_dtype=torch.bfloat16)
    width, inner, layers = WIDE["hidden_size"], WIDE["intermediate_size"], WIDE["num_hidden_layers"]
    trained = layers * 8 * (width + width + inner + width)
    assert found.gradients == 4 * trained
    assert found.optimizer == 8 * trained
    assert found.weights == 2 * found.num_parameters + 4 * trained
    assert found.reference == 0


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_base_is_gathered_in_the_format_in_which_it_is_held(dtype: Any, base: torch.dtype) -> None:
    config = replace(CONFIG, dtype=dtype, lora=LoraConfig(rank=8, targets=("q_proj", "down_proj")))
    one, two = (estimate(replace(config, num_devices=n), base_dtype=base) for n in (1, 2))
    assert two.activations == one.activations
    assert (2 * two.weights, 2 * two.optimizer) == (one.weights, one.optimizer)
    layer = count(layers=2) - count(layers=1)
    adapters = one.gradients // (4 * WIDE["num_hidden_layers"])
    rest = count(layers=0)
    assert two.gathered == base.itemsize * (rest + 2 * layer) + 4 * 3 * adapters


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_weights_are_gathered_in_the_passes_format_and_summed_in_float32(dtype: Any, width: int) -> None:
    found = estimate(replace(CONFIG, dtype=dtype, num_devices=2))
    layer, rest = count(layers=2) - count(layers=1), count(layers=0)
    assert found.gathered == 2 * width * (rest + layer) + 4 * layer
    assert found.weights + found.gradients + found.optimizer == 16 * count(layers=4) // 2


@pytest.mark.parametrize("num", [1, 2])
def test_what_is_offloaded_is_counted_where_it_is(num: int) -> None:
    found = estimate(replace(CONFIG, offload=True, num_devices=num), needs_ref=True)
    layer, rest = count(layers=2) - count(layers=1), count(layers=0)
    assert found.offloaded == 20 * count(layers=4) // num
    assert found.total == found.activations + found.gathered
    assert found.gathered == 4 * (2 * rest + 2 * layer + layer) + 4 * max(rest, layer) // num


def test_full_training_of_seven_billion_parameters_fits_one_gpu() -> None:
    """The shape of Qwen2.5-7B, which takes 120 GiB with its weights on the GPU."""
    model = {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    config = TrainerConfig(device="cuda", dtype="bfloat16", gradient_checkpointing=True, offload=True)
    found = training_memory(config, model, max_prompt_tokens=1024, max_response_tokens=4096, batch_samples=256)
    assert found.offloaded == 16 * 7_615_616_512
    assert found.total / 2**30 == pytest.approx(15.6, abs=0.5)


def count(layers: int) -> int:
    """Return the number of parameters of a model of so many layers."""
    return estimate(CONFIG, layers=layers).num_parameters


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_two_and_three_layers_say_what_seven_take(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, **changes)
    carried_on = estimate(config, layers=7)
    monkeypatch.setattr(memory, "_TRACED_LAYERS", (7, 8))
    assert estimate.__wrapped__(config, layers=7) == carried_on


@pytest.mark.parametrize("layers", [2, 5])
def test_a_config_with_kinds_of_layers_is_traced_at_any_depth(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = estimate(TrainerConfig(), layers)
    monkeypatch.setitem(WIDE, "layer_types", ["full_attention"] * layers)
    assert estimate.__wrapped__(TrainerConfig(), layers) == plain


def test_recomputing_keeps_one_vector_per_token_and_layer() -> None:
    short = replace(CONFIG, gradient_checkpointing=True)
    long = replace(short, micro_batch_tokens=2 * short.micro_batch_tokens)
    assert estimate(long).activations == pytest.approx(2 * estimate(short).activations, rel=0.02)
    deeper = estimate(short, layers=5).activations - estimate(short, layers=4).activations
    tokens = short.micro_batch_tokens
    assert deeper == pytest.approx(4 * tokens * WIDE["hidden_size"], rel=0.01)


def test_a_long_sample_has_its_own_row_and_a_small_batch_fills_none() -> None:
    longest = estimate(CONFIG, max_prompt_tokens=1000, max_response_tokens=2000)
    assert longest.activations > 1.6 * estimate(CONFIG).activations
    assert estimate(CONFIG, batch_samples=1).activations < 0.2 * estimate(CONFIG).activations


def test_long_prompts_that_siblings_share_are_counted_for_each() -> None:
    """Attention gathers a prompt for each of its responses, though the row holds it once."""
    short = {"max_response_tokens": 64, "batch_samples": 8}
    alone, shared = (estimate(CONFIG, max_prompt_tokens=1024, group_size=n, **short) for n in (1, 8))
    assert shared.activations > 2 * alone.activations


def test_devices_that_share_a_row_divide_what_it_takes_and_nothing_else() -> None:
    whole = replace(CONFIG, num_devices=4)
    one, part = estimate(whole), estimate(replace(whole, context_parallel=4))
    assert part.activations == pytest.approx(one.activations / 4, rel=0.02)
    assert replace(part, activations=one.activations) == one
