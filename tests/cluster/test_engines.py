"""Engine servers on a cluster: placed, watched, placed again, and never left behind. A node with a server is lost in
``test_whole.py``."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.clock import SystemClock
from rollover.cluster import files
from rollover.cluster.config import ClusterConfig, EngineGroup
from rollover.cluster.connect import connect
from rollover.cluster.engines import ClusterEngines
from rollover.engine.base import Chunk
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.open import open_vllm
from rollover.errors import ConfigError
from rollover.run.engine import check_places
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.weights.sources import FolderWeights
from tests.cluster.conftest import cluster_has
from tests.engine.contract import collect, request
from tests.engine.servers.start.test_launch import wait_until_dead
from tests.engine.servers.vllm.kit import model_folder
from tests.speed import within

DEADLINE_S = within(60.0)
NUMBERS = itertools.count()
TRAINER = TrainerConfig(num_devices=2, device="cpu")
ENGINE = VLLMConfig(
    launch=True,
    launch_command=(sys.executable, "-m", "tests.cluster.vllm_program", "serve"),
    launch_timeout_s=within(20.0),
    stop_timeout_s=5.0,
    health_interval_s=0.3,
    health_timeout_s=within(2.0),
    rejoin_max_interval_s=1.0,
    max_running=8,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "v0")


@asynccontextmanager
async def opened(cluster: Any, folder: Path, config: ClusterConfig, **more: Any) -> AsyncIterator[EnginePool]:
    pool = await open_pool(cluster, folder, config, **more)
    try:
        yield pool
    finally:
        await pool.close()


async def open_pool(
    cluster: Any,
    folder: Path,
    config: ClusterConfig,
    *,
    run: str = "run",
    engine: VLLMConfig = ENGINE,
    probe: Path | None = None,
) -> EnginePool:
    notes = folder.parent / "notes"
    notes.mkdir(exist_ok=True)
    env = {"PROGRAM_NOTES": str(notes), "PYTHONPATH": str(Path(__file__).parents[2])}
    config = replace(config, address=cluster.address)
    connect(config)
    logs = folder.parent / "logs"
    places = ClusterEngines(config, engine, run=run, logs=logs, model=folder, probe=probe, remedy="share it")

    async def placed(config: VLLMConfig, folder: Path) -> ClusterEngines:
        return places

    setup = EngineSetup(folder=folder, run=run, root=folder.parent, clock=SystemClock(), places=placed)
    return await open_vllm(replace(engine, launch_env=env), setup)


async def decoded(pool: EnginePool) -> list[Chunk]:
    """All chunks of some calls at once."""
    names = [f"r{next(NUMBERS)}" for _ in range(8)]
    calls = await asyncio.gather(*(collect(pool, request(name)) for name in names))
    return [chunk for chunks in calls for chunk in chunks]


def pids(folder: Path) -> dict[int, int]:
    """List the process ids of all servers that were ever started, by port."""
    notes = (folder.parent / "notes").glob("*.pid")
    return {int(file.stem): int(text) for file in notes if (text := file.read_text())}  # one may be empty as yet


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.05)


def leftovers(run: str) -> list[str]:
    """List the keepers of a run, those too that wait for a place."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith(f"rollover-{run}-")]


@pytest.mark.real_time
async def test_servers_of_uneven_groups_are_placed_by_resources_and_none_is_left(cluster: Any, folder: Path) -> None:
    groups = (
        EngineGroup(count=1, max_running=4, resources={"one": 1.0}),
        EngineGroup(count=1, max_running=16, resources={"two": 1.0}, args=("--tensor-parallel-size", "2")),
    )
    async with opened(cluster, folder, ClusterConfig(engines=groups)) as pool:
        assert pool.capabilities.max_running == 20
        assert {chunk.engine for chunk in await decoded(pool)} == {"engine-0", "engine-1"}
        await until(lambda: all("serving on" in log(folder, n) for n in (0, 1)))
    for pid in pids(folder).values():
        wait_until_dead(pid)
    await until(lambda: leftovers("run") == [])
    arguments = sorted(file.read_text() for file in (folder.parent / "notes").glob("*.arguments"))
    assert len(arguments) == 2 and sum("--max-num-seqs 16" in a and "--tensor-parallel-size 2" in a for a in arguments)
    assert not any("api" in a or "key" in a.lower() for a in arguments)


def log(folder: Path, number: int) -> str:
    file = folder.parent / "logs" / f"engine-{number}.log"
    return file.read_text() if file.exists() else ""


@pytest.mark.real_time
async def test_a_server_that_dies_is_placed_again_and_given_current_weights(cluster: Any, folder: Path) -> None:
    second = model_folder(folder.parent / "v1")
    async with opened(cluster, folder, ClusterConfig(engines=2)) as pool:
        await pool.pause()
        await pool.load(4, FolderWeights(4, second))
        await pool.resume()
        for kill in (kill_a_server, kill_a_keeper):
            num_started = len(pids(folder))
            kill(folder)
            await until(lambda: pool.capabilities.max_running == 8)
            await until(lambda: pool.capabilities.max_running == 16)
            chunks = await decoded(pool)
            assert {c.policy_version for c in chunks} == {4}
            assert {c.engine for c in chunks} == {"engine-0", "engine-1"}
            assert len(pids(folder)) == num_started + 1
    for pid in pids(folder).values():
        wait_until_dead(pid)


def kill_a_server(folder: Path) -> None:
    os.kill(min(pids(folder).values()), signal.SIGKILL)


def kill_a_keeper(folder: Path) -> None:
    import ray

    name = next(n["name"] for n in ray.util.list_named_actors(all_namespaces=True) if "engine-0" in n["name"])
    ray.kill(ray.get_actor(name))


def test_servers_and_ranks_are_counted_together(cluster: Any) -> None:
    config = ClusterConfig(
        address=cluster.address, engines=3, engine_resources={"one": 1.0}, trainer_resources={"one": 1.0}
    )
    gloo = EmbeddedServerConfig(launch=True, weight_transfer="gloo")
    lines = check_places(replace(config, engines=2), TRAINER, ENGINE)
    assert lines[0] == "server engine-0 to engine-1: each CPU 1, one 1 of a node, up to 8 samples at a time"
    assert "the nodes of all servers must see under the same path" in lines[1]
    sent = check_places(replace(config, engines=2), TRAINER, gloo)
    assert sent[-1].endswith("must have the same path on their nodes")
    adapters = replace(TRAINER, lora=LoraConfig(publish="adapter"))
    sent = check_places(replace(config, engines=2), adapters, gloo)
    assert sent[-1].startswith("weights reach the servers through a folder")
    with pytest.raises(ConfigError, match=r"have room for \d of 5"):
        check_places(config, TRAINER, ENGINE)


def test_servers_without_a_place_are_refused(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'extends = "quickstart"\n[engine]\nkind = "embedded_server"\nlaunch = true\n'
        f'[cluster]\naddress = "{cluster.address}"\nengines = 1\nengine_resources = {{ h20 = 1 }}\n'
    )
    for more in (["--dry-run"], ["--run-dir", str(tmp_path / "out")]):
        assert cli.main(["train", str(file), *more]) == 2
        assert "cluster.engines: engine-0 needs CPU 1, h20 1, but" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.real_time
async def test_a_node_without_a_folder_is_named(cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of this machine see the folders; the driver is given other digests."""
    probe = folder.parent / "probe"
    probe.write_bytes(b"there")
    real = files.sampled_digest

    def other(name: str) -> Callable[[Path], str]:
        return lambda path: "other" if path.name == name else real(path)

    for name, message in (("config.json", "v0: put the model"), ("probe", r"\(probe\): share it")):
        monkeypatch.setattr(files, "sampled_digest", other(name))
        with pytest.raises(ConfigError, match=rf"node [\d.]+, the place of engine-0, does not see .*{message}"):
            await open_pool(cluster, folder, ClusterConfig(engines=1), probe=probe)
    await until(lambda: leftovers("run") == [])
    assert pids(folder) == {}


@contextmanager
def driver(config: ClusterConfig, folder: Path, *, run: str) -> Iterator[subprocess.Popen[str]]:
    """A process that opens servers and says when they decode; it is killed in the end."""
    program = f"""
import asyncio
from pathlib import Path
from types import SimpleNamespace
from rollover.cluster.config import ClusterConfig, EngineGroup
from tests.cluster.test_engines import decoded, opened
async def main():
    config, folder = {config!r}, Path({str(folder)!r})
    async with opened(SimpleNamespace(address=config.address), folder, config, run={run!r}) as pool:
        await decoded(pool)
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_servers_end_with_their_driver_also_one_that_waits_for_room(cluster: Any, folder: Path) -> None:
    groups = (EngineGroup(), EngineGroup(resources={"two": 4.0}))
    config = ClusterConfig(address=cluster.address, engines=groups)
    ray = connect(config)
    other = ray.remote(Occupant).options(num_cpus=0, resources={"two": 4}).remote()
    ray.get(other.is_there.remote(), timeout=DEADLINE_S)
    with driver(config, folder, run="left") as process:
        asyncio.run(until(lambda: (len(leftovers("left")) == 2 and pids(folder) != {}) or process.poll() is not None))
        assert process.poll() is None
    ray.kill(other)
    (pid,) = pids(folder).values()
    wait_until_dead(pid)
    asyncio.run(until(lambda: leftovers("left") == []))
    asyncio.run(until(lambda: cluster_has(cluster, CPU=8, two=4)))
    assert len(pids(folder)) == 1


class Occupant:
    """Takes a place on a node."""

    def is_there(self) -> bool:
        return True
