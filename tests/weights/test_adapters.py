"""Adapters as weights of their own: what a folder of them holds, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollover.errors import EngineError, ModelError
from rollover.weights.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterSource,
    AppliedAdapters,
    LowRank,
    MergedWeights,
)
from rollover.weights.base import TensorSpec, WeightPath
from rollover.weights.buckets import cast
from rollover.weights.folders import WeightFolders
from rollover.weights.publisher import Publisher
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.engine.models import saved, tiny_model
from tests.trainer.builders import assert_same

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def low_rank(rows: int, columns: int, *, rank: int = 4, seed: int = 0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    a_RI = torch.randn(rank, columns, generator=generator)
    return LowRank(a_RI=a_RI, b_OR=torch.randn(rows, rank, generator=generator), scale=0.5)


def adapters(*, seed: int = 0) -> dict[str, LowRank]:
    """For the model of ``tiny_model``: beside two matrices of each of its two layers."""
    made = {}
    for layer in (0, 1):
        made[f"model.layers.{layer}.self_attn.q_proj.weight"] = low_rank(64, 32, seed=4 * seed + layer)
        made[f"model.layers.{layer}.mlp.down_proj.weight"] = low_rank(32, 48, seed=4 * seed + 2 + layer)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(), tmp_path_factory.mktemp("model"))


def test_an_adapter_is_merged_once_for_a_tensor_that_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, merged = LowRank.merged_with, list[LowRank]()
    monkeypatch.setattr(LowRank, "merged_with", lambda self, weight: merged.append(self) or merge(self, weight))
    adapter = low_rank(8, 8)
    weights = MergedWeights({"w": torch.zeros(8, 8)}, {"w": adapter})
    sent = cast(weights, TensorSpec(name="w", shape=(8, 8), dtype="float32"))
    assert torch.equal(sent, merge(adapter, torch.zeros(8, 8))) and merged == [adapter]


def test_the_manifest_names_the_adapters_and_the_weights_that_they_are_for() -> None:
    manifest = AdapterSource(7, adapters()).manifest
    assert (manifest.version, manifest.base_version, manifest.kind) == (7, 0, "adapter")
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, 32)
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] == (64, 4)
    assert sum(spec.num_bytes for spec in manifest.tensors) == 2 * 4 * 4 * (32 + 64 + 48 + 32)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft, of transformers
def test_peft_opens_what_is_written_and_computes_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    AdapterSource(7, adapters()).write(tmp_path / "v7")
    peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "v7")
    theirs = peft.merge_and_unload().state_dict()
    ours = dict(AppliedAdapters(FolderWeights(0, folder), AdapterSource(7, adapters())).tensors())
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
    base = dict(FolderWeights(0, folder).tensors())
    assert {name for name in base if not torch.equal(base[name], ours[name])} == adapters().keys()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    source = AdapterSource(7, adapters())
    source.write(tmp_path)
    read = AdapterSource.read(7, tmp_path)
    assert_same(dict(read.tensors()), dict(source.tensors()))
    assert {name: adapter.scale for name, adapter in read.adapters.items()} == dict.fromkeys(source.adapters, 0.5)


@pytest.mark.parametrize("damage", ["config", "weights", "half"])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str) -> None:
    AdapterSource(7, adapters()).write(tmp_path)
    match damage:
        case "config":
            (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"r": 4}))
        case "weights":
            (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"nothing")
        case "half":
            (tmp_path / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"the adapters in {tmp_path} cannot be read"):
        AdapterSource.read(7, tmp_path)


def test_applied_adapters_are_the_merged_weights_to_the_bit(folder: Path) -> None:
    base = dict(FolderWeights(0, folder).tensors())
    for kind in (torch.float32, torch.bfloat16):
        rounded = {name: tensor.to(kind) for name, tensor in base.items()}
        merged = MemoryWeights(7, MergedWeights(rounded, adapters()))
        applied = AppliedAdapters(MemoryWeights(0, rounded), AdapterSource(7, adapters()))
        assert applied.manifest == merged.manifest
        assert_same(dict(applied.tensors()), dict(merged.tensors()))


@pytest.mark.parametrize(
    ("misfit", "message"),
    [
        ({"model.layers.9.mlp.up_proj.weight": low_rank(48, 32)}, "up_proj.weight', which is absent in the model"),
        ({Q_PROJ: low_rank(64, 48)}, r"\[64, 4\] times \[4, 48\] is meant for weight .* which is \[64, 32\]"),
    ],
)
def test_adapters_that_fit_nothing_are_refused(folder: Path, misfit: dict[str, LowRank], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        AppliedAdapters(FolderWeights(0, folder), AdapterSource(7, misfit))


def test_who_loads_full_weights_only_says_so() -> None:
    with pytest.raises(EngineError, match="loads full weights only, but version 7 is given as adapters for version 0"):
        AdapterSource(7, adapters()).manifest.require_full(7, "the engine")
    manifest = AdapterSource(7, adapters(), base_version=3).manifest
    manifest.require_adapter(7, "the engine", base_version=3)
    with pytest.raises(EngineError, match=r"has weights version 0 to apply adapters to, .* adapters for version 3"):
        manifest.require_adapter(7, "the engine", base_version=0)
    for require in (manifest.require_full, partial(manifest.require_adapter, base_version=3)):
        with pytest.raises(EngineError, match=r"^the engine was asked to load weights version 8, but was given 7$"):
            require(8, "the engine")


class _NeedsFolder:
    takes: WeightPath = "folder"


def test_targets_that_need_a_folder_get_one_of_adapters_alone(folder: Path, tmp_path: Path) -> None:
    publisher = Publisher(_NeedsFolder(), folders=WeightFolders(tmp_path, like=folder))  # type: ignore[arg-type]
    staged = asyncio.run(publisher.stage(AdapterSource(1, adapters())))
    assert staged.folder == tmp_path / "v1"
    assert staged.manifest.kind == "adapter"
    assert {path.name for path in staged.folder.iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}


@pytest.mark.real_time
async def test_a_folder_of_merged_weights_is_written_one_tensor_at_a_time_beside_the_event_loop(tmp_path: Path) -> None:
    """And nothing keeps the merged tensors afterwards."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Watched(MergedWeights):
        def __getitem__(self, name: str) -> torch.Tensor:
            assert threading.current_thread() is not threading.main_thread()
            tensor = super().__getitem__(name)
            if name in self.adapters:
                assert sum(ref() is not None for ref in made) <= 1
                made.append(weakref.ref(tensor))
            return tensor

    base = saved(tiny_model().bfloat16(), tmp_path / "base")
    weights = Watched({name: t.float() for name, t in FolderWeights(0, base).tensors()}, adapters())
    publisher = Publisher(_NeedsFolder(), folders=WeightFolders(tmp_path / "weights", like=base))  # type: ignore[arg-type]
    staged = await publisher.stage(MemoryWeights(1, weights))
    assert len(made) == 4 and not any(ref() is not None for ref in made)
    expected = dict(MergedWeights(weights.base, weights.adapters))
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in staged.tensors())
    assert staged.manifest.num_bytes == sum(2 * tensor.numel() for tensor in expected.values())
