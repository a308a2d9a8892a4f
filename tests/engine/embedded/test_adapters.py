"""The embedded engine merges adapters itself: to the bits that it would have been given merged."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rollover.errors import EngineError
from rollover.weights.adapters import AdapterSource, LowRank, MergedWeights
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.engine.contract import collect, request
from tests.engine.embedded.harness import digests_in, digests_of, opened
from tests.engine.models import saved, tiny_model
from tests.weights.test_adapters import Q_PROJ, adapters, low_rank

pytestmark = pytest.mark.real_time

GATE = "model.layers.0.mlp.gate_proj.weight"


def merged(folder: Path, version: int, given: dict[str, LowRank]) -> MemoryWeights:
    return MemoryWeights(version, MergedWeights(dict(FolderWeights(0, folder).tensors()), given))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
async def test_the_weights_are_those_of_merged_publication_to_the_bit(tmp_path: Path, dtype: str, tied: bool) -> None:
    """Whatever was there before: other adapters, beside other matrices, or full weights."""
    model = tiny_model(tie_word_embeddings=tied).to(getattr(torch, dtype))
    base = saved(model, tmp_path / "model")
    given = [adapters(seed=1), adapters(seed=2), {GATE: low_rank(48, 32)}]
    versions = itertools.count(1)
    async with opened(base, dtype=dtype) as engine:

        async def load(own: dict[str, LowRank]) -> None:
            version = next(versions)
            await engine.load(version, AdapterSource(version, own))
            assert digests_in(engine._core) == digests_of(merged(base, version, own))

        for place, own in enumerate(given):
            before = await collect(engine, request("before", call=place, max_new_tokens=6))
            await load(own)
            ours = await collect(engine, request("ours", call=place, max_new_tokens=6))
            version = next(versions)
            await engine.load(version, merged(base, version, own))
            theirs = await collect(engine, request("theirs", call=place, max_new_tokens=6))
            assert [c.logprobs for c in ours] == [c.logprobs for c in theirs] != [c.logprobs for c in before]
            version = next(versions)
            others = tiny_model(seed=3, tie_word_embeddings=tied).state_dict()
            await engine.load(version, MemoryWeights(version, others))
            await load(own)


async def test_what_does_not_fit_is_named_and_changes_nothing(folder: Path) -> None:
    async with opened(folder) as engine:
        await engine.load(1, AdapterSource(1, adapters()))
        with pytest.raises(EngineError, match=r"version 2 do not fit: an adapter of .*q_proj.weight"):
            await engine.load(2, AdapterSource(2, {Q_PROJ: low_rank(64, 31)}))
        with pytest.raises(EngineError, match="has weights version 0 to apply adapters to"):
            await engine.load(2, AdapterSource(2, adapters(), base_version=1))
        assert digests_in(engine._core) == digests_of(merged(folder, 1, adapters()))
        assert engine.stats().policy_version == 1


async def test_an_engine_that_has_slept_merges_adapters_into_the_whole_model(folder: Path) -> None:
    async with opened(folder, colocated=True) as engine:
        await engine.load(1, AdapterSource(1, adapters()))
        await engine.sleep()
        await engine.load(2, AdapterSource(2, adapters(seed=1)))
        assert digests_in(engine._core) == digests_of(merged(folder, 2, adapters(seed=1)))
