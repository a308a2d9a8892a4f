"""A published version is in every engine, or the old one still is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import WeightPath, WeightSource
from rollover.weights.folders import WeightFolders
from rollover.weights.publisher import Publisher
from rollover.weights.sending import Lease, own_weights
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.virtual_time import run
from tests.weights.kit import FakeWeights


class Target:
    def __init__(
        self, *, takes: WeightPath = "memory", refuses: bool = False, pause_s: float = 0.0, load_s: float = 0.0
    ) -> None:
        self.takes, self.refuses, self.pause_s, self.load_s = takes, refuses, pause_s, load_s
        self.done: list[Any] = []

    def __repr__(self) -> str:
        return "one"

    async def pause(self) -> None:
        self.done.append("pause")
        await asyncio.sleep(self.pause_s)

    async def load(self, version: int, source: WeightSource) -> None:
        await asyncio.sleep(self.load_s)
        if self.refuses:
            raise EngineError("does not fit")
        self.done.append((version, source))

    async def resume(self) -> None:
        self.done.append("resume")


def test_a_target_is_paused_loaded_and_resumed() -> None:
    target = Target(load_s=5.0)
    run(Publisher(target).publish(FakeWeights(3)))
    assert target.done == ["pause", (3, FakeWeights(3)), "resume"]


LATE = (EngineTimeout, "^one did not load weights version 3 within 600 s")


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [({"refuses": True}, EngineError, "does not fit"), ({"load_s": 1000.0}, *LATE), ({"pause_s": 1000.0}, *LATE)],
    ids=["refuses", "hangs", "hangs while it is paused"],
)
def test_a_failed_target_is_resumed_and_named(way: dict[str, Any], error: type[EngineError], message: str) -> None:
    target = Target(**way)
    with pytest.raises(error, match=message):
        run(Publisher(target).publish(FakeWeights(3)))
    assert target.done == ["pause", "resume"]


async def test_a_cancelled_publication_resumes_its_target() -> None:
    target = Target(load_s=1000.0)
    publishing = asyncio.create_task(Publisher(target).publish(FakeWeights(3)))
    await asyncio.sleep(5.0)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert target.done == ["pause", "resume"]


class Folders:
    def write(self, source: WeightSource) -> WeightSource:
        return FolderWeights(source.manifest.version, Path("v3"))


@pytest.mark.real_time
async def test_a_folder_is_written_only_if_a_target_needs_one() -> None:
    source, folders = MemoryWeights(3, {"w": torch.ones(2)}), cast(WeightFolders, Folders())
    needy = Target(takes="folder")
    assert await Publisher(Target(), folders=folders).stage(source) is source
    staged = await Publisher(needy, folders=folders).stage(source)
    assert staged.folder == Path("v3")
    with pytest.raises(EngineError, match=r"^one loads weights from a folder, but the publisher has no place"):
        await Publisher(needy).stage(source)


def test_weights_that_are_sent_count_in_the_formats_of_the_engines_model(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(4, 2), "model.embed_tokens.weight": torch.ones(8, 2)}
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {name: torch.ones(1, dtype=torch.bfloat16) for name in (*tensors, "lm_head.weight")},
        tmp_path / "model.safetensors",
    )
    source = MemoryWeights(1, tensors)
    held = own_weights(source, tensors, Lease(), current=lambda: 1, device="cpu")
    target = Target()
    publisher = Publisher(target, folders=WeightFolders(tmp_path / "weights", like=tmp_path))
    assert publisher.num_bytes(source) == 4 * (8 + 16)
    target.takes = "group"
    assert publisher.num_bytes(held) == 2 * (8 + 16 + 16)
