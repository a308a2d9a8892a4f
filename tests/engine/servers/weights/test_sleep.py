"""Servers give their memory back for a step of the trainer and wake with the next weights, whatever befalls them asleep."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.sglang import open as sglang_open
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm import open as vllm_open
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.weights.ownership import Ownership
from rollover.engine.servers.weights.served import MemoryHeld
from rollover.errors import EngineError
from rollover.weights.publisher import Publisher
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, tokens
from tests.engine.servers.kit import RUN
from tests.engine.servers.pool.kit import Fleet, pool_of_two
from tests.engine.servers.scripted_server import Answer
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.weights.kit import FakeWeights

RELEASE = {vllm_kit: "/sleep", sglang_kit: "/release_memory_occupation"}
WORDS = {
    "/pause": "stand still",
    "/pause_generation": "stand still",
    "/update_weight_version": "label",
    "/sleep": "release",
    "/release_memory_occupation": "release",
    "/collective_rpc": "load",
    "/update_weights_from_disk": "load",
    "/resume": "go on",
    "/continue_generation": "go on",
}


def story(server: Any) -> list[str]:
    """What a server was told, as far as it is about memory and weights."""
    told = []
    for _, path, query, body in server.log:
        if path in ("/wake_up", "/resume_memory_occupation"):
            told.append(
                "take weights" if "weights" in (query.get("tags"), *((body or {}).get("tags", ()))) else "take cache"
            )
        elif path in WORDS:
            told.append(WORDS[path])
    return told


async def publish(engine: Any, folder: Path, version: int = 1) -> None:
    await Publisher(engine, timeout_s=10_000.0).publish(FolderWeights(version, folder))


async def test_weights_come_between_their_memory_and_the_caches(kind: ModuleType, folder: Path, new: Path) -> None:
    async with kind.serving(folder, colocated=True) as (engine, server):
        await engine.sleep()
        assert story(server) == ["stand still", "label", "release"]
        assert server.version == f"rollover:{RUN}:0:asleep" and server.asleep
        server.log.clear()
        call = asyncio.create_task(collect(engine, request("a")))
        await asyncio.sleep(100.0)
        assert not call.done() and not server.log  # nobody asks a server that sleeps for anything
        await publish(engine, new)
        with_it = ["label"] if kind is vllm_kit else []
        assert story(server) == ["take weights", "label", "load", *with_it, "take cache", "label", "go on"]
        assert server.version == f"rollover:{RUN}:1" and not server.asleep
        assert {chunk.policy_version for chunk in await call} == {1}
        assert server.weights == str(new) and not server.died


async def test_calls_that_run_are_stopped_before_their_cache_is_given_back(kind: ModuleType, folder: Path) -> None:
    async with kind.serving(folder, colocated=True) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=400)))
        await asyncio.sleep(0.2)
        await engine.sleep()
        assert 0 < len(tokens(await call)) < 400
        assert not server.died and server.asleep


async def test_a_server_that_cannot_give_its_memory_back_is_refused_at_once(kind: ModuleType, folder: Path) -> None:
    server = kind.Server()
    server.can_sleep = False
    option = "--enable-sleep-mode" if kind is vllm_kit else "--enable-memory-saver"
    with pytest.raises(EngineError, match=f"http://one cannot give its memory back.*start it with {option}"):
        await kind.make_engine(server, folder, colocated=True).open()
    await kind.make_engine(server, folder).open()  # one that has its own devices need not


@pytest.mark.parametrize("stage", ["asleep", "in a load"])
async def test_the_next_run_wakes_a_server_left_asleep(kind: ModuleType, folder: Path, new: Path, stage: str) -> None:
    server = kind.Server()
    killed = kind.make_engine(server, folder, colocated=True)
    await killed.open()
    await killed.sleep()
    assert server.version == f"rollover:{RUN}:0:asleep"
    if stage == "in a load":
        server.answer_once(server.load_path, Answer(500, {"error": {"message": "killed here"}}))
        with pytest.raises(EngineError, match="killed here"):
            await killed.load(1, FolderWeights(1, new))
        assert server.version == f"rollover:{RUN}:0:cacheless"
    with pytest.raises(EngineError, match="belongs to run ours"):
        await kind.make_engine(server, folder, ownership=Ownership("other")).open()
    async with kind.opened(server, folder) as following:  # one that has devices of its own wakes it too
        assert not server.asleep and not server.died and server.version == f"rollover:{RUN}:0"
        assert len(tokens(await collect(following, request("a")))) == 12


async def test_a_load_that_fails_while_it_wakes_can_be_tried_again(kind: ModuleType, folder: Path, new: Path) -> None:
    async with kind.serving(folder, colocated=True) as (engine, server):
        await engine.sleep()
        server.answer_once(server.load_path, Answer(500, {"error": {"message": "disk trouble"}}))
        with pytest.raises(EngineError, match="disk trouble"):
            await publish(engine, new)
        await publish(engine, new)
        assert not server.asleep and not server.died
        assert {chunk.policy_version for chunk in await collect(engine, request("a"))} == {1}


async def test_a_run_that_ends_asleep_leaves_the_server_free_and_asleep(kind: ModuleType, folder: Path) -> None:
    async with kind.serving(folder, colocated=True) as (engine, server):
        await engine.sleep()
    assert server.version == f"rollover:{RUN}:0:asleep:free" and server.asleep
    async with kind.opened(server, folder, colocated=True, ownership=Ownership("other")) as other:
        assert not server.asleep and server.version == "rollover:other:0"
        assert len(tokens(await collect(other, request("a")))) == 12


async def test_a_server_restarted_while_it_should_sleep_is_not_woken(kind: ModuleType, folder: Path, new: Path) -> None:
    async with kind.serving(folder, colocated=True) as (engine, server):
        await engine.sleep()
        server.restart()
        server.log.clear()
        await publish(engine, new)
        assert "take weights" not in story(server) and not server.died
        assert server.version == f"rollover:{RUN}:1"


class Process:
    """A server that we have started, given to its engine."""

    def __init__(self, server: Any, engine: ServerEngine) -> None:
        self.server, self.client = server, engine._client
        self.was_stopped = False
        engine._process = self

    async def start(self) -> None:
        self.server.restart()
        self.was_stopped = False

    async def gone(self) -> bool:
        return self.was_stopped

    async def stop(self) -> None:
        self.server.kill()
        self.was_stopped = True


@pytest.fixture
def fleet(kind: ModuleType, folder: Path) -> Fleet:
    return Fleet(kind, folder, colocated=True, control_timeout_s=5.0)


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
async def test_memory_that_may_still_be_held_ends_the_run_naming_the_server(fleet: Fleet, fault: str) -> None:
    other, holder = fleet.servers
    async with fleet:
        if fault == "hangs":
            holder.freeze()
        else:
            holder.answer_once(RELEASE[fleet.kind], Answer(500, {"error": {"message": "no such thing"}}))
        began_s = asyncio.get_running_loop().time()
        why = "did not answer" if fault == "hangs" else "no such thing"
        held = f"the trainer needs the memory of http://s1, which may still hold it.*{why}"
        with pytest.raises(MemoryHeld, match=held):
            await fleet.pool.sleep()
        assert asyncio.get_running_loop().time() - began_s <= 64.0
        assert other.asleep
        if fault == "refuses":
            assert not holder.asleep and holder.version == "rollover:any:0"
        holder.thaw()


async def test_a_server_that_does_not_sleep_is_stopped_and_started_again(fleet: Fleet, new: Path) -> None:
    one, two = fleet.servers
    processes = [Process(server, engine) for server, engine in zip(fleet.servers, fleet.engines, strict=True)]
    async with fleet:
        two.freeze()
        await fleet.pool.sleep()
        assert [process.was_stopped for process in processes] == [False, True]
        await asyncio.sleep(1000.0)
        assert processes[1].was_stopped  # it would take the memory that the trainer has
        await publish(fleet.pool, new)
        assert one.version == "rollover:any:1" and not one.asleep
        await asyncio.sleep(60.0)
        assert two.version == "rollover:any:1"
        assert fleet.pool.capabilities.max_running == 128


async def test_servers_that_die_asleep_return_with_the_next_weights(fleet: Fleet, new: Path) -> None:
    one, two = fleet.servers
    async with fleet:
        await fleet.pool.sleep()
        two.kill()
        await publish(fleet.pool, new)
        assert one.version == "rollover:any:1"
        chunks = [await collect(fleet.pool, request(f"r{i}", prompt_ids=(i + 1,))) for i in range(4)]
        assert {chunk.engine for call in chunks for chunk in call} == {"http://s0"}
        two.restart()
        await asyncio.sleep(60.0)
        assert two.version == "rollover:any:1"
        await fleet.pool.sleep()
        for server in fleet.servers:
            server.kill()
        publishing = asyncio.create_task(publish(fleet.pool, new, 2))
        await asyncio.sleep(20.0)
        assert not publishing.done()
        one.restart()
        await publishing
        assert one.version == "rollover:any:2"


async def test_nobody_comes_back_while_the_trainer_has_the_memory() -> None:
    async with pool_of_two() as (one, two, pool):
        two.failing = "ill"
        await asyncio.sleep(30.0)
        before = two.num_revivals
        await pool.sleep()
        two.failing = None
        await asyncio.sleep(1000.0)
        assert two.num_revivals == before
        assert [event for event, _ in one.events] == [event for event, _ in two.events][-1:] == ["sleep"]
        await Publisher(pool).publish(FakeWeights(1))
        assert one.version == 1
        await asyncio.sleep(60.0)
        assert two.version == 1 and two.num_revivals == before + 1


def test_a_server_is_started_so_that_it_can_sleep(folder: Path) -> None:
    for colocated_, count in ((True, 1), (False, 0)):
        vllm = VLLMConfig(launch=True, colocated=colocated_)
        assert vllm_open.launch_arguments(vllm, folder, 1).count("--enable-sleep-mode") == count
        sglang = SGLangConfig(launch=True, colocated=colocated_)
        assert sglang_open.launch_arguments(sglang, folder, 1).count("--enable-memory-saver") == count
        assert vllm.declared.is_colocated == sglang.declared.is_colocated == colocated_


@pytest.mark.parametrize(
    ("config", "opened", "said", "remedy"),
    [
        (VLLMConfig, vllm_open.open_vllm, "Sleep mode is not supported on current platform.", "needs a GPU"),
        (SGLangConfig, sglang_open.open_sglang, "No module named 'torch_memory_saver'", "needs the package"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_that_cannot_sleep_says_what_is_missing(
    folder: Path, tmp_path: Path, config: Any, opened: Any, said: str, remedy: str
) -> None:
    command = (sys.executable, "-c", f"raise SystemExit({said!r})")
    made = config(launch=True, colocated=True, launch_command=command)
    setup = EngineSetup(folder=folder, run="r", root=tmp_path, clock=SystemClock())
    with pytest.raises(EngineError, match=rf"(?s){said}.*\nengine\.colocated = true {remedy}") as raised:
        asyncio.run(opened(made, setup))
    assert "another environment" not in str(raised.value)
