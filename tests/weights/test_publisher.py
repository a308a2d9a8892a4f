"""A published version is in every engine, or the old one still is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import WeightPath, WeightSource
from rollover.weights.folders import WeightFolders
from rollover.weights.publisher import Publisher
from rollover.weights.sources import MemoryWeights
from tests.virtual_time import run
from tests.weights.kit import FakeWeights


class Target:
    def __init__(self, name: str, *, refuses: bool = False, load_s: float = 0.0) -> None:
        self.name, self.refuses, self.load_s = name, refuses, load_s
        self.done: list[Any] = []

    def __repr__(self) -> str:
        return self.name

    takes: WeightPath = "memory"

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
    run(Publisher(targets).publish_to_all(FakeWeights(3)))
    assert all(t.done == ["pause", (3, FakeWeights(3)), "resume"] for t in targets)


def test_a_target_that_refuses_is_resumed_and_its_error_raised() -> None:
    targets = [Target("one", refuses=True), Target("two")]
    with pytest.raises(EngineError, match="does not fit"):
        run(Publisher(targets).publish_to_all(FakeWeights(3)))
    assert targets[0].done == ["pause", "resume"]
    assert targets[1].done == ["pause", (3, FakeWeights(3)), "resume"]


def test_a_target_that_hangs_is_named() -> None:
    targets = [Target("one"), Target("two", load_s=1000.0)]
    with pytest.raises(EngineTimeout, match=r"^two did not load weights version 3 within 600 s"):
        run(Publisher(targets).publish_to_all(FakeWeights(3)))
    assert targets[1].done == ["pause", "resume"]


def test_a_cancelled_publication_resumes_its_targets() -> None:
    async def main() -> None:
        targets = [Target("one"), Target("two", load_s=1000.0)]
        publishing = asyncio.create_task(Publisher(targets).publish_to_all(FakeWeights(3)))
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
        run(Publisher([target]).publish_to_all(FakeWeights(3)))
    assert target.done == ["pause", "resume"]


def test_targets_are_reported_one_by_one_and_keep_their_own_versions() -> None:
    targets = [Target("one"), Target("two", refuses=True), Target("three", load_s=1000.0)]
    publisher = Publisher(targets, timeout_s=60.0)
    assert publisher.versions == (None, None, None)
    one, two, three = run(publisher.publish(FakeWeights(3)))
    assert (one.target, one.version, one.error) == ("one", 3, None)
    assert str(two.error) == "does not fit"
    assert isinstance(three.error, EngineTimeout)
    assert str(three.error) == "three did not load weights version 3 within 60 s"
    assert publisher.versions == (3, None, None)
    targets[1].refuses = False
    run(publisher.publish(FakeWeights(4)))
    assert publisher.versions == (4, 4, None)


def test_all_targets_that_hang_are_named_together() -> None:
    targets = [Target("one", load_s=1000.0), Target("two"), Target("three", load_s=1000.0)]
    with pytest.raises(EngineTimeout, match=r"^one, three did not load weights version 3 within 600 s"):
        run(Publisher(targets).publish_to_all(FakeWeights(3)))


class Folders:
    def write(self, version: int, weights: object) -> Path:
        return Path(f"v{version}")


def test_a_folder_is_written_only_if_a_target_needs_one() -> None:
    source, folders = MemoryWeights(3, {"w": torch.ones(2)}), cast(WeightFolders, Folders())
    needy = Target("needy")
    needy.takes = "folder"

    async def main() -> None:
        assert await Publisher([Target("plain")], folders=folders).stage(source) is source
        staged = await Publisher([Target("plain"), needy], folders=folders).stage(source)
        assert staged.folder == Path("v3")
        assert staged.manifest == source.manifest
        assert dict(staged.tensors())["w"] is dict(source.tensors())["w"]
        with pytest.raises(EngineError, match=r"^needy loads weights from a folder, but the publisher has no place"):
            await Publisher([needy]).stage(source)

    asyncio.run(main())
