"""vLLM engines before two real vLLM servers on this machine's CPU."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from rollover import cli
from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.logprob_check import check_logprobs
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.http.answer import Answer
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.dialect import VLLMDialect
from rollover.engine.servers.vllm.open import launch_arguments, open_vllm
from rollover.errors import EngineError
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests import runs
from tests.engine.contract import EngineContract, FullEngine, collect, request, tokens
from tests.kills import AGENTS, EPISODES, TREES, write_game
from tests.real.models import logprobs, real_model, reference, spelling
from tests.real.servers import (
    PATIENT,
    RealServer,
    assert_trained_as_drawn,
    decode_with,
    drawn_by_servers,
    engine_over,
    running,
    update,
)
from tests.run.test_train import EVERY_VERSION
from tests.speed import within

pytestmark = [pytest.mark.vllm, pytest.mark.real_time]

PYTHON = os.environ.get("VLLM_PYTHON", str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
COMMANDS = ((str(Path(PYTHON).with_name("vllm")), "serve"), (PYTHON, "-m", "vllm.entrypoints.cli.main", "serve"))
"""Both spellings, one for each of two servers."""
CONTEXT, ENDLESS = 8192, 8000
"""On a busy machine an abort takes seconds to get from the server's front end to what decodes: a call must not be over by
then."""
SHAPE = {"hidden_size": 512, "num_layers": 8, "intermediate_size": 2048, "max_position": CONTEXT}
"""So large that an iteration takes longer than the front end needs to hand out its tokens."""
ROUNDING = SHAPE["num_layers"] * SHAPE["hidden_size"] * 2.0**-24
"""Of a log-prob: float32 rounds at 6e-8 of its sums, which have ``hidden_size`` terms in each layer."""
ARGUMENTS = ("--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager", "--max-num-batched-tokens", "64")
"""With so few tokens a batch, prompts are prefilled in parts."""
ENV = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENV |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENV |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
"""The first of the last two leaves the worker in the engine's process, as on a GPU, so that one process less imports
PyTorch at a start; with the second nothing waits for a compiler."""
WATCHFUL = {"health_interval_s": 0.5, "health_timeout_s": 10.0, "rejoin_max_interval_s": 2.0}
MAX_RUNNING = 16
DEADLINE_S = within(900.0)
P = ParamSpec("P")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that differ in their weights only, and one of another shape."""
    root = tmp_path_factory.mktemp("real")
    return {
        "first": real_model(root / "first", **SHAPE),
        "second": real_model(root / "second", seed=1, **SHAPE),
        "misfit": real_model(root / "misfit", **SHAPE | {"hidden_size": 64}),
    }


@pytest.fixture(scope="session")
def servers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    logs = tmp_path_factory.mktemp("logs")
    made = [
        RealServer(
            lambda port, command=command: [  # type: ignore[misc]
                *command,
                *launch_arguments(
                    VLLMConfig(launch=True, launch_command=command, max_running=MAX_RUNNING), folders["first"], port
                ),
                *ARGUMENTS,
            ],
            ENV,
            logs / f"server-{number}.log",
        )
        for number, command in enumerate(COMMANDS)
    ]
    with running(made):
        yield made


def config_of(*servers: RealServer, **changes: Any) -> VLLMConfig:
    return VLLMConfig(
        urls=tuple(server.url for server in servers),
        max_running=MAX_RUNNING,
        **{**PATIENT, "stream_interval_tokens": 1, **changes},
    )


def engine_of(server: RealServer, folder: Path, **changes: Any) -> AbstractAsyncContextManager[ServerEngine]:
    return engine_over(VLLMDialect, server.url, folder, config_of(server, **changes))


@asynccontextmanager
async def pool_of(servers: list[RealServer], folder: Path, **changes: Any) -> AsyncIterator[EnginePool]:
    setup = EngineSetup(folder=folder, run="tests", root=Path("unused"), clock=SystemClock())
    pool = await open_vllm(config_of(*servers, **{**WATCHFUL, **changes}), setup)
    try:
        yield pool
    finally:
        await pool.close()


def within_deadline(law: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    @functools.wraps(law)
    async def timed(*args: P.args, **kwargs: P.kwargs) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await law(*args, **kwargs)

    return timed


async def decoded(engine: FullEngine, count: int) -> None:
    while engine.stats().decoded_tokens < count:
        await asyncio.sleep(0.01)


# -- the contract -------------------------------------------------------------------------------------------------


class TestVLLMThatKeepsItsCacheKeepsTheContract(EngineContract):
    """A server that recomputes ends its calls before new weights, so that it has fewer laws to keep."""

    deadline_s = DEADLINE_S
    endless = ENDLESS

    @pytest.fixture(autouse=True)
    def _use(self, servers: list[RealServer], folders: dict[str, Path]) -> None:
        self.server, self.folders = servers[0], folders

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        async with engine_of(self.server, self.folders["first"], kv_on_update="keep") as engine:
            yield engine

    def new_weights(self, version: int) -> WeightSource:
        return FolderWeights(version, self.folders["second"])

    def bad_weights(self) -> WeightSource:
        return FolderWeights(1, self.folders["misfit"])

    def text(self, ids: tuple[int, ...]) -> str | None:
        return spelling(self.folders["first"], ids)


# -- exactness ----------------------------------------------------------------------------------------------------


@within_deadline
async def test_log_probs_fit_each_version_and_temperature(servers: list[RealServer], folders: dict[str, Path]) -> None:
    async with engine_of(servers[0], folders["first"]) as engine:
        for version, name in ((0, "first"), (1, "second"), (2, "first")):
            await update(engine, version, folders[name])
            measured = await check_logprobs(engine, reference(folders[name]), tolerance=1e-4, remedy="")
            assert measured[1].raw > 0.05, "temperature makes a difference that would be seen"


@within_deadline
async def test_a_greedy_rollout_is_the_same_if_it_is_cut(servers: list[RealServer], folders: dict[str, Path]) -> None:
    async with engine_of(servers[0], folders["first"]) as engine:
        whole = tokens(await collect(engine, request("whole", max_new_tokens=40, temperature=0.0)))
        for cut in (1, 7, 20, 39):
            resumed = request("cut", call=cut, max_new_tokens=40, temperature=0.0, response_ids=whole[:cut])
            assert whole[:cut] + tokens(await collect(engine, resumed)) == whole


@within_deadline
async def test_an_update_beside_a_kept_cache_is_labelled(servers: list[RealServer], folders: dict[str, Path]) -> None:
    async with engine_of(servers[0], folders["first"], kv_on_update="keep") as engine:
        requests = [request(f"r{i}", seed=i, max_new_tokens=ENDLESS) for i in range(8)]
        calls = [asyncio.create_task(collect(engine, r)) for r in requests]
        await decoded(engine, 20 * len(calls))
        await update(engine, 1, folders["second"])
        await decoded(engine, engine.stats().decoded_tokens + 20 * len(calls))
        await engine.abort([r.request_id for r in requests])
        for call in calls:
            chunks = [c for c in await call if c.token_ids]
            old = [c for c in chunks if c.policy_version == 0]
            assert old and len(old) < len(chunks)
            expected = logprobs(folders["first"], (5, 6, 7), tokens(old), 1.0)
            assert [p for c in old for p in c.logprobs] == pytest.approx(expected, abs=ROUNDING)
            assert {c.kv_version for c in chunks} == {0}
        fresh = await collect(engine, request("fresh", max_new_tokens=20))
        expected = logprobs(folders["second"], (5, 6, 7), tokens(fresh), 1.0)
        assert [p for c in fresh for p in c.logprobs] == pytest.approx(expected, abs=ROUNDING)


LONG_PROMPT = tuple(range(2, 202))
"""Several batches long."""


@within_deadline
async def test_prompts_prefilled_in_parts_are_answered(servers: list[RealServer], folders: dict[str, Path]) -> None:
    """With a seed each they would kill the server; see below."""
    async with engine_of(servers[0], folders["first"]) as engine:
        calls = [request(f"r{i}", prompt_ids=(*LONG_PROMPT, i), seed=i, max_new_tokens=8) for i in range(32)]
        answers = await asyncio.gather(*(collect(engine, call) for call in calls))
        assert [len(tokens(chunks)) for chunks in answers] == [8] * 32
        expected = logprobs(folders["first"], (*LONG_PROMPT, 5), tokens(answers[5]), 1.0)
        assert [p for c in answers[5] for p in c.logprobs] == pytest.approx(expected, abs=ROUNDING)
        await engine.probe(decode=True)


@within_deadline
async def test_another_model_is_refused(servers: list[RealServer], folders: dict[str, Path], tmp_path: Path) -> None:
    larger = tmp_path / "larger"
    larger.mkdir()
    for file in folders["first"].iterdir():
        (larger / file.name).write_bytes(file.read_bytes())
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1000}))
    with pytest.raises(EngineError, match="is it another model"):
        async with engine_of(servers[0], larger):
            pass


# -- turns with a trainer -----------------------------------------------------------------------------------------


@within_deadline
async def test_who_only_claims_to_sleep_is_refused(servers: list[RealServer], folders: dict[str, Path]) -> None:
    why = f"{servers[0].url} cannot give its memory back to the trainer.*start it with --enable-sleep-mode, on a GPU"
    with pytest.raises(EngineError, match=why):
        async with engine_of(servers[0], folders["first"], colocated=True):
            pass


@within_deadline
async def test_it_sleeps_and_wakes_with_other_weights(servers: list[RealServer], folders: dict[str, Path]) -> None:
    """On a CPU it does all that it is asked for, but give memory back."""
    async with engine_of(servers[0], folders["first"]) as engine:
        for version, name in ((1, "second"), (2, "first")):
            await engine.sleep()
            assert (await engine._client.ask(Sleeping, "GET", "/is_sleeping")).is_sleeping
            await update(engine, version, folders[name])
            assert not (await engine._client.ask(Sleeping, "GET", "/is_sleeping")).is_sleeping
            await check_logprobs(engine, reference(folders[name]), tolerance=1e-4, remedy="")
        await engine.sleep()
    async with engine_of(servers[0], folders["second"]) as engine:  # left asleep by the one before
        await check_logprobs(engine, reference(folders["second"]), tolerance=1e-4, remedy="")


@within_deadline
async def test_a_server_that_should_sleep_on_a_cpu_does_not_start(folders: dict[str, Path], tmp_path: Path) -> None:
    config = VLLMConfig(launch=True, launch_command=COMMANDS[0], launch_args=ARGUMENTS, colocated=True, **PATIENT)
    with pytest.raises(EngineError, match=r"(?s)Sleep mode is not supported.*engine.colocated = true needs a GPU"):
        await open_vllm(config, EngineSetup(folder=folders["first"], run="tests", root=tmp_path, clock=SystemClock()))


class Sleeping(Answer):
    is_sleeping: bool


# -- servers that fail --------------------------------------------------------------------------------------------


async def start_calls(
    pool: EnginePool, count: int, length: int
) -> tuple[list[asyncio.Task[Any]], dict[str, list[Any]]]:
    """Calls of many prompts, and the chunks that have come of each."""
    received: dict[str, list[Any]] = {}

    async def one(name: str, number: int) -> None:
        async for chunk in pool.generate(request(name, prompt_ids=(number + 1, 5), seed=number, max_new_tokens=length)):
            received.setdefault(name, []).append(chunk)

    tasks = [asyncio.create_task(one(f"r{i}", i)) for i in range(count)]
    while len(received) < count:
        await asyncio.sleep(0.01)
    return tasks, received


async def finish_elsewhere(pool: EnginePool, tasks: list[Any], received: dict[str, list[Any]], length: int) -> int:
    """Resume what failed from its streamed prefix. Returns how many had to be."""
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [i for i, end in enumerate(ends) if end is not None]
    assert all(isinstance(ends[i], EngineError) for i in failed), ends

    async def whole(i: int) -> int:
        prefix = tokens(received[f"r{i}"])
        if i not in failed:
            return len(prefix)
        assert 0 < len(prefix) < length
        resumed = request(f"r{i}", call=1, prompt_ids=(i + 1, 5), seed=i, max_new_tokens=length, response_ids=prefix)
        return len(prefix + tokens(await collect(pool, resumed)))

    assert await asyncio.gather(*map(whole, range(len(tasks)))) == [length] * len(tasks)
    return len(failed)


async def until_back(pool: EnginePool, server: RealServer) -> None:
    """Wait until the pool has both servers again. vLLM itself now and then hangs after it was frozen: one that answers
    nobody is started anew, and the pool has to take that in."""
    for has_been_started_anew in (False, True):
        give_up_s = time.monotonic() + within(240.0)
        while pool.capabilities.max_running < 2 * MAX_RUNNING and time.monotonic() < give_up_s:
            await asyncio.sleep(0.1)
        if pool.capabilities.max_running == 2 * MAX_RUNNING:
            return
        assert not has_been_started_anew and not server.answers(), f"{server.url} is well, and left out"
        server.kill()
        server.start()
        await asyncio.to_thread(server.wait_until_ready)


async def assert_all_serve(pool: EnginePool, version: int, folder: Path) -> None:
    """Calls of several prompts at once, so that every server gets some, are sampled from ``folder``."""
    calls = [collect(pool, request(f"serve{i}", prompt_ids=(i + 1, 9))) for i in range(6)]
    for i, chunks in enumerate(await asyncio.gather(*calls)):
        assert {c.policy_version for c in chunks} == {version}
        expected = logprobs(folder, (i + 1, 9), tokens(chunks), 1.0)
        assert [p for c in chunks for p in c.logprobs] == pytest.approx(expected, abs=ROUNDING)


@within_deadline
async def test_a_frozen_server_costs_no_token_and_rejoins(servers: list[RealServer], folders: dict[str, Path]) -> None:
    async with pool_of(servers, folders["first"]) as pool:
        tasks, received = await start_calls(pool, 8, 400)
        servers[1].freeze()
        try:
            assert await finish_elsewhere(pool, tasks, received, 400) >= 4
            await update(pool, 1, folders["second"])
            assert pool.capabilities.max_running == MAX_RUNNING
        finally:
            servers[1].thaw()
        await until_back(pool, servers[1])
        await assert_all_serve(pool, 1, folders["second"])


@within_deadline
async def test_a_killed_server_costs_no_token_and_returns(servers: list[RealServer], folders: dict[str, Path]) -> None:
    async with pool_of(servers, folders["first"]) as pool:
        await update(pool, 1, folders["second"])
        tasks, received = await start_calls(pool, 8, 400)
        servers[1].kill()
        assert await finish_elsewhere(pool, tasks, received, 400) >= 4
        servers[1].start()
        await asyncio.to_thread(servers[1].wait_until_ready)
        while pool.capabilities.max_running < 2 * MAX_RUNNING:
            await asyncio.sleep(0.1)
        await assert_all_serve(pool, 1, folders["second"])


# -- a run --------------------------------------------------------------------------------------------------------

SIZES = ("--tasks.max_prompt_tokens", "32", "--rollout.max_new_tokens", "200", "--trainer.learning_rate", "1e-3")


def decode_by(servers: list[RealServer]) -> None:
    """Have the run in ``run.toml`` use these servers."""
    limits = {**PATIENT, "control_timeout_s": 60.0, "abort_timeout_s": 10.0, "logprob_tolerance": 1e-3}
    urls = [server.url for server in servers]
    decode_with({"kind": "vllm", "urls": urls, "max_running": 16, "stream_interval_tokens": 4, **WATCHFUL, **limits})


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_trains_what_a_server_samples(servers: list[RealServer], folders: dict[str, Path], tmp_path: Path) -> None:
    import datasets

    from tests.integrations.trl.kit import APRIL, distances, trainer

    engine = {"kind": "vllm", "urls": [servers[0].url], "max_running": MAX_RUNNING, "logprob_tolerance": 1e-3}
    trained = trainer(
        folders["first"],
        tmp_path,
        asked={**APRIL, "engine": {**PATIENT, **engine}},
        dataset=datasets.Dataset.from_list(
            [{"prompt": f"{i} {letter}", "answer": letter} for i, letter in enumerate("abcdefgh")]
        ),
        max_steps=3,
        max_completion_length=32,
        learning_rate=1e-4,
    )
    trained.train()
    assert [seen.batch.step for seen in trained.seen] == [0, 1, 2]
    trajectories = [t for seen in trained.seen for t in seen.batch.trajectories]
    # a fast server may finish all that was asked of one version before the next one is there
    assert {0} < {version for t in trajectories for version in t.policy_versions} <= {0, 1, 2}
    fresh, old = distances(trained.seen)
    assert len(fresh) > 500 and max(map(abs, fresh)) < 1e-3
    assert old and max(map(abs, old)) > 1e-3, "what older weights sampled is told from what new ones did"


@pytest.mark.parametrize("kind", [EPISODES, AGENTS, TREES], ids=["class", "agent", "tree"])
def test_episodes_go_through_servers(
    servers: list[RealServer], folders: dict[str, Path], tmp_path: Path, kind: tuple[str, ...]
) -> None:
    with runs.working_in(tmp_path, folders["first"]):
        write_game(Path())
        decode_by(servers)
        options = ("--steps", "3", "--rollout.group_size", "4", *EVERY_VERSION)
        with drawn_by_servers() as drawn:
            assert cli.main(["train", "run.toml", "--run-dir", "out", *SIZES, *kind, *options]) == 0
        trajectories = [t for batch in runs.batches(Path("out")) for t in batch.trajectories]
        assert max(sum(map(bool, t.turns)) for t in trajectories) > 1
        assert max(len(t.paths) for t in trajectories) == (5 if kind == TREES else 1)
        assert_trained_as_drawn(trajectories, drawn)
        assert runs.largest_logprob_error(Path("out"), Path("model"), trajectories) < 1e-3


def test_a_run_survives_a_frozen_and_a_killed_server(
    servers: list[RealServer], folders: dict[str, Path], tmp_path: Path
) -> None:
    with runs.working_in(tmp_path, folders["first"]):
        decode_by(servers)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rollover", "train", "run.toml", "--run-dir", str(run), *SIZES, "--steps", "8"]
    command += ["--checkpoint.every_steps", "20", "--engine.control_timeout_s", str(within(10.0))]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    with (tmp_path / "out.txt").open("wb") as out:
        training = subprocess.Popen(
            command, cwd=tmp_path, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": paths}
        )
    try:
        wait_for_step(training, run, 2)
        servers[1].freeze()  # in an update, as a rule: the other waits for it as long as control_timeout_s says
        wait_for_step(training, run, 4)
        servers[1].thaw()
        wait_for_step(training, run, 5)
        servers[1].kill()
        training.wait(DEADLINE_S)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, (tmp_path / "out.txt").read_text()
    ledger = runs.ledger(run)
    assert ledger.next_step == 8
    counted = ledger.tokens
    assert counted.decoded == counted.trained + counted.live + sum(counted.wasted.values())
    thrown_away = [cause for cause, num_tokens in counted.wasted.items() if num_tokens and cause.is_by_rollout]
    assert not thrown_away, "partial rollouts throw nothing away, whatever dies"
    resumed = [t for batch in runs.batches(run) for t in batch.trajectories if t.num_resumes]
    assert resumed, "some were cut and went on"
    assert len(runs.rows(run)) == 8


def wait_for_step(training: subprocess.Popen[bytes], run: Path, step: int) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while training.poll() is None and not ((run / "metrics.jsonl").exists() and len(runs.rows(run)) >= step):
        assert time.monotonic() < give_up_s, f"no step {step}"
        time.sleep(0.05)


@within_deadline
async def test_quirk_a_seeded_call_in_parts_kills_a_server(servers: list[RealServer], folders: dict[str, Path]) -> None:
    """The last test, because it leaves one server less."""
    try:
        async with engine_of(servers[0], folders["first"], seed_calls="always") as engine:
            assert len(tokens(await collect(engine, request("whole")))) == 12
            with pytest.raises(EngineError):
                await collect(engine, request("parts", prompt_ids=LONG_PROMPT))
    finally:
        servers[0].kill()
