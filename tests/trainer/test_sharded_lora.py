"""Several ranks train the adapters that one process trains, and write the same checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rollover.algorithms import Algorithm, AlgorithmConfig, resolve
from rollover.errors import ModelError
from rollover.trainer.checkpoint import read_manifest, verify_files
from rollover.trainer.config import LoraConfig
from rollover.trainer.local import LocalTrainer
from rollover.trainer.world import World
from rollover.weights.adapters import AdapterSource, AppliedAdapters
from rollover.weights.sources import FolderWeights
from tests.trainer import test_sharded as sharded
from tests.trainer.builders import assert_same, make_batch, make_model, make_trainer
from tests.trainer.rank_pool import RankPool
from tests.trainer.test_fleet import assert_close, fleet, published
from tests.trainer.test_sharded import (
    BUDGET,
    EPSILON,
    assert_alike,
    assert_alike_on,
    batches,
    num_padding,
    train,
    whole,
    written,
)

LORA = LoraConfig(rank=4, alpha=8.0)
SETTINGS: dict[str, Any] = {"lora": LORA, "learning_rate": 1e-2, "micro_batch_tokens": BUDGET, "adam_epsilon": EPSILON}
WITHIN = 5e-6
"""Between weights: the learning rate is ten times the rate of full weights, and a step's size is the learning rate's."""


def adapters(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    found = {name: p for name, p in trainer._model.named_parameters() if p.requires_grad}
    return {
        name.removeprefix("hf."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in found.items()
    }


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (False, {"algorithm": resolve(AlgorithmConfig(name="grpo", kl_coef=0.1))}),
        (True, {"algorithm": "reinforce++", "gradient_checkpointing": True, "mini_batches": 2}),
        (False, {"algorithm": "gspo", "lora": LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "lm_head"))}),
    ],
    ids=["with a reference", "checkpointed", "the output matrix"],
)
def test_ranks_compute_what_one_process_does(
    two: RankPool, three: RankPool, folders: dict[bool, Path], tied: bool, settings: dict[str, Any]
) -> None:
    """The reference is the model with its adapters off, and is asked first: FSDP has not seen them in use by then."""
    given, settings = batches(), {**SETTINGS, **settings}
    name = settings["algorithm"].name if isinstance(settings["algorithm"], Algorithm) else settings["algorithm"]
    minis = settings.get("mini_batches", 1)
    assert any(num_padding(batch, name, minis, 2) for batch in given)
    alone = assert_alike_on(two, three, folder=folders[tied], given=given, weights=WITHIN, **settings)
    before = whole(make_trainer(folders[tied], **settings))
    assert any((tensor - before[key]).abs().max() > 1e-3 for key, tensor in alone.weights.items())


def after_use(world: World, *, folder: Path, given: list[Any], **settings: Any) -> dict[str, tuple[bool, torch.dtype]]:
    """Whether each parameter is trained, and its number format."""
    trainer = make_trainer(folder, world=world, **settings)
    assert_same(adapters(trainer), adapters(make_trainer(folder, **settings)))
    for batch in given:
        trainer.next_logits([[3, 4, 5]])
        with trainer._policy.reference():
            trainer.next_logits([[3, 4, 5]])
        trainer.step(batch)
    found = {}
    held = {id(p) for group in trainer._optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer._model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().shape[0] <= -(-parameter.shape[0] // world.size), name
        assert (parameter.grad is not None) == parameter.requires_grad == (id(parameter) in held), name
        found[name] = parameter.requires_grad, parameter.dtype
    return found


def test_the_base_stays_sharded_and_in_half_precision_and_has_no_gradient(two: RankPool, tmp_path: Path) -> None:
    make_model(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    settings = {**SETTINGS, "dtype": "bfloat16"}
    for found in two.call(after_use, folder=tmp_path / "half", given=batches(), **settings):
        assert {name: "lora_" in name for name in found} == {name: trained for name, (trained, _) in found.items()}
        assert all(kind == (torch.float32 if trained else torch.bfloat16) for trained, kind in found.values())
    alone = train(None, folder=tmp_path / "half", given=batches()[:1], **settings)
    sharded = two.call(train, folder=tmp_path / "half", given=batches()[:1], **settings)[0]
    assert {tensor.dtype for tensor in sharded.weights.values()} == {torch.bfloat16}
    for name in ("loss", "grad_norm"):
        assert sharded.metrics[0][name] == pytest.approx(alone.metrics[0][name], rel=0.02, abs=1e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft, of transformers
def test_a_checkpoint_of_ranks_is_peft_s_and_any_number_goes_on_from_it(
    two: RankPool, three: RankPool, folders: dict[bool, Path], tmp_path: Path
) -> None:
    folder, given = folders[True], batches()
    saved = written(two, tmp_path / "step_2", folder=folder, given=given[:2], **SETTINGS)
    straight = train(None, folder=folder, given=given, **SETTINGS).after(2)
    assert_alike(train(None, folder=folder, given=given[2:], resume_from=saved, **SETTINGS), straight, weights=WITHIN)
    for pool in (two, three):
        for found in pool.call(train, folder=folder, given=given[2:], resume_from=saved, **SETTINGS):
            assert_alike(found, straight, weights=WITHIN)
    resumed = make_trainer(folder, resume_from=saved, **SETTINGS)
    peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), saved)
    merged = dict(peft.merge_and_unload().named_parameters())
    assert all(torch.allclose(tensor, merged[name], atol=1e-6) for name, tensor in resumed.weights().items())
    (saved / "adapter_model.safetensors").write_bytes(b"rubbish")
    for kind, message in three.call(sharded.refused, folder=folder, given=[], resume_from=saved, **SETTINGS):
        assert (kind, "adapter_model.safetensors cannot be read" in message) == ("DamagedCheckpoint", True)


def test_a_fleet_publishes_sums_and_saves_adapters(folders: dict[bool, Path], tmp_path: Path, forked: None) -> None:
    folder = folders[True]
    expected = make_trainer(folder, lora=LORA, learning_rate=1e-2)
    with fleet(folder, tmp_path, lora=LORA, learning_rate=1e-2, deterministic=False) as trainer:
        for step in range(2):
            batch = make_batch(step=step)
            expected.step(batch)
            trainer.step(batch)
        assert_close(published(trainer), expected.weights())
        trainer.save(tmp_path / "step_2")
    verify_files(tmp_path / "step_2", read_manifest(tmp_path / "step_2"))
    files = {str(path.relative_to(tmp_path / "step_2")) for path in (tmp_path / "step_2").rglob("*") if path.is_file()}
    parts = {f"trainer/optimizer-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "trainer.json", *parts}
    with (
        pytest.raises(ModelError, match=r"was written with trainer\.lora = "),
        fleet(folder, tmp_path, resume_from=tmp_path / "step_2", learning_rate=1e-2, deterministic=False),
    ):
        pass


def test_a_fleet_publishes_adapters_alone(folders: dict[bool, Path], tmp_path: Path, forked: None) -> None:
    """No rank gathers more than they are, and merged they are the weights that it publishes otherwise."""
    one = {"learning_rate": 1e-2, "micro_batch_tokens": BUDGET}
    with fleet(folders[True], tmp_path / "alone", lora=replace(LORA, publish="adapter"), **one) as trainer:
        trainer.step(batches()[0])
        source = trainer.weight_source()
        assert isinstance(source, AdapterSource)
        assert (source.manifest.version, source.manifest.base_version) == (1, 0)
        shared = sum(path.stat().st_size for path in (trainer._staging.path).rglob("*.safetensors"))
        assert shared < 2 * sum(spec.num_bytes for spec in source.manifest.tensors)
    with fleet(folders[True], tmp_path / "merged", lora=LORA, **one) as trainer:
        trainer.step(batches()[0])
        merged = published(trainer)
    assert_same(dict(AppliedAdapters(FolderWeights(0, folders[True]), source).tensors()), merged)
