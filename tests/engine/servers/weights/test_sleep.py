"""Servers give their memory back for a step of the trainer and wake with the next weights, whatever befalls them asleep."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.pool.pool import EnginePool
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
from tests.engine.servers.pool.kit import new_pool, pool_of_two, scripted_engines
from tests.engine.servers.scripted_server import Answer
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import model_folder
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


def folder_of(path: Path, version: int) -> FolderWeights:
    return FolderWeights(version, model_folder(path / f"v{version}"))


def colocated(kind: ModuleType, server: Any, folder: Path, **changes: Any) -> ServerEngine:
    engine: ServerEngine = kind.make_engine(server, folder, colocated=True, **changes)
    return engine


async def publish(engine: Any, source: FolderWeights) -> None:
    await Publisher(engine, timeout_s=10_000.0).publish(source)


async def test_weights_come_between_their_memory_and_that_of_the_cache(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server()
    engine = colocated(kind, server, model_folder(tmp_path / "v0"))
    assert engine.capabilities.is_colocated
    await engine.open()
    server.log.clear()
    await engine.sleep()
    assert story(server) == ["stand still", "label", "release"]
    assert server.version == f"rollover:{RUN}:0:asleep" and server.asleep
    server.log.clear()
    call = asyncio.create_task(collect(engine, request("a")))
    await asyncio.sleep(100.0)
    assert not call.done() and not server.log  # nobody asks a server that sleeps for anything
    await publish(engine, folder_of(tmp_path, 1))
    with_it = ["label"] if kind is vllm_kit else []
    assert story(server) == ["take weights", "label", "load", *with_it, "take cache", "label", "go on"]
    assert server.version == f"rollover:{RUN}:1" and not server.asleep
    assert {chunk.policy_version for chunk in await call} == {1}
    assert server.weights == str((tmp_path / "v1").resolve())
    assert not server.died
    await engine.close()


async def test_calls_that_run_are_stopped_before_their_cache_is_given_back(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server()
    async with kind.opened(server, model_folder(tmp_path / "v0"), colocated=True) as engine:
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=400)))
        await asyncio.sleep(0.2)
        await engine.sleep()
        assert 0 < len(tokens(await call)) < 400
        assert not server.died and server.asleep


async def test_a_server_that_cannot_give_its_memory_back_is_refused_at_once(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server()
    server.can_sleep = False
    option = "--enable-sleep-mode" if kind is vllm_kit else "--enable-memory-saver"
    with pytest.raises(EngineError, match=f"http://one cannot give its memory back.*start it with {option}"):
        await colocated(kind, server, model_folder(tmp_path / "v0")).open()
    await kind.make_engine(server, tmp_path / "v0").open()  # one that has its own devices need not


@pytest.mark.parametrize("stage", ["asleep", "in a load"])
async def test_the_next_run_wakes_a_server_that_a_killed_run_has_left_asleep(
    kind: ModuleType, tmp_path: Path, stage: str
) -> None:
    server, folder = kind.Server(), model_folder(tmp_path / "v0")
    killed = colocated(kind, server, folder)
    await killed.open()
    await killed.sleep()
    assert server.version == f"rollover:{RUN}:0:asleep"
    if stage == "in a load":
        load = "/collective_rpc" if kind is vllm_kit else "/update_weights_from_disk"
        server.answer_once(load, Answer(500, {"error": {"message": "killed here"}}))
        with pytest.raises(EngineError, match="killed here"):
            await killed.load(1, folder_of(tmp_path, 1))
        assert server.version == f"rollover:{RUN}:0:cacheless"
    with pytest.raises(EngineError, match="belongs to run ours"):
        await kind.make_engine(server, folder, ownership=Ownership("other")).open()
    following = kind.make_engine(server, folder)  # one that has devices of its own wakes it too
    await following.open()
    assert not server.asleep and not server.died and server.version == f"rollover:{RUN}:0"
    assert len(tokens(await collect(following, request("a")))) == 12
    await following.close()


async def test_a_load_that_fails_while_it_wakes_can_be_tried_again(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server()
    async with kind.opened(server, model_folder(tmp_path / "v0"), colocated=True) as engine:
        await engine.sleep()
        load = "/collective_rpc" if kind is vllm_kit else "/update_weights_from_disk"
        server.answer_once(load, Answer(500, {"error": {"message": "disk trouble"}}))
        with pytest.raises(EngineError, match="disk trouble"):
            await publish(engine, folder_of(tmp_path, 1))
        await publish(engine, folder_of(tmp_path, 1))
        assert not server.asleep and not server.died
        assert {chunk.policy_version for chunk in await collect(engine, request("a"))} == {1}


async def test_a_run_that_ends_asleep_leaves_the_server_free_and_asleep(kind: ModuleType, tmp_path: Path) -> None:
    server, folder = kind.Server(), model_folder(tmp_path / "v0")
    engine = colocated(kind, server, folder)
    await engine.open()
    await engine.sleep()
    await engine.close()
    assert server.version == f"rollover:{RUN}:0:asleep:free" and server.asleep
    other = colocated(kind, server, folder, ownership=Ownership("other"))
    await other.open()
    assert not server.asleep and server.version == "rollover:other:0"
    assert len(tokens(await collect(other, request("a")))) == 12
    await other.close()


async def test_a_server_restarted_while_it_should_sleep_is_not_woken(kind: ModuleType, tmp_path: Path) -> None:
    server = kind.Server()
    async with kind.opened(server, model_folder(tmp_path / "v0"), colocated=True) as engine:
        await engine.sleep()
        server.restart()
        server.log.clear()
        await publish(engine, folder_of(tmp_path, 1))
        assert "take weights" not in story(server) and not server.died
        assert server.version == f"rollover:{RUN}:1"


class Process:
    """A server that we have started."""

    def __init__(self, server: Any, client: HTTPClient) -> None:
        self.server, self.client = server, client
        self.was_stopped = False

    async def start(self) -> None:
        self.server.restart()
        self.was_stopped = False

    async def gone(self) -> bool:
        return self.was_stopped

    async def stop(self) -> None:
        self.server.kill()
        self.was_stopped = True


LIMITS = {"control_timeout_s": 5.0, "abort_timeout_s": 4.0, "load_timeout_s": 40.0}


@asynccontextmanager
async def opened_pool(
    kind: ModuleType, folder: Path, *, is_launched: bool = False, **limits: float
) -> AsyncIterator[tuple[dict[str, Any], EnginePool, list[Process]]]:
    """Two servers, a pool over them, and the processes that they are if they were started here."""
    servers = {"s0": kind.Server(), "s1": kind.Server()}
    engines: list[Any] = [*scripted_engines(kind, servers, folder, colocated=True, **limits)]
    processes = [Process(server, engine._client) for server, engine in zip(servers.values(), engines, strict=True)]
    pool = new_pool(engines, FolderWeights(0, folder), **limits)
    for engine, process in zip(engines, processes, strict=True):
        if is_launched:
            engine._process = process
        await engine.open()
    await pool.open()
    yield servers, pool, processes
    await pool.close()


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
async def test_memory_that_may_still_be_held_ends_the_run_naming_the_server(
    kind: ModuleType, folder: Path, fault: str
) -> None:
    async with opened_pool(kind, folder, **LIMITS) as (servers, pool, _):
        if fault == "hangs":
            servers["s1"].freeze()
        else:
            servers["s1"].answer_once(RELEASE[kind], Answer(500, {"error": {"message": "no such thing"}}))
        began_s = asyncio.get_running_loop().time()
        why = "did not answer" if fault == "hangs" else "no such thing"
        held = f"the trainer needs the memory of http://s1, which may still hold it.*{why}"
        with pytest.raises(MemoryHeld, match=held):
            await pool.sleep()
        assert asyncio.get_running_loop().time() - began_s <= 64.0
        assert servers["s0"].asleep
        if fault == "refuses":
            assert not servers["s1"].asleep and servers["s1"].version == "rollover:any:0"
        servers["s1"].thaw()


async def test_a_server_that_does_not_sleep_is_stopped_and_started_again(
    kind: ModuleType, folder: Path, tmp_path: Path
) -> None:
    async with opened_pool(kind, folder, is_launched=True, **LIMITS) as (servers, pool, processes):
        servers["s1"].freeze()
        await pool.sleep()
        assert [process.was_stopped for process in processes] == [False, True]
        await asyncio.sleep(1000.0)
        assert processes[1].was_stopped  # it would take the memory that the trainer has
        await publish(pool, folder_of(tmp_path, 1))
        assert servers["s0"].version == "rollover:any:1" and not servers["s0"].asleep
        await asyncio.sleep(60.0)
        assert servers["s1"].version == "rollover:any:1"
        assert pool.capabilities.max_running == 128


async def test_servers_that_die_asleep_return_with_the_next_weights(
    kind: ModuleType, folder: Path, tmp_path: Path
) -> None:
    async with opened_pool(kind, folder) as (servers, pool, _):
        await pool.sleep()
        servers["s1"].kill()
        await publish(pool, folder_of(tmp_path, 1))
        assert servers["s0"].version == "rollover:any:1"
        chunks = [await collect(pool, request(f"r{i}", prompt_ids=(i + 1,))) for i in range(4)]
        assert {chunk.engine for call in chunks for chunk in call} == {"http://s0"}
        servers["s1"].restart()
        await asyncio.sleep(60.0)
        assert servers["s1"].version == "rollover:any:1"
        await pool.sleep()
        for server in servers.values():
            server.kill()
        publishing = asyncio.create_task(publish(pool, folder_of(tmp_path, 2)))
        await asyncio.sleep(20.0)
        assert not publishing.done()
        servers["s0"].restart()
        await publishing
        assert servers["s0"].version == "rollover:any:2"


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


def test_a_server_is_started_so_that_it_can_sleep(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    for colocated_, count in ((True, 1), (False, 0)):
        vllm = VLLMConfig(launch=True, colocated=colocated_)
        assert vllm_open.launch_arguments(vllm, folder, 1).count("--enable-sleep-mode") == count
        sglang = SGLangConfig(launch=True, colocated=colocated_)
        assert sglang_open.launch_arguments(sglang, folder, 1).count("--enable-memory-saver") == count
        assert vllm.declared.is_colocated == sglang.declared.is_colocated == colocated_


def test_a_cache_that_is_to_be_kept_cannot_be_given_back() -> None:
    for kind in (vllm_kit, sglang_kit):
        with pytest.raises(ValueError, match="kv_on_update = 'keep' does not work with colocated = true"):
            kind.settings(colocated=True, kv_on_update="keep")


@pytest.mark.parametrize(
    ("config", "opened", "said", "remedy"),
    [
        (VLLMConfig, vllm_open.open_vllm, "Sleep mode is not supported on current platform.", "needs a GPU"),
        (SGLangConfig, sglang_open.open_sglang, "No module named 'torch_memory_saver'", "needs the package"),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_that_cannot_sleep_says_what_is_missing(
    tmp_path: Path, config: Any, opened: Any, said: str, remedy: str
) -> None:
    command = (sys.executable, "-c", f"raise SystemExit({said!r})")
    made = config(launch=True, colocated=True, launch_command=command)
    setup = EngineSetup(folder=model_folder(tmp_path / "model"), run="r", root=tmp_path, clock=SystemClock())
    with pytest.raises(EngineError, match=rf"(?s){said}.*\nengine\.colocated = true {remedy}") as raised:
        asyncio.run(opened(made, setup))
    assert "another environment" not in str(raised.value)
