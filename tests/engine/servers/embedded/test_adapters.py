"""Servers of the embedded engine merge adapters themselves: to the bits of the merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.errors import EngineError
from rollover.weights.adapters import AdapterSource, MergedWeights
from rollover.weights.folders import WeightFolders
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.engine.contract import collect, request, tokens
from tests.engine.servers.embedded.kit import opened, serving
from tests.weights.test_adapters import Q_PROJ, adapters, low_rank


def on_disk(folder: Path, source: AdapterSource) -> AdapterSource:
    source.write(folder)
    return AdapterSource(source.manifest.version, source.adapters, folder=folder)


@pytest.mark.real_time
async def test_adapters_are_merged_into_the_model_of_the_run(folder: Path, new: Path, tmp_path: Path) -> None:
    merged = MemoryWeights(2, MergedWeights(dict(FolderWeights(0, folder).tensors()), adapters()))
    whole = WeightFolders(tmp_path / "merged", like=folder).write(merged)
    with serving(new) as url:
        async with opened(url, folder) as engine:
            before = await collect(engine, request("before"))
            await engine.load(1, on_disk(tmp_path / "v1", AdapterSource(1, adapters())))
            ours = await collect(engine, request("ours"))
            await engine.load(2, whole)
            theirs = await collect(engine, request("theirs"))
            assert tokens(ours) == tokens(theirs) != tokens(before)
            assert [p for c in ours for p in c.logprobs] == [p for c in theirs for p in c.logprobs]
            with pytest.raises(EngineError, match=r"an adapter of .*q_proj\.weight"):
                await engine.load(3, on_disk(tmp_path / "v3", AdapterSource(3, {Q_PROJ: low_rank(64, 31)})))
            (tmp_path / "v1" / "adapter_model.safetensors").write_bytes(b"damaged")
            with pytest.raises(EngineError, match=r"version 3: .*the adapters in .*v1 cannot be read"):
                await engine.load(3, AdapterSource(3, adapters(), folder=tmp_path / "v1"))
            after = await collect(engine, request("after"))
            assert tokens(after) == tokens(theirs)
