"""slime's servers as an engine, lent for a rollout; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.errors import EngineError, EngineTimeout, ModelError
from rollover.integrations.slime.servers import LentServers, served_model
from rollover.types import FinishReason, SamplingParams
from tests.engine.servers.scripted_server import Answer, ScriptedServer, ScriptedTransport
from tests.integrations.slime.farm import OldSGLang, Router
from tests.integrations.slime.kit import write_model
from tests.virtual_time import VirtualClock, run

CONFIG = SGLangConfig(
    urls=("http://router",), max_running=8, abort_timeout_s=4.0, control_timeout_s=2.0, first_token_timeout_s=100.0
)


class Lent:
    """Workers behind a router, and what is lent of them."""

    def __init__(self, folder: Path, num_workers: int = 2, **settings: Any) -> None:
        self.workers = {f"w{i}": OldSGLang(tick_s=0.01, mean_tokens=1e9, **settings) for i in range(num_workers)}
        for worker in self.workers.values():
            worker.updated(1)
        self.router = Router([f"http://{name}" for name in self.workers])
        hosts: dict[str, ScriptedServer] = {"router": self.router, **self.workers}
        self.transport = ScriptedTransport(hosts)
        self.folder = folder

    def __getitem__(self, number: int) -> OldSGLang:
        return self.workers[f"w{number}"]

    async def has_decoded(self, num_tokens: int) -> None:
        while self[0].decoded_tokens < num_tokens:
            await asyncio.sleep(0.01)

    def engine(self, **changes: Any) -> LentServers:
        model = served_model(str(write_model(self.folder)))
        config = replace(CONFIG, **changes)
        return LentServers(config, model, VirtualClock(), num_workers=len(self.workers), transport=self.transport)

    @asynccontextmanager
    async def rollout(self, version: int = 0, **changes: Any) -> AsyncIterator[LentServers]:
        engine = self.engine(**changes)
        try:
            await engine.begin()
            await engine.serves(version)
            yield engine
        finally:
            await engine.close()


@pytest.fixture
def lent(tmp_path: Path) -> Lent:
    return Lent(tmp_path)


@pytest.fixture
def alone(tmp_path: Path) -> Lent:
    """One worker."""
    return Lent(tmp_path, num_workers=1)


def request(name: str, *, tokens: int = 20, response: tuple[int, ...] = ()) -> GenerateRequest:
    """Of sample ``name``, ``g0.1`` say; prompts differ, so that the workers share them."""
    return GenerateRequest(
        request_id=f"d.{name}#1.",
        sample_key=name,
        prompt_key=name,
        prompt_ids=(1, 2, int(name[1])),
        response_ids=response,
        params=SamplingParams(max_new_tokens=tokens),
        seed=7,
    )


async def everything(engine: LentServers, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


# -- calls ------------------------------------------------------------------------------------------------------------


async def test_a_response_goes_on_behind_its_prefix_within_its_budget(alone: Lent) -> None:
    async with alone.rollout() as engine:
        found = await everything(engine, request("g0.0", response=(5, 6, 7)))
    assert len(ids(found)) == 17
    body = next(body for method, path, _, body in alone[0].log if path == "/generate")
    assert body["input_ids"] == [1, 2, 0, 5, 6, 7] and body["sampling_params"]["max_new_tokens"] == 17
    assert body["stream"] is False


async def test_an_abort_hands_over_what_was_decoded(alone: Lent) -> None:
    async with alone.rollout() as engine:
        calls = [asyncio.create_task(everything(engine, request(n, tokens=200))) for n in ("g0.0", "g1.0")]
        await alone.has_decoded(10)
        await engine.abort(["d.g0.0#1.", "d.g1.0#1."])
        one, other = await asyncio.gather(*calls)
        await engine.end()
    assert one[-1].finish_reason is other[-1].finish_reason is FinishReason.ABORT
    assert len(ids(one)) >= 5 and len(ids(one)) + len(ids(other)) == alone[0].decoded_tokens


async def test_one_of_several_calls_is_aborted_alone(alone: Lent) -> None:
    async with alone.rollout() as engine:
        names = ("g0.0", "g1.0")
        calls = [asyncio.create_task(everything(engine, request(n, tokens=30))) for n in names]
        await alone.has_decoded(6)
        await engine.abort(["d.g0.0#1."])
        found = [chunks[-1].finish_reason for chunks in await asyncio.gather(*calls)]
    assert found == [FinishReason.ABORT, FinishReason.LENGTH]


async def test_a_call_that_was_aborted_in_the_servers_queue_has_no_tokens(tmp_path: Path) -> None:
    lent = Lent(tmp_path, num_workers=1, slots=1)
    async with lent.rollout() as engine:
        first = asyncio.create_task(everything(engine, request("g0.0", tokens=200)))
        await lent.has_decoded(3)
        second = asyncio.create_task(everything(engine, request("g1.0", tokens=200)))
        while len(lent[0].requests) < 2:
            await asyncio.sleep(0.01)
        await engine.abort(["d.g0.0#1.", "d.g1.0#1."])
        await first
        (chunk,) = await second
    assert chunk.finish_reason is FinishReason.ABORT and not chunk.token_ids


async def test_servers_that_draw_by_seed_are_told_that_of_each_sample(alone: Lent) -> None:
    """Without one, they would give all siblings the same response."""
    alone[0].draws_by_seed = True
    async with alone.rollout() as engine:
        asked = [replace(request("g0.0"), seed=2**63 + 2), replace(request("g0.1"), seed=2**63 + 4)]
        retried = replace(asked[0], request_id="d.g0.0#2.")
        first, sibling, again = [ids(await everything(engine, one)) for one in (*asked, retried)]
    assert first == again and first != sibling


async def test_older_paths_of_control_calls_do(lent: Lent) -> None:
    for worker in lent.workers.values():
        worker.has_new_paths = False
    async with lent.rollout() as engine:
        chunks = await everything(engine, request("g0.0"))
        await engine.end()
    assert len(ids(chunks)) == 20


# -- labels -----------------------------------------------------------------------------------------------------------


def test_workers_that_disagree_are_refused_before_a_token_is_decoded(lent: Lent) -> None:
    lent[0].updated(2)
    with pytest.raises(EngineError, match=r"'1' by http://w1; '2' by http://w0.*missed the last weight update"):
        run(lent.engine().begin())
    assert not lent[0].decoded_tokens and not lent[1].decoded_tokens


async def test_an_answer_of_other_weights_than_the_rollouts_is_refused(alone: Lent) -> None:
    with pytest.raises(EngineError, match="weights '2' sampled its tokens, and the rollout began with '1'"):
        async with alone.rollout() as engine:
            call = asyncio.create_task(everything(engine, request("g0.0", tokens=30)))
            await alone.has_decoded(5)
            alone[0].version, alone[0].weights = "2", "weights 2"
            await call


async def test_an_answer_that_names_no_weights_is_refused(alone: Lent) -> None:

    def without_version(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["meta_info"]["weight_version"]
        return answer

    alone[0].says = without_version
    with pytest.raises(EngineError, match="does not say which weights sampled its tokens"):
        async with alone.rollout() as engine:
            await everything(engine, request("g0.0"))


async def test_a_newer_server_may_give_spans(alone: Lent) -> None:
    alone[0].reports_spans = True
    async with alone.rollout(version=5) as engine:
        found = await everything(engine, request("g0.0"))
    assert {chunk.policy_version for chunk in found} == {5}


# -- between rollouts -------------------------------------------------------------------------------------------------


async def test_nobody_asks_a_server_anything_between_rollouts(lent: Lent) -> None:
    async with lent.rollout(health_interval_s=0.5) as engine:
        await everything(engine, request("g0.0"))
        await asyncio.sleep(2.0)
        await engine.end()
        before = [len(worker.log) for worker in lent.workers.values()]
        await asyncio.sleep(60.0)
        assert before == [len(worker.log) for worker in lent.workers.values()]
    assert min(before) > 3


async def test_a_call_between_rollouts_is_refused(lent: Lent) -> None:
    with pytest.raises(EngineError, match="lent for rollouts only"):
        async with lent.rollout() as engine:
            await engine.end()
            await everything(engine, request("g0.0"))


async def test_the_next_rollout_has_the_next_label_and_new_workers(lent: Lent) -> None:
    engine = lent.engine()
    await engine.begin()
    await engine.serves(0)
    await engine.end()
    lent.transport.servers["w2"] = lent.workers["w2"] = OldSGLang(tick_s=0.01, mean_tokens=1e9)
    lent.router.urls = ["http://w2"]
    lent.workers["w2"].updated(2)
    label = await engine.begin()
    await engine.serves(1)
    chunks = await everything(engine, request("g0.0"))
    await engine.end()
    assert engine.stats().decoded_tokens == 20
    await engine.close()
    assert label == "2" and {chunk.policy_version for chunk in chunks} == {1}
    assert lent.workers["w2"].decoded_tokens == 20


async def test_a_server_is_given_back_only_when_it_is_idle(alone: Lent) -> None:
    """A request that nobody waits for any more is still decoded."""
    async with alone.rollout() as engine:
        left = asyncio.create_task(everything(engine, request("g0.0", tokens=200)))
        await alone.has_decoded(3)
        left.cancel()
        await engine.end()
        assert not alone[0].requests


async def test_a_server_that_does_not_become_idle_is_named(alone: Lent) -> None:
    busy = Answer(body={"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}]})
    with pytest.raises(EngineTimeout, match="http://w0 still runs 3 calls 8 s after all were aborted"):
        async with alone.rollout() as engine:
            alone[0].answer_once("/v1/loads", *[busy] * 1000)
            await engine.end()


@pytest.mark.parametrize(
    "load",
    [
        [{"dp_rank": 0, "num_reqs": 0}],
        {"loads": [{"num_total_reqs": 0}, {"num_total_reqs": 0}]},
        {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
        {"something": "else"},
    ],
)
async def test_forms_of_the_count_of_calls(alone: Lent, load: Any) -> None:
    async with alone.rollout() as engine:
        alone[0].answer_once("/v1/loads", Answer(body=load))
        await engine.end()


# -- workers that fail ------------------------------------------------------------------------------------------------


async def test_a_rollout_goes_on_without_a_worker_that_is_dead(lent: Lent) -> None:
    lent[1].kill()
    async with lent.rollout() as engine:
        chunks = await everything(engine, request("g0.0"))
        await engine.end()
    assert len(ids(chunks)) == 20


def test_without_any_worker_that_answers_a_rollout_is_refused(lent: Lent) -> None:
    for worker in lent.workers.values():
        worker.kill()
    with pytest.raises(EngineError, match=r"no worker behind http://router answers: http://w0 .*; http://w1"):
        run(lent.engine().begin())


def test_a_worker_that_changes_how_tokens_are_drawn_is_refused(lent: Lent) -> None:
    lent[1].preferred_sampling_params = {"top_k": 20}
    with pytest.raises(EngineError, match="http://w1 changes how tokens are drawn"):
        run(lent.engine().begin())


def test_sizes_are_also_found_in_a_model_within_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 9, "max_position_embeddings": 77}}')
    assert served_model(str(tmp_path)).max_context_tokens == 77
    assert served_model(str(tmp_path), 50).max_context_tokens == 50
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no vocab_size"):
        served_model(str(tmp_path))
