"""The engine reads its weights back: bit for bit, whatever their layout in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.weights.sources import MemoryWeights
from tests.engine.embedded.harness import CONFIG
from tests.engine.models import saved, tiny_model

pytestmark = pytest.mark.real_time


def touched(tensor: Tensor) -> Tensor:
    """Another last element, also in bfloat16."""
    copy = tensor.clone()
    copy.view(-1)[-1] = copy.view(-1)[-1] * 2 + 1
    return copy


@pytest.mark.parametrize(
    ("kernels", "dtype", "kind", "is_tied"),
    [
        ("compiled", "float32", "qwen3", False),
        ("compiled", "bfloat16", "qwen2", True),
        ("torch", "bfloat16", "qwen3", False),
        ("torch", "float32", "qwen2", True),
    ],
)
async def test_each_tensor_is_told_from_one_that_differs_in_one_number(
    kernels: str, dtype: str, kind: str, is_tied: bool, tmp_path: Path
) -> None:
    models = [tiny_model(kind, seed=seed, tie_word_embeddings=is_tied) for seed in range(2)]
    folder = saved(models[0], tmp_path / "model")
    config = replace(CONFIG, cpu_kernels=kernels, dtype=dtype)  # type: ignore[arg-type]
    engine = EmbeddedEngine.from_folder(folder, config)
    try:
        new = {name: tensor.detach() for name, tensor in models[1].state_dict().items()}
        if is_tied:
            del new["lm_head.weight"]
        assert {*await engine.differing(MemoryWeights(1, new))} == {*new}
        await engine.load(1, MemoryWeights(1, new))
        assert await engine.differing(MemoryWeights(1, new)) == []
        for name in new:
            changed = MemoryWeights(1, {**new, name: touched(new[name])})
            assert await engine.differing(changed) == [name]
    finally:
        await engine.close()


async def test_not_a_numbers_and_zeros_of_either_sign_are_compared_by_their_bits(tmp_path: Path) -> None:
    model = tiny_model()
    folder = saved(model, tmp_path / "model")
    name = "model.norm.weight"
    engine = EmbeddedEngine.from_folder(folder, CONFIG)
    try:
        norm = torch.zeros_like(model.state_dict()[name])
        norm[0] = float("nan")
        weights = {key: tensor.detach() for key, tensor in model.state_dict().items()} | {name: norm}
        await engine.load(1, MemoryWeights(1, weights))
        assert await engine.differing(MemoryWeights(1, weights)) == []
        norm_of_minus = norm.clone()
        norm_of_minus[1] = -0.0
        assert await engine.differing(MemoryWeights(1, weights | {name: norm_of_minus})) == [name]
    finally:
        await engine.close()
