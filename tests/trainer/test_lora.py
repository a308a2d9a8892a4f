"""Adapters: what they compute, what is published of them, what a checkpoint holds; peft itself is the oracle."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.errors import ConfigError, ModelError
from rollover.hf.architecture import matrix_shapes
from rollover.hf.weights import read_weight_infos
from rollover.trainer.config import LoraConfig
from rollover.trainer.local import LocalTrainer
from rollover.trainer.lora import merge
from rollover.trainer.models import open_model
from rollover.types import AdapterShape
from rollover.weights.adapters import AdapterSource, AppliedAdapters
from rollover.weights.sources import FolderWeights
from tests.trainer import builders
from tests.trainer.builders import (
    assert_same,
    gradients,
    make_batch,
    make_folder,
    make_model,
    make_samples,
    make_trainer,
    separate_logprobs,
)

LORA = LoraConfig(rank=4, alpha=8.0)


def trained(folder: Path, steps: int = 3, **settings: Any) -> LocalTrainer:
    return builders.trained(folder, steps, **{"lora": LORA, "learning_rate": 1e-2, **settings})


lora_trainer = partial(trained, steps=0)


def test_training_begins_with_the_model_itself(folder: Path) -> None:
    published, expected = (trainer.weights() for trainer in (lora_trainer(folder), make_trainer(folder)))
    assert list(published) == list(expected)
    assert_same(published, expected)


def test_peft_brings_no_warning_of_kernels_that_no_adapter_uses() -> None:
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


def test_adapters_alone_are_published_where_the_config_says_so(folder: Path) -> None:
    """With the bytes of the merged weights in the end, and a fraction of them on the way."""
    settings = {"lora": LoraConfig(rank=4, alpha=8.0, publish="adapter")}
    source, whole = (trained(folder, **s).weight_source() for s in (settings, {}))
    assert isinstance(source, AdapterSource)
    assert source.manifest.version == 3
    assert source.shape == AdapterShape(rank=4, targets=LORA.targets)
    assert_same(dict(AppliedAdapters(FolderWeights(0, folder), source).tensors()), dict(whole.tensors()))


def test_how_adapters_are_published_is_not_what_is_learned(folder: Path, tmp_path: Path) -> None:
    trained(folder).save(tmp_path / "step_3")
    lora = LoraConfig(rank=4, alpha=8.0, publish="adapter")
    resumed = lora_trainer(folder, lora=lora, resume_from=tmp_path / "step_3")
    assert resumed.weight_source().manifest.kind == "adapter"
    with pytest.raises(ModelError, match=r"trainer\.lora"):
        lora_trainer(folder, lora=LoraConfig(rank=8, alpha=8.0), resume_from=tmp_path / "step_3")


def test_the_base_stays_and_every_adapted_matrix_moves(folder: Path) -> None:
    trainer = trained(folder)
    before, after = make_trainer(folder).weights(), trainer.weights()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.split(".")[-2] in LORA.targets}
    base = {n.replace(".base_layer", ""): p for n, p in trainer._model.named_parameters() if "lora_" not in n}
    assert_same(base, before)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft, of transformers
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_a_checkpoint_is_loaded_by_peft_and_merged_as_it_merges(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_folder(tmp_path / "model", family, tie_word_embeddings=tied)
    trainer = trained(folder)
    trainer.save(tmp_path / "step_3")
    peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "step_3")
    samples = make_samples(6)
    theirs = separate_logprobs(peft, samples, 0.8)
    merged = dict(peft.merge_and_unload().named_parameters())
    ours = trainer.weights()
    assert ours.keys() == merged.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name
    model = make_model(family, tie_word_embeddings=tied)
    model.load_state_dict(dict(ours), strict=False)
    assert torch.allclose(separate_logprobs(model, samples, 0.8), theirs, atol=1e-4)


def test_gradients_are_those_of_the_product(folder: Path) -> None:
    """With ``W' = W + s B A`` the chain rule gives ``dB = s G A'`` and ``dA = s B' G`` for the gradient ``G`` of the
    full matrix."""
    full = make_trainer(folder, learning_rate=1e-12, max_grad_norm=0.0)
    full.step(make_batch())
    trainer = lora_trainer(folder, learning_rate=1e-12, max_grad_norm=0.0)
    trainer.step(make_batch())
    parameters = dict(trainer._model.named_parameters())
    for name, gradient in gradients(full).items():
        path = name.removesuffix(".weight")
        if path.split(".")[-1] not in LORA.targets:
            continue
        a, b = parameters[f"{path}.lora_A.default.weight"], parameters[f"{path}.lora_B.default.weight"]
        assert b.grad is not None and a.grad is not None
        assert torch.allclose(b.grad, LORA.alpha / LORA.rank * gradient @ a.detach().T, atol=1e-6), name
        assert a.grad.abs().max() < 1e-6  # B is 0 before the first step


def test_the_reference_is_the_model_without_adapters(folder: Path) -> None:
    """No second model is loaded, and the penalty on the distance from it is 0 before the first step and not later."""
    algorithm = resolve(AlgorithmConfig(name="grpo", kl_coef=0.1))
    assert algorithm.needs_ref
    trainer = lora_trainer(folder, algorithm=algorithm)
    assert sum(p.numel() for p in trainer._model.parameters() if not p.requires_grad) == sum(
        p.numel() for p in open_model(folder).parameters()
    )
    metrics = [trainer.step(make_batch(step=step)).metrics for step in range(3)]
    full = make_trainer(folder, algorithm=algorithm, learning_rate=1e-12)
    assert metrics[0]["kl/ref"] == pytest.approx(0.0, abs=1e-7)
    assert metrics[2]["kl/ref"] > 1e-4
    assert metrics[0]["loss"] == pytest.approx(full.step(make_batch()).metrics["loss"], abs=1e-6)
    with trainer._policy.reference() as reference:
        prompts = [s.prompt_ids for s in make_samples(3)]
        assert reference is trainer._model
        without = trainer.next_logits(prompts)
    assert abs(without - make_trainer(folder).next_logits(prompts)).max() < 1e-5
    assert abs(trainer.next_logits(prompts) - without).max() > 1e-3


def test_a_checkpoint_holds_adapters_alone(folder: Path, tmp_path: Path) -> None:
    trained(folder).save(tmp_path / "step_3")
    files = {str(path.relative_to(tmp_path / "step_3")) for path in (tmp_path / "step_3").rglob("*") if path.is_file()}
    assert files == {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"),
        *("trainer.json", "trainer/optimizer.safetensors"),
    }
    settings = json.loads((tmp_path / "step_3" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == folder.name
    tensors = load_file(tmp_path / "step_3" / "adapter_model.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name for name in tensors)


def test_a_half_precision_base_stays_so_and_adapters_do_not(tmp_path: Path) -> None:
    model = make_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    trainer = trained(tmp_path / "half", dtype="bfloat16")
    formats = {p.requires_grad: p.dtype for p in trainer._model.parameters()}
    assert formats == {True: torch.float32, False: torch.bfloat16}
    assert {tensor.dtype for tensor in trainer.weights().values()} == {torch.bfloat16}
    before = lora_trainer(tmp_path / "half").weights()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(trainer.weights()[name], before[name])


def test_gradients_are_not_lost_beside_a_base_of_float16(tmp_path: Path) -> None:
    """They are those beside the same base in float32, however small the share of a token in the loss is."""
    found = []
    for name, model in (("half", make_model().half()), ("whole", make_model().half().float())):
        model.save_pretrained(tmp_path / name)
        settings = {"algorithm": "dr-grpo", "max_response_tokens": 10**7, "max_grad_norm": 0.0}
        trainer = trained(tmp_path / name, steps=1, learning_rate=1e-12, **settings)
        found.append({n: p.grad for n, p in trainer._model.named_parameters() if p.requires_grad})
    half, whole = found
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-12
    assert all(torch.allclose(half[name], whole[name], rtol=1e-2, atol=0) for name in whole)
    trained(tmp_path / "half").save(tmp_path / "step_3")
    merge(tmp_path / "step_3", tmp_path / "merged", base=tmp_path / "half")
    assert {info.dtype for info in read_weight_infos(tmp_path / "merged").values()} == {"float16"}


def test_merging_writes_the_published_weights_as_a_model_folder(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder)
    trainer.save(tmp_path / "step_3")
    merge(tmp_path / "step_3", tmp_path / "merged", base=folder)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same(dict(found.named_parameters()), trainer.weights())
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"


def test_targets_that_are_not_there_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets names 'qproj'.*q_proj, k_proj"):
        lora_trainer(folder, lora=LoraConfig(targets=("q_proj", "qproj")))


def test_a_rank_above_every_target_is_refused_with_the_largest_shape(folder: Path) -> None:
    trainer = lora_trainer(folder)
    shapes = {name.split(".")[-2]: tuple(tensor.shape) for name, tensor in trainer.weights().items()}
    small, large = (sorted(shapes[name]) for name in ("k_proj", "q_proj"))
    assert small[0] < large[0]
    lora_trainer(folder, lora=LoraConfig(rank=large[0], targets=("k_proj", "q_proj")))
    with pytest.raises(ConfigError, match=rf"rank is {large[0]}, but k_proj, .* is a matrix of .* at most {small[0]}:"):
        lora_trainer(folder, lora=LoraConfig(rank=large[0], targets=("k_proj",)))
    # The shapes are read from config.json, before there is a model.
    read = matrix_shapes(json.loads((folder / "config.json").read_text()))
    assert {name: shapes[name] for name in LORA.targets} == {name: read[name] for name in LORA.targets}


@pytest.mark.parametrize(
    ("key", "value"), [("rank", 0), ("alpha", 0.0), ("targets", ()), ("targets", ("q_proj", "q_proj"))]
)
def test_values_that_cannot_work_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        LoraConfig(**{key: value})  # type: ignore[arg-type]


def test_a_checkpoint_of_the_other_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    lora_trainer(folder).save(tmp_path / "adapters" / "step_0")
    make_trainer(folder).save(tmp_path / "full" / "step_0")
    with pytest.raises(ModelError, match=r"trainer\.lora"):
        make_trainer(folder, learning_rate=1e-2, resume_from=tmp_path / "adapters" / "step_0")
    with pytest.raises(ModelError, match=r"trainer\.lora"):
        lora_trainer(folder, learning_rate=1e-3, resume_from=tmp_path / "full" / "step_0")
