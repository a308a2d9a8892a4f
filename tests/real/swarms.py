"""A swarm whose worker has a real server: what a worker over vLLM and one over SGLang have to do."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.logprob_check import check_logprobs
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.start import supervisor
from rollover.errors import EngineError
from rollover.run.worker import opener
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.joining import work_for
from tests.engine.contract import collect, request, tokens
from tests.real.models import TOLERANCE, logprobs, reference
from tests.speed import within
from tests.swarm.test_worker_real import swarm, weights

DEADLINE_S = within(600.0)
NUM_TRIES = 20
PROMPT = (5, 6, 7)
CONTEXT = 480
"""SGLang keeps some of the model's 512 for itself."""
WATCHFUL = {"health_interval_s": 0.5, "health_timeout_s": 20.0, "rejoin_max_interval_s": 2.0}
EMBEDDED = EmbeddedConfig(
    max_running=4, max_context_tokens=512, kv_cache_bytes=2**24, stream_interval_tokens=1, cpu_kernels="torch"
)


@asynccontextmanager
async def joined(
    engine: SwarmEngine, root: Path, name: str, config: ServerConfig | EmbeddedConfig
) -> AsyncIterator[list[str]]:
    """A worker of that name, until the end of the block; what it says."""
    token = Credentials(root / "swarm" / "workers.json").add(name, open_key(root / "swarm/publisher.key").public_key())
    lines: list[str] = []
    stops: list[Callable[[str], None]] = []
    settings = WorkerConfig(engine=config, update_timeout_s=DEADLINE_S)
    address = CoordinatorAddress.parse(engine.url)
    async with asyncio.TaskGroup() as group:  # a worker that ends early ends the test
        open_on = opener(settings, name=f"worker-{name}", root=root / name)
        working = work_for(address, token, settings, open_on, root / name, None, "test", lines.append, stops.append)
        running = group.create_task(working)
        yield lines
        stops[0]("done")
        await running


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"it never came that {what}")


def servers_of(root: Path) -> list[int]:
    """The process groups of the servers that were started on a folder below ``root``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if supervisor.__file__.encode() in words and any(word.startswith(os.fsencode(root)) for word in words):
            found.append(int(process.name))
    return found


def engines_of(chunks: list[Chunk]) -> set[str]:
    return {chunk.engine for chunk in chunks if chunk.token_ids}


def assert_of(model: Path, before: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Their log-probs are those of the model."""
    reported = [p for chunk in chunks for p in chunk.logprobs]
    assert reported == pytest.approx(logprobs(model, PROMPT + before, tokens(chunks), 1.0), abs=TOLERANCE)


async def gather_into(chunks: list[Chunk], engine: SwarmEngine, call: GenerateRequest) -> None:
    """What has come of the call so far can be looked at."""
    async for chunk in engine.generate(call):
        chunks.append(chunk)


async def update(engine: SwarmEngine, version: int, model: Path) -> None:
    await engine.pause()
    try:
        await engine.load(version, weights(version, model))
    finally:
        await engine.resume()


async def check_worker(config: ServerConfig, models: list[Path], root: Path) -> None:
    """Calls, weights in full and by delta, a response that two engines make, a server that is killed, a clean end."""
    async with (
        asyncio.timeout(DEADLINE_S),
        swarm(root / "swarm", models[0], mode="pull", max_context_tokens=CONTEXT, lease_s=60.0) as engine,
    ):
        async with joined(engine, root, "server", config) as lines:
            await until(lambda: any("serving version 0" in line for line in lines), "it serves version 0")
            assert len(servers_of(root / "server")) == 1
            await check_logprobs(engine, reference(models[0]), tolerance=TOLERANCE, remedy="")
            await check_updates(engine, models)
            await check_resumption(engine, models[0], root)
            await check_death(engine, models[0], root)
            assert len(servers_of(root / "server")) == 1
        assert "left the swarm" in lines, lines
        assert servers_of(root / "server") == []
        assert engine.coordinator.members["server"].distrust == ""


async def check_updates(engine: SwarmEngine, models: list[Path]) -> None:
    """Weights change while calls run; each token is of the version that it says, to the log-prob."""
    running = [
        asyncio.create_task(collect(engine, request(f"over{i}", seed=i, max_new_tokens=400, temperature=1.0)))
        for i in range(4)
    ]
    await until(lambda: engine.stats().decoded_tokens > 40, "calls are under way")
    for version, model in ((1, models[1]), (2, models[0])):
        await update(engine, version, model)
        chunks = await collect(engine, request(f"fresh{version}", prompt_ids=PROMPT, max_new_tokens=20))
        assert {chunk.policy_version for chunk in chunks} == {version}
        assert_of(model, (), chunks)
        await check_logprobs(engine, reference(model), tolerance=TOLERANCE, remedy="")
    for ends in await asyncio.gather(*running, return_exceptions=True):
        assert not isinstance(ends, BaseException) or isinstance(ends, EngineError), ends


async def parked(engine: SwarmEngine) -> tuple[str, list[Chunk]]:
    """A sample that was stopped on its way, and what it has.

    While a server decodes on two cores, this process may not run for seconds. A call that is over when it looks at it
    shows nothing, and another one is made; so is it with a server that is to be killed in a call.
    """
    for name in (f"parked{number}" for number in range(NUM_TRIES)):
        chunks: list[Chunk] = []
        asked = request(name, prompt_ids=PROMPT, max_new_tokens=400)
        call = await under_way(chunks, engine, asked)
        await engine.abort([asked.request_id])
        await call
        assert engines_of(chunks) == {"server"}
        if chunks[-1].finish_reason == "abort":
            return name, chunks
    pytest.fail("no call was stopped on its way")


async def under_way(chunks: list[Chunk], engine: SwarmEngine, call: GenerateRequest) -> asyncio.Task[None]:
    running = asyncio.create_task(gather_into(chunks, engine, call))
    await until(lambda: len(tokens(chunks)) > 20, "the call is under way")
    return running


async def check_resumption(engine: SwarmEngine, model: Path, root: Path) -> None:
    """A prefix that was parked goes on with another member, another engine, and comes back."""
    name, first = await parked(engine)
    prefix = tokens(first)
    assert_of(model, (), first)
    async with joined(engine, root, "embedded", EMBEDDED) as lines:
        await until(lambda: any("serving version 2" in line for line in lines), "the other member serves")
        engines = set()
        limit = len(prefix)
        for number in range(1, 9):  # whoever is given the call goes on behind the same prefix
            limit += 10
            again = request(name, call=number, prompt_ids=PROMPT, response_ids=prefix, max_new_tokens=limit)
            chunks = await collect(engine, again)
            assert_of(model, prefix, chunks)
            prefix += tokens(chunks)
            engines |= engines_of(chunks)
        others = [collect(engine, request(f"both{i}", prompt_ids=(*PROMPT, i), max_new_tokens=30)) for i in range(12)]
        engines |= engines_of([chunk for chunks in await asyncio.gather(*others) for chunk in chunks])
        assert engines == {"server", "embedded"}


async def check_death(engine: SwarmEngine, model: Path, root: Path) -> None:
    """A server that dies costs no token that had come; its worker starts another and gives it the weights."""
    for attempt in range(NUM_TRIES):
        (server,) = servers_of(root / "server")
        begun: list[Chunk] = []
        call = await under_way(begun, engine, request(f"dying{attempt}", prompt_ids=PROMPT, max_new_tokens=400))
        os.killpg(server, signal.SIGKILL)
        (ending,) = await asyncio.gather(call, return_exceptions=True)
        assert_of(model, (), begun)
        await until(lambda server=server: servers_of(root / "server") not in ([], [server]), "another is started")
        chunks: list[Chunk] = []
        for number in itertools.count():  # while nobody knows yet that it is away, it is given calls, which then end
            with suppress(EngineError):
                after = request(f"after{attempt}", call=number, prompt_ids=PROMPT, max_new_tokens=20)
                chunks = await collect(engine, after)
                break
        assert {chunk.policy_version for chunk in chunks} == {2}
        assert_of(model, (), chunks)
        if isinstance(ending, EngineError):
            return
        assert ending is None and begun[-1].finish_reason is not None
    pytest.fail("no server was killed in a call")
