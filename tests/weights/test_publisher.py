"""A published version is in every engine, or the old one still is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import TensorSpec, WeightSource
from rollover.weights.publisher import Publisher
from tests.virtual_time import run
from tests.weights.kit import FakeWeights


class Target:
    def __init__(self, name: str, *, refuses: bool = False, load_s: float = 0.0) -> None:
        self.name, self.refuses, self.load_s = name, refuses, load_s
        self.done: list[Any] = []

    def __repr__(self) -> str:
        return self.name

    needs_folder = False

    async def pause(self) -> None:
        self.done.append("pause")

    async def load(self, version: int, source: WeightSource) -> None:
        await asyncio.sleep(self.load_s)
        if self.refuses:
            raise EngineError("does not fit")
        self.done.append((version, source))

    async def resume(self) -> None:
        self.done.append("resume")


def test_every_target_is_paused_loaded_and_resumed() -> None:
    targets = [Target("one"), Target("two", load_s=5.0)]
    run(Publisher(targets).publish(3, FakeWeights(3)))
    assert all(t.done == ["pause", (3, FakeWeights(3)), "resume"] for t in targets)


def test_a_target_that_refuses_is_resumed_and_its_error_raised() -> None:
    targets = [Target("one", refuses=True), Target("two")]
    with pytest.raises(EngineError, match="does not fit"):
        run(Publisher(targets).publish(3, FakeWeights(3)))
    assert targets[0].done == ["pause", "resume"]
    assert targets[1].done == ["pause", (3, FakeWeights(3)), "resume"]


def test_a_target_that_hangs_is_named() -> None:
    targets = [Target("one"), Target("two", load_s=1000.0)]
    with pytest.raises(EngineTimeout, match=r"^two did not load weights version 3 within 600 s"):
        run(Publisher(targets).publish(3, FakeWeights(3)))
    assert targets[1].done == ["pause", "resume"]


def test_a_publication_that_is_cancelled_has_resumed_its_targets_when_it_ends() -> None:
    async def main() -> None:
        targets = [Target("one"), Target("two", load_s=1000.0)]
        publishing = asyncio.create_task(Publisher(targets).publish(3, FakeWeights(3)))
        await asyncio.sleep(5.0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert targets[0].done == ["pause", (3, FakeWeights(3)), "resume"]
        assert targets[1].done == ["pause", "resume"]

    run(main())


def test_a_target_that_was_being_paused_is_resumed_too() -> None:
    class Slow(Target):
        async def pause(self) -> None:
            await super().pause()
            await asyncio.sleep(1000.0)

    target = Slow("slow")
    with pytest.raises(EngineTimeout, match=r"^slow did not load"):
        run(Publisher([target]).publish(3, FakeWeights(3)))
    assert target.done == ["pause", "resume"]


def test_staging_writes_a_folder_for_targets_in_other_processes_and_nothing_for_others() -> None:
    class Folders:
        def write(self, version: int, weights: object) -> Path:
            return Path(f"v{version}")

    async def main() -> None:
        staged = await Publisher([], folders=Folders()).stage(3, {"w": torch.ones(2)})  # type: ignore[arg-type]
        assert staged.folder == Path("v3")
        staged = await Publisher([]).stage(3, {"w": torch.ones(2)})
        assert staged.folder is None
        assert staged.manifest.tensors == (TensorSpec(name="w", shape=(2,), dtype="float32"),)

    asyncio.run(main())
