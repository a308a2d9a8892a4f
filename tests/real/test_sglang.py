"""SGLang engines before a real SGLang server on a CPU: ``make test-sglang``.

The peculiarities that the engine is built around are tests as well: one that fails after an upgrade of SGLang says what
has changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import RootModel

from rollover import cli
from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.logprob_check import check_logprobs
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient, Patience
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.dialect import SGLangDialect
from rollover.engine.servers.sglang.open import open_sglang
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.environments.rewards import JudgeConfig
from rollover.environments.rewards.base import RewardSpec
from rollover.environments.scorer import RewardScorer
from rollover.errors import EngineError
from rollover.kept_codec import mean_kept
from rollover.trainer.logprobs import all_logprobs
from rollover.trainer.models import open_model
from rollover.trainer.packing import TrainingSample, pack
from rollover.types import FinishReason, Score
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights
from tests import runs
from tests.engine.contract import EngineContract, FullEngine, collect, request, tokens
from tests.engine.contract import request as call
from tests.engine.servers.vllm.kit import model_folder
from tests.environments.test_scorer import prompt, trajectory
from tests.environments.words import char_tokenizer
from tests.kills import AGENTS, EPISODES, TREES, write_game
from tests.real.models import TOLERANCE, logprobs, real_model, reference, spelling
from tests.real.servers import (
    PATIENT,
    assert_trained_as_drawn,
    decode_with,
    drawn_by_servers,
    engine_over,
    running,
    update,
)
from tests.real.sglang_server import ARGUMENTS, COMMAND, ENV, SLOTS, sglang_server
from tests.run.test_train import EVERY_VERSION
from tests.speed import within

pytestmark = [pytest.mark.sglang, pytest.mark.real_time]

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape."""
    root = tmp_path_factory.mktemp("models")
    made = real_model(root / "v0", seed=0), real_model(root / "v1", seed=1)
    (made[0] / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return made


@pytest.fixture(scope="module")
def urls(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Of two servers, which start side by side: the second streams increments."""
    logs = tmp_path_factory.mktemp("logs")
    made = [
        sglang_server(folders[0], logs / f"server-{number}.log", *arguments)
        for number, arguments in enumerate([(), ("--incremental-streaming-output",)])
    ]
    with running(made):
        yield [server.url for server in made]


@pytest.fixture
def url(urls: list[str]) -> str:
    return urls[0]


def config_of(url: str, **settings: Any) -> SGLangConfig:
    return SGLangConfig(
        **{"urls": (url,), "max_running": SLOTS, "stream_interval_tokens": 1, **PATIENT, **settings}  # type: ignore[arg-type]
    )


def opened(url: str, folder: Path, **settings: Any) -> AbstractAsyncContextManager[ServerEngine]:
    return engine_over(SGLangDialect, url, folder, config_of(url, **settings))


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[HTTPClient]:
    """For calls that the engine would not make; the server is left as it was found."""
    client = HTTPClient(url, config_of(url))
    try:
        async with asyncio.timeout(within(600)):
            yield client
    finally:
        await client.call("POST", "/continue_generation", body={})
        await client.call("POST", "/abort_request", body={"rid": "", "abort_all": True})
        await client.close()


# -- the contract ------------------------------------------------------------------------------------------------


class SGLang(EngineContract):
    deadline_s = 900.0
    gives_kept = True
    endless = 500
    server = 0
    stream_interval_tokens = 1

    @pytest.fixture(autouse=True)
    def _server(self, urls: list[str], folders: tuple[Path, Path], tmp_path: Path) -> None:
        self.url = urls[self.server]
        self.initial, self.fitting = folders
        self.misfit = model_folder(tmp_path / "misfit")

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[FullEngine]:
        settings = {"stream_interval_tokens": self.stream_interval_tokens}
        async with opened(self.url, self.initial, **settings) as engine:
            yield engine

    def new_weights(self, version: int) -> WeightSource:
        return FolderWeights(version, self.fitting)

    def bad_weights(self) -> WeightSource:
        return FolderWeights(1, self.misfit)

    def text(self, ids: tuple[int, ...]) -> str | None:
        return spelling(self.initial, ids)


class TestSGLangThatRecomputesKeepsTheContract(SGLang):
    pass


class TestSGLangThatStreamsIncrementsInPiecesKeepsTheContract(SGLang):
    server = 1
    stream_interval_tokens = 4


# -- exactness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_k": 64, "top_p": 0.9}, {"top_k": 64, "min_p": 0.1}])
async def test_log_probs_are_those_among_the_kept_sets(
    urls: list[str], folders: tuple[Path, Path], server: int, cut: dict[str, Any]
) -> None:
    asked = call("a", max_new_tokens=40, temperature=0.8, returns_kept=True, **cut)
    async with opened(urls[server], folders[0]) as engine:
        chunks = await collect(engine, asked)
    sample = TrainingSample(
        prompt_ids=asked.prompt_ids, response_ids=tokens(chunks), kept=tuple(k for c in chunks for k in c.kept)
    )
    found_T = all_logprobs(open_model(folders[0]), pack([sample], 1024), 0.8, num_tokens=40)
    told_T = torch.tensor([p for c in chunks for p in c.logprobs])
    torch.testing.assert_close(told_T, found_T, atol=TOLERANCE, rtol=0)
    assert mean_kept(sample.kept) > 1.5


NUM_TOKENS = 480
"""Of a call under three updates: enough that a busy machine does not end it before the first."""


@pytest.mark.parametrize(
    ("kv_on_update", "weight_transfer"),
    [("recompute", "folder"), ("keep", "folder"), ("recompute", "gloo"), ("keep", "gloo")],
)
async def test_each_token_is_labelled_with_the_weights_that_sampled_it(
    url: str, folders: tuple[Path, Path], kv_on_update: str, weight_transfer: str
) -> None:
    """Twenty calls, some of them queued, with three updates under them: each log-prob is that of the labelled version,
    given all tokens before it; with a kept cache, those whose cache is of their own version are."""
    settings = {"kv_on_update": kv_on_update, "weight_transfer": weight_transfer, "stream_interval_tokens": 3}
    async with opened(url, folders[0], **settings) as engine:
        calls = [
            asyncio.create_task(collect(engine, request(f"s{i}", prompt_ids=PROMPT, max_new_tokens=NUM_TOKENS)))
            for i in range(SLOTS + 4)
        ]
        for version in (1, 2, 3):
            target = engine.stats().decoded_tokens + 6 * SLOTS if version == 1 else 0
            while engine.stats().decoded_tokens < target:
                await asyncio.sleep(0.01)
            await update(engine, version, folders[version % 2])
        mixed = 0
        for chunks in await asyncio.gather(*calls):
            ids = tokens(chunks)
            labels = [(c.policy_version, c.kv_version) for c in chunks for _ in c.token_ids]
            recorded = [p for c in chunks for p in c.logprobs]
            scores = [logprobs(folder, PROMPT, ids, 1.0) for folder in folders]
            mixed += len({version for version, _ in labels}) > 1
            assert len(ids) == NUM_TOKENS
            for i, (version, kv_version) in enumerate(labels):
                if version == kv_version and (kv_on_update == "recompute" or labels[0][0] == version):
                    assert abs(recorded[i] - scores[version % 2][i]) < TOLERANCE, (i, version)
        assert mixed, "no call met an update: how many do depends on the machine"


async def test_log_probs_are_of_the_distribution_at_every_temperature(url: str, folders: tuple[Path, Path]) -> None:
    async with opened(url, folders[0]) as engine:
        measured = await check_logprobs(engine, reference(folders[0]), tolerance=TOLERANCE, remedy="")
        assert all(m.processed < TOLERANCE < m.raw for m in measured if m.temperature != 1)


async def test_greedy_decoding_is_the_same_however_often_it_is_stopped(url: str, folders: tuple[Path, Path]) -> None:
    num_tokens = 300  # a server is not through before it hears that it is to stop
    async with opened(url, folders[0]) as engine:
        whole = tokens(await collect(engine, request("whole", max_new_tokens=num_tokens, temperature=0.0)))
        ids: tuple[int, ...] = ()
        number = 0
        while len(ids) < num_tokens:
            call = request("cut", max_new_tokens=num_tokens, temperature=0.0, response_ids=ids, call=number)
            async for chunk in engine.generate(call):
                ids += chunk.token_ids
                if number < 12 and chunk.finish_reason is None:
                    await engine.abort([call.request_id])
            number += 1
        assert ids == whole
        assert number > 1


async def test_an_abort_of_many_leaves_the_server_idle(url: str, folders: tuple[Path, Path]) -> None:
    async with opened(url, folders[0]) as engine:
        calls = [request(f"m{i}", max_new_tokens=400) for i in range(3 * SLOTS)]
        answers = [asyncio.create_task(collect(engine, call)) for call in calls]
        while engine.stats().decoded_tokens < SLOTS:
            await asyncio.sleep(0.01)
        await engine.abort([call.request_id for call in calls])
        ended = [chunks[-1].finish_reason for chunks in await asyncio.gather(*answers)]
        assert FinishReason.ABORT in ended  # some may have come to their length before
        async with client_of(url) as client, asyncio.timeout(within(120)):
            dialect = SGLangDialect(client, config_of(url), ModelFolder.read(folders[0]), WeightTerms())
            while await dialect.num_calls():
                await asyncio.sleep(0.05)


async def test_another_shape_is_refused_before_it_kills(url: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = model_folder(
        tmp_path / "other", vocab=int(json.loads((folders[0] / "config.json").read_text())["vocab_size"])
    )
    larger = model_folder(tmp_path / "larger", vocab=5000)
    async with client_of(url) as client:
        path = (await client.ask(Table, "GET", "/model_info")).root["model_path"]
    if Path(path).is_dir():
        with pytest.raises(EngineError, match="serves another model"):
            async with opened(url, other):
                pass
    with pytest.raises(EngineError, match=r"does not take token 4999|serves another model"):
        async with opened(url, larger):
            pass
    async with opened(url, folders[0]) as engine:
        await engine.probe(decode=True)


# -- peculiarities -----------------------------------------------------------------------------------------------


def body(rid: str, num_tokens: int, **params: Any) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": list(PROMPT),
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, **params},
        "return_logprob": True,
        "stream": True,
    }


Table = RootModel[dict[str, Any]]
"""Any answer of a server."""


def patience() -> Patience:
    return Patience(first_s=600.0, between_s=600.0)


async def to_the_end(client: HTTPClient, call: dict[str, Any]) -> dict[str, Any]:
    """The last event."""
    async for last in client.events(Table, "/generate", call, patience()):
        event = last.root
    return event


async def under_way(client: HTTPClient, *rids: str) -> list[asyncio.Task[dict[str, Any]]]:
    """Calls that the server decodes. On a busy machine some may be over before anybody looks: then all are made again."""
    while True:
        calls = [asyncio.create_task(to_the_end(client, body(rid, 400))) for rid in rids]
        while not any(call.done() for call in calls):
            loads = (await client.ask(Table, "GET", "/v1/loads", params={"include": "core"})).root["loads"]
            if loads[0]["num_running_reqs"] == len(calls):
                return calls
            await asyncio.sleep(0.02)
        await asyncio.gather(*calls)


async def test_quirk_a_refused_update_has_changed_the_weights(url: str, folders: tuple[Path, Path]) -> None:
    async with client_of(url) as client:
        update = {"model_path": str(folders[0]), "weight_version": "10"}
        await client.call("POST", "/update_weights_from_disk", body=update)
        (call,) = await under_way(client, "refused;")
        await asyncio.sleep(0.2)
        await client.call("POST", "/pause_generation", body={"mode": "in_place"})
        update = {"model_path": str(folders[1]), "weight_version": "11", "flush_cache": True}
        with pytest.raises(EngineError, match="400: Weights were updated"):
            await client.call("POST", "/update_weights_from_disk", body=update)
        assert (await client.ask(Table, "GET", "/model_info")).root["weight_version"] == "10"
        await client.call("POST", "/continue_generation", body={})
        event = await call
        assert [span["version"] for span in event["meta_info"]["weight_versions"]] == ["10", "11"]


async def test_quirk_an_abort_during_a_pause_is_lost_and_remembered(url: str) -> None:
    async with client_of(url) as client:
        await client.call("POST", "/pause_generation", body={"mode": "retract"})
        call = asyncio.create_task(to_the_end(client, body("early;", 300)))
        await asyncio.sleep(0.5)
        await client.call("POST", "/abort_request", body={"rid": "early;", "abort_all": False})
        await client.call("POST", "/continue_generation", body={})
        await client.call("POST", "/abort_request", body={"rid": "early;", "abort_all": False})
        event = await call
        assert event["meta_info"]["finish_reason"]["type"] == "length"


async def test_quirk_a_frozen_call_answers_an_abort_only_after_the_pause(url: str) -> None:
    async with client_of(url) as client:
        (call,) = await under_way(client, "frozen;")
        await client.call("POST", "/pause_generation", body={"mode": "in_place"})
        await client.call("GET", "/server_info")
        await client.call("POST", "/abort_request", body={"rid": "frozen;", "abort_all": False})
        done, _ = await asyncio.wait([call], timeout=1.5)
        assert not done
        await client.call("POST", "/continue_generation", body={})
        assert (await call)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_quirk_an_abort_takes_along_all_calls_whose_id_begins_with_its_own(url: str) -> None:
    async with client_of(url) as client:
        calls = await under_way(client, "g1", "g10", "h1;", "h10;")
        for rid in ("g1", "h1;"):
            await client.call("POST", "/abort_request", body={"rid": rid, "abort_all": False})
        ends = [event["meta_info"]["finish_reason"]["type"] for event in await asyncio.gather(*calls)]
        assert ends == ["abort", "abort", "abort", "length"]


async def test_quirk_ignoring_end_tokens_ignores_stop_tokens(url: str) -> None:
    async with client_of(url) as client:
        every = list(range(250))
        event = await to_the_end(client, body("stops;", 4, stop_token_ids=every))
        assert event["meta_info"]["finish_reason"]["type"] == "length"
        event = await to_the_end(client, body("stops-2;", 40, stop_token_ids=every, ignore_eos=False))
        assert event["meta_info"]["finish_reason"]["type"] == "stop"


async def test_quirk_log_probs_are_taken_before_the_distribution_is_cut(url: str, folders: tuple[Path, Path]) -> None:
    async with client_of(url) as client:
        update = {"model_path": str(folders[0]), "weight_version": "12"}
        await client.call("POST", "/update_weights_from_disk", body=update)
        event = await to_the_end(client, body("cut;", 8, top_k=1))
        told = [pair[0] for pair in event["meta_info"]["output_token_logprobs"]]
        assert told == pytest.approx(logprobs(folders[0], PROMPT, tuple(event["output_ids"]), 1.0), abs=TOLERANCE)
        assert min(told) < -0.1  # a choice among one has the log-prob 0


async def test_quirk_a_paused_server_fails_its_own_health_check(url: str, folders: tuple[Path, Path]) -> None:
    async with opened(url, folders[0]) as engine, client_of(url) as client:
        await engine.pause()
        with pytest.raises(EngineError, match="503"):
            while True:
                await client.call("GET", "/health", timeout_s=60)
        await engine.probe(decode=True)
        await engine.resume()


# -- turns with a trainer -----------------------------------------------------------------------------------------


async def test_who_cannot_sleep_is_refused_though_it_would_say_nothing(url: str, folders: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError, match=f"{url} cannot give its memory back.*start it with --enable-memory-saver"):
        async with opened(url, folders[0], colocated=True):
            pass


async def test_it_sleeps_and_wakes_with_other_weights(url: str, folders: tuple[Path, Path]) -> None:
    """Without its memory saver it does all that it is asked for, but give memory back."""
    async with opened(url, folders[0]) as engine:
        for version in (1, 2):
            await engine.sleep()
            await update(engine, version, folders[version % 2])
            await check_logprobs(engine, reference(folders[version % 2]), tolerance=TOLERANCE, remedy="")
        await engine.sleep()
    async with opened(url, folders[1]) as engine:  # left asleep by the one before
        await check_logprobs(engine, reference(folders[1]), tolerance=TOLERANCE, remedy="")


async def test_a_server_that_cannot_sleep_says_the_saver_is_missing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = SGLangConfig(launch=True, launch_command=COMMAND, launch_args=ARGUMENTS, launch_env=ENV, colocated=True)
    with pytest.raises(EngineError, match=r"engine\.colocated = true needs the package torch-memory-saver"):
        await open_sglang(config, EngineSetup(folder=folders[0], run="tests", root=tmp_path, clock=SystemClock()))


# -- a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("episodes", [(), EPISODES, AGENTS, TREES], ids=["no episodes", "class", "agent", "tree"])
def test_log_probs_of_a_run_are_of_their_version(
    url: str, folders: tuple[Path, Path], tmp_path: Path, episodes: tuple[str, ...]
) -> None:
    """Without episodes, weights come under running samples."""
    engine: dict[str, Any] = {"kind": "sglang", "urls": [url], "max_running": SLOTS, "stream_interval_tokens": 4}
    engine |= {"control_timeout_s": 300.0, "abort_timeout_s": 60.0}
    strategy = ("april", *episodes) if episodes else ("bounded_async", "--rollout.max_staleness", "1")
    model = folders[0]
    with runs.working_in(tmp_path, model):
        decode_with(engine)
        write_game(Path())
        # Long enough that some sample is still decoding when a batch is full, also where the machine is busy.
        options = (*EVERY_VERSION, "--rollout.max_new_tokens", "100", "--rollout.strategy", *strategy)
        with drawn_by_servers() as drawn:
            assert cli.main(["train", "run.toml", "--run-dir", "out", *options]) == 0
        run = Path("out")
        runs.ledger(run)
        trajectories = [t for batch in runs.batches(run) for t in batch.trajectories]
        assert len(runs.batches(run)) == 4
        assert max(v for t in trajectories for v in t.policy_versions) >= 2
        assert runs.largest_logprob_error(run, model, trajectories) < TOLERANCE
        assert any(t.num_resumes or len(t.segments) > 1 for t in trajectories)
        assert (max(sum(map(bool, t.turns)) for t in trajectories) > 1) is bool(episodes)
        assert max(len(t.paths) for t in trajectories) == (5 if episodes == TREES else 1)
        assert_trained_as_drawn(trajectories, drawn)


def test_a_judge_is_asked_at_temperature_0_and_repeats_itself(url: str, folders: tuple[Path, Path]) -> None:
    config = JudgeConfig(
        url=f"{url}/v1",
        model="judge",
        template="the quick {response}",
        parser="tests.environments.functions:counted",
        range=(0, 1000),
        max_tokens=200,
        params={"stop": [*"aeiou "]},
        retries=0,
    )

    async def use() -> tuple[list[Score], dict[str, float]]:
        scorer = RewardScorer([RewardSpec(source="s", config=config)], char_tokenizer())
        try:
            texts = ("fox", "dog", "lazy", "over")
            scores = await asyncio.gather(*(scorer.score(trajectory(prompt(), text)) for text in texts))
            return scores, scorer.costs()
        finally:
            await scorer.close()

    (scores, used), (again, _) = asyncio.run(use()), asyncio.run(use())
    assert scores == again and all(score.solved is not None for score in scores)
    assert used["judge/requests"] == 4 and used["judge/recalled"] == 0
    assert used["judge/prompt_tokens"] > 4 and used["judge/reply_tokens"] > 0
