"""A worker among engines that do not load, stand still or have no disk: what they had before is in force."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.kind import OpenedEngine
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.errors import EngineError, ResourceError
from rollover.swarm.wire.messages import Decoded, Heartbeat, Leaving, NotServing, Serving
from rollover.swarm.worker.calls import WorkerCalls
from rollover.swarm.worker.held import HeldCalls
from rollover.swarm.worker.host import EngineBroken, EngineHost
from rollover.weights.base import WeightSource
from tests.engine.fake import FakeEngine
from tests.swarm.worker_kit import Bench, FakeFetched, assign, head, length_of, tokens, with_worker


class Stuck(FakeEngine):
    """Hangs in one of its calls, or refuses weights, until it is let go."""

    def __init__(self, where: str) -> None:
        super().__init__(length_of)
        self.where = where
        self.goes_on = asyncio.Event()

    async def pause(self) -> None:
        if self.where == "pause":
            await self.goes_on.wait()
        await super().pause()

    async def load(self, version: int, source: WeightSource) -> None:
        if self.where == "load":
            await self.goes_on.wait()
        if self.where == "refuses" and not self.goes_on.is_set():
            raise EngineError("weights do not fit: too wide")
        await super().load(version, source)

    def __repr__(self) -> str:
        return "the engine"


@pytest.mark.parametrize("where", ["pause", "load", "refuses"])
@with_worker(update_timeout_s=0.05)
async def test_a_load_that_fails_or_never_ends_leaves_the_old_weights_serving(bench: Bench, where: str) -> None:
    bench.make_engine = lambda: Stuck(where)
    link = await bench.decoding(3, assign("a", limit=6))
    await link.send(head(1))
    late, refused = "the engine did not load weights version 1 within 0.05 s", "weights do not fit: too wide"
    assert await link.first(NotServing) == NotServing(version=1, reason=refused if where == "refuses" else late)
    assert bench.engine.events[-1] == ("resume", 0)
    await bench.engine.tick(3)
    assert await link.ended("a") == "length"
    assert bench.coordinator.response("a") == tokens(7, 0, 6)
    assert set(bench.coordinator.versions["a"].values()) == {0}
    bench.engine.goes_on.set()  # type: ignore[attr-defined]
    await bench.serving_after(link, 1)


class Late(FakeEngine):
    """Takes the first weights only when nobody waits for them any more."""

    async def load(self, version: int, source: WeightSource) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await super().load(version, source)

    async def resume(self) -> None:
        await super().resume()
        await self.tick()


@with_worker(update_timeout_s=0.05, make_engine=lambda: Late(length_of))
async def test_weights_that_an_engine_has_taken_late_are_announced_before_their_tokens(bench: Bench) -> None:
    link = await bench.decoding(3, assign("a", limit=6))
    await link.send(head(1))
    await link.until(lambda: 3 in bench.coordinator.versions["a"])
    of_new = [type(m) for m in link.seen if isinstance(m, Serving | Decoded) and m.version == 1]
    assert of_new[0] is Serving and not link.all(NotServing)
    await bench.engine.tick(2)
    assert await link.ended("a") == "length"
    assert list(bench.coordinator.versions["a"].values()) == [0, 0, 0, 1, 1, 1]


class Frozen(FakeEngine):
    """Does not go on after a pause."""

    async def resume(self) -> None:
        raise EngineError("the device is lost")


@with_worker(make_engine=lambda: Frozen(length_of))
async def test_an_engine_that_does_not_go_on_after_a_pause_ends_the_worker(bench: Bench) -> None:
    link = await bench.member(head(0))
    await link.send(head(1))
    error = await bench.failure(EngineBroken)
    assert str(error) == "the engine was paused for new weights and cannot be resumed: the device is lost"
    assert [message.version for message in link.all(Serving)] == [0]


@with_worker(engine=VLLMConfig(urls=("http://one",)))
async def test_a_full_disk_leaves_servers_the_old_model_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = FakeFetched.write_folder, ResourceError("no space left on the disk of '/cache'; make room")

    def refuse(fetched: FakeFetched, root: Path) -> Path:
        if fetched.version == 1:
            raise full
        return write(fetched, root)

    monkeypatch.setattr(FakeFetched, "write_folder", refuse)
    link = await bench.member(head(0))
    await link.send(head(1))
    assert (await link.first(NotServing)).reason == str(full)
    assert bench.engine.events == []
    await link.send(head(2))
    await link.serving(2)


async def test_the_folder_on_which_servers_are_started_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path, engine=VLLMConfig(urls=("http://one",), weights_dir=str(tmp_path / "shared")))
    folders: list[Path | None] = []

    class Reader(FakeEngine):
        async def load(self, version: int, source: WeightSource) -> None:
            folders.append(source.folder)
            await super().load(version, source)

    bench.make_engine = lambda: Reader(length_of)
    async with bench.joined():
        link = await bench.member(head(0))
        for version in (1, 2, 3):
            await link.send(head(version))
            await link.serving(version)
        root = tmp_path / "shared" / "worker-laptop"
        assert bench.opened_on == root / "opened" / "v0"
        assert folders == [root / f"v{version}" for version in (1, 2, 3)]


class Hanging(FakeEngine):
    """Its loop can be held up."""

    def __init__(self) -> None:
        super().__init__(length_of)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def abort(self, request_ids: Any) -> None:
        await self.goes_on.wait()
        await super().abort(request_ids)


class Away(FakeEngine):
    """Its servers can all be down, for a while or until its patience is over."""

    def __init__(self) -> None:
        super().__init__(length_of)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.why = ""

    async def until_up(self) -> None:
        await self.goes_on.wait()
        if self.why:
            raise EngineError(self.why)


async def without_engine(bench: Bench) -> None:
    link = await bench.member(head(0), ttl_s=30.0)
    bench.engine.goes_on.clear()  # type: ignore[attr-defined]
    await bench.clock.move(31.0)
    await link.until(lambda: link.is_closed)
    assert not link.all(Heartbeat)
    await bench.clock.move(100.0)


@pytest.mark.parametrize("kind", [Hanging, Away])
@with_worker()
async def test_a_worker_without_an_engine_neither_beats_nor_comes_back(bench: Bench, kind: type[FakeEngine]) -> None:
    bench.make_engine = kind
    await without_engine(bench)
    assert bench.coordinator.lease == 1 and len(bench.coordinator.authorizations) == 1
    bench.engine.goes_on.set()  # type: ignore[attr-defined]
    await bench.member_again(head(0))


@with_worker(make_engine=Away)
async def test_a_worker_without_servers_ends_when_it_is_stopped(bench: Bench) -> None:
    await without_engine(bench)
    await bench.stopped()


@with_worker(make_engine=Away)
async def test_a_worker_whose_servers_stay_away_leaves_with_the_reason(bench: Bench) -> None:
    link = await bench.member(head(0), ttl_s=30.0)
    bench.engine.why = "no engine has been up for 120 s: http://one: connection refused"  # type: ignore[attr-defined]
    await bench.clock.move(11.0)
    error = await bench.failure(EngineBroken)
    assert str(error) == f"the engine no longer answers: {bench.engine.why}"  # type: ignore[attr-defined]
    assert link.all(Leaving) == [Leaving(reason=str(error))]


async def test_restarted_servers_have_the_time_that_they_take_to_start(tmp_path: Path) -> None:
    class Starting(Away):
        num_asked = 0

        async def until_up(self) -> None:
            self.num_asked += 1
            if self.num_asked < 4:
                await bench.clock.sleep(120.0)
                raise EngineError("no engine has been up for 120 s")

    bench = Bench(tmp_path, engine=VLLMConfig(launch=True, launch_timeout_s=400.0))
    engine = Starting()
    host = EngineHost(
        bench.config,
        WorkerCalls(HeldCalls(10), bench.clock, spawn=asyncio.create_task, notify=lambda: None),
        bench.clock,
        open_on=bench.open_on,
        name="laptop",
        work=tmp_path,
        announce=lambda fetched, pause_s: None,
    )
    host.opened = OpenedEngine(engine=engine, weights=engine, until_up=engine.until_up)
    probing = asyncio.create_task(host.probe())
    await bench.until(lambda: engine.num_asked)
    await bench.clock.move(360.0)
    await probing
    engine.num_asked = -1  # from now on it takes too long
    probing = asyncio.create_task(host.probe())
    await bench.until(lambda: engine.num_asked == 0)
    await bench.clock.move(480.0)
    with pytest.raises(EngineBroken, match="no engine has been up for 120 s"):
        await probing
