"""What is peculiar to SGLang: its traps, each sprung by a scripted server, in virtual time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.open import launch_arguments, open_sglang, worker_urls
from rollover.errors import EngineError
from rollover.types import FinishReason
from rollover.weights.sources import FolderWeights
from tests.engine.contract import LONG, assert_wellformed, collect, request, tokens, update
from tests.engine.servers.kit import bodies
from tests.engine.servers.scripted_server import CONTEXT, Answer, ScriptedTransport, serve, token_at
from tests.engine.servers.sglang.kit import opened, refused, serving, settings
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.engine.servers.vllm.kit import label, model_folder
from tests.virtual_time import run


def scripted(seed: int, count: int, weights: Path, start: int = 0) -> tuple[int, ...]:
    return tuple(token_at(seed >> 1, i, str(weights)) for i in range(start, start + count))


# -- what is asked ------------------------------------------------------------------------------------------


async def test_every_sampling_field_is_sent_whatever_the_servers_defaults(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await collect(engine, request("a", temperature=0.25, stop_token_ids=(1, 2)))
        await collect(engine, request("b", temperature=0.0, top_p=0.5, top_k=7, min_p=0.1))
    body, greedy = bodies(server, "/generate")
    expected = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 0.25, "n": 1, "min_new_tokens": 0}
    expected |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": []}
    expected |= {"stop_token_ids": [1, 2], "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False}
    assert {key: body["sampling_params"][key] for key in expected} == expected
    assert (body["return_logprob"], body["stream"], body["logprob_start_len"]) == (True, True, -1)
    assert not {"text", "image_data"} & body.keys()
    assert [greedy["sampling_params"][key] for key in ("top_p", "top_k", "min_p")] == [0.5, 7, 0.1]
    assert "return_sampling_mask" not in body


async def test_kept_sets_are_asked_for_and_missed(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        with pytest.raises(EngineError, match="kept sets"):
            await collect(engine, request("a", top_k=7, returns_kept=True))
    [body] = bodies(server, "/generate")
    assert body["return_sampling_mask"] is True


async def test_routes_are_asked_for_from_the_row_before_the_first_token(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            await collect(engine, request("a", returns_routes=True, response_ids=(8, 9)))
    [body] = bodies(server, "/generate")
    assert body["return_routed_experts"] is True
    assert body["routed_experts_start_len"] == len(body["input_ids"]) - 1


async def test_a_resumed_call_sends_ids_and_the_remaining_budget(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await collect(engine, request("a", max_new_tokens=50))
        await collect(engine, request("a", call=1, max_new_tokens=50, response_ids=tuple(range(30))))
    first, second = bodies(server, "/generate")
    assert second["input_ids"] == first["input_ids"] + list(range(30))
    assert [b["sampling_params"]["max_new_tokens"] for b in (first, second)] == [50, 20]
    assert first["rid"] != second["rid"]


async def test_no_id_of_a_call_begins_with_that_of_another(folder: Path) -> None:
    async with serving(folder) as (engine, _):
        calls = [
            asyncio.create_task(collect(engine, request(n, max_new_tokens=LONG)))
            for n in ("g1", "g10", "g1#0", "g1#01")
        ]
        await asyncio.sleep(0.1)
        await engine.abort(["g1#0"])
        assert [(await call)[-1].finish_reason for call in calls] == [FinishReason.ABORT] + [FinishReason.LENGTH] * 3
        with pytest.raises(EngineError, match="must not contain ';'"):
            await collect(engine, request("a;b"))


async def test_an_id_is_never_reused_so_a_late_abort_hits_nobody(folder: Path) -> None:
    server = ScriptedSGLang(tick_s=0.1)
    for _ in range(2):
        async with opened(server, folder) as engine:
            chunks = await collect(engine, request("a", max_new_tokens=40))
            assert (len(tokens(chunks)), chunks[-1].finish_reason) == (40, FinishReason.LENGTH)


def test_a_server_that_is_started_is_told_what_training_needs(folder: Path) -> None:
    text = " ".join(launch_arguments(SGLangConfig(launch=True, max_running=9), folder, 8123))
    assert f"--model-path {folder}" in text and "--host 127.0.0.1 --port 8123" in text
    assert "--dtype float32" in text  # that of the weights
    assert "--max-running-requests 9" in text and "--incremental-streaming-output" in text


async def test_the_servers_own_end_token_is_an_error_beside_stop_tokens(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        server.eos = token_at(3, 2, str(folder))
        sampled = tokens(await collect(engine, request("a", seed=6, max_new_tokens=20)))
        assert len(sampled) == 20
        absent = next(token for token in range(64) if token not in sampled)
        with pytest.raises(EngineError, match=rf"stopped at {server.eos}, which was not asked for"):
            await collect(engine, request("b", seed=6, max_new_tokens=20, stop_token_ids=(absent,)))


# -- abort --------------------------------------------------------------------------------------------------


async def test_calls_in_the_servers_queue_end_without_tokens(folder: Path) -> None:
    async with serving(folder, ScriptedSGLang(slots=2)) as (engine, _):
        calls = [asyncio.create_task(collect(engine, request(f"r{i}", max_new_tokens=LONG))) for i in range(5)]
        await asyncio.sleep(0.2)
        await engine.abort([f"r{i}#0" for i in range(1, 5)])
        ends = [await call for call in calls]
        assert [len(tokens(chunks)) > 0 for chunks in ends] == [True, True, False, False, False]
        assert [chunks[-1].finish_reason for chunks in ends] == [FinishReason.LENGTH] + [FinishReason.ABORT] * 4


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_preempted_call_that_is_aborted_keeps_each_token_once(folder: Path, incremental: bool) -> None:
    async with serving(folder, ScriptedSGLang(incremental=incremental)) as (engine, _):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG, seed=6)))
        await asyncio.sleep(0.3)
        await engine.pause()
        await engine.abort(["a#0"])
        await engine.resume()
        chunks = await call
        assert_wellformed(chunks)
        assert len(tokens(chunks)) > 5
        assert tokens(chunks) == scripted(6, len(tokens(chunks)), folder)


async def test_all_calls_are_stopped_by_one_request(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        calls = [asyncio.create_task(collect(engine, request(f"r{i}", max_new_tokens=LONG))) for i in range(50)]
        await asyncio.sleep(0.2)
        await engine.abort([f"r{i}#0" for i in range(50)])
        assert {(await call)[-1].finish_reason for call in calls} == {FinishReason.ABORT}
    assert bodies(server, "/abort_request") == [{"rid": "", "abort_all": True}]


async def test_a_call_that_begins_while_all_are_stopped_is_not_stopped_with_them(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        stream = engine.generate(request("a", max_new_tokens=LONG))
        await anext(stream)
        slow, arrived = server._post_abort_request, asyncio.Event()

        async def held(query: dict[str, str], body: Any) -> Answer:
            arrived.set()
            await asyncio.sleep(0.03)
            return await slow(query, body)

        server._post_abort_request = held  # type: ignore[method-assign]
        abort = asyncio.create_task(engine.abort(["a#0"]))
        await arrived.wait()
        late = asyncio.create_task(collect(engine, request("b", max_new_tokens=LONG)))
        await abort
        assert [c async for c in stream][-1].finish_reason is FinishReason.ABORT
        assert len(tokens(await late)) == LONG


async def test_what_the_server_decodes_for_nobody_is_stopped(folder: Path) -> None:
    """A call that is not ours, of a run that has gone, say; the server's load tells of it."""
    async with serving(folder) as (engine, server):
        await collect(engine, request("z", max_new_tokens=1))
        body = bodies(server, "/generate")[-1]
        nobodys = {**body, "rid": "z", "sampling_params": {**body["sampling_params"], "max_new_tokens": 400}}
        stream = (await server._post_generate({}, nobodys)).stream
        assert stream is not None
        await anext(stream)
        other = asyncio.create_task(collect(engine, request("b", max_new_tokens=30)))
        call = engine.generate(request("a", max_new_tokens=LONG))
        await anext(call)
        server.tick_s = 0.5
        await engine.abort(["a#0"])
        assert len(tokens(await other)) == 30
        await asyncio.sleep(3.0)
        assert not server.requests


# -- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_on_update", "mode", "flushes"), [("recompute", "retract", True), ("keep", "in_place", False)]
)
async def test_weights_are_replaced_under_running_calls_and_abort_none(
    folder: Path, new: Path, kv_on_update: str, mode: str, flushes: bool
) -> None:
    async with serving(folder, kv_on_update=kv_on_update) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.2)
        await update(engine, FolderWeights(7, new))
        assert len(tokens(await call)) == LONG
        assert (server.version, server.weights) == (label(7), str(new))
    assert bodies(server, "/pause_generation") == [{"mode": mode}]
    (sent,) = bodies(server, "/update_weights_from_disk")
    assert (sent["model_path"], sent["weight_version"]) == (str(new), label(7))
    assert (sent["abort_all_requests"], sent["flush_cache"]) == (False, flushes) and len(sent) == 4
    assert bodies(server, "/continue_generation") == [{"torch_empty_cache": False}]


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("interval", [1, 7])
async def test_each_token_has_the_version_that_the_server_says_sampled_it(
    folder: Path, tmp_path: Path, kv_on_update: str, incremental: bool, interval: int
) -> None:
    """Also where tokens are late, and where a chunk holds tokens of both versions."""
    weights = [folder, *(model_folder(tmp_path / f"w{i}") for i in (1, 2, 3))]
    server = ScriptedSGLang(incremental=incremental)
    async with serving(folder, server, kv_on_update=kv_on_update, stream_interval_tokens=interval) as (engine, server):
        server.network_delay_s = 0.13
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG, seed=6)))
        for version in (1, 2, 3):
            await asyncio.sleep(0.27)
            await update(engine, FolderWeights(version, weights[version]))
        chunks = await call
        assert_wellformed(chunks)
        labels = [c.policy_version for c in chunks for _ in c.token_ids]
        assert sorted(set(labels)) == [0, 1, 2, 3] and len(labels) == LONG
        assert tokens(chunks) == tuple(token_at(3, i, str(weights[v])) for i, v in enumerate(labels))
        kept = {c.kv_version for c in chunks}
        assert kept == ({0} if kv_on_update == "keep" else {0, 1, 2, 3})


async def test_tokens_that_came_before_an_update_are_not_held_back(folder: Path) -> None:
    async with serving(folder) as (engine, _):
        stream = engine.generate(request("a", max_new_tokens=LONG))
        assert [len((await anext(stream)).token_ids) for _ in range(5)] == [1] * 5
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_pause_returns_only_when_the_scheduler_has_heard_of_it(folder: Path) -> None:
    async with serving(folder, ScriptedSGLang(lag_s=0.4)) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.2)
        await engine.pause()
        before = server.decoded_tokens
        await asyncio.sleep(5.0)
        assert server.decoded_tokens == before
        await engine.resume()
        assert len(tokens(await call)) == LONG


async def test_a_refusal_after_which_the_weights_are_new_is_undone(folder: Path, new: Path) -> None:
    async with serving(folder) as (engine, server):
        replace, refused = server._post_update_weights_from_disk, []

        async def half(query: dict[str, str], body: Any) -> Answer:
            answer = await replace(query, body)
            if not refused:
                refused.append(body["weight_version"])
                server.version = label(0)
                return Answer(400, {"success": False, "message": "Weights were updated, but the cache was not flushed"})
            return answer

        server._post_update_weights_from_disk = half  # type: ignore[method-assign]
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG, seed=6)))
        await asyncio.sleep(0.3)
        with pytest.raises(EngineError, match=r"did not load weights version 1: .*Weights were updated, but"):
            await update(engine, FolderWeights(1, new))
        chunks = await call
        assert (server.version, server.weights) == (label(0), str(folder))
        assert tokens(chunks) == scripted(6, LONG, folder)
        assert {c.policy_version for c in chunks} == {0}


async def test_the_first_weights_flush_what_another_run_has_cached(folder: Path) -> None:
    server = ScriptedSGLang()
    async with opened(server, folder, kv_on_update="keep"):
        assert [body["flush_cache"] for body in bodies(server, "/update_weights_from_disk")] == [True]


async def test_somebody_elses_weights_are_noticed(folder: Path, new: Path) -> None:
    async with serving(folder) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.2)
        other = {"model_path": str(new), "weight_version": "theirs", "flush_cache": False}
        await server._post_update_weights_from_disk({}, other)
        with pytest.raises(EngineError, match="another program changes"):
            await call
        with pytest.raises(EngineError, match="says it serves weights 'theirs'"):
            await engine.probe()


async def test_a_paused_server_is_well(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await engine.pause()
        with pytest.raises(EngineError, match="503"):
            await engine._client.call("GET", "/health")
        await engine.probe(decode=True)
        server.answer_once("/server_info", Answer(503, {"error": "paused"}))
        await engine.probe()
        await engine.resume()
        await engine.probe(decode=True)
        server.answer_once("/server_info", Answer(503, {"error": "overloaded"}))
        with pytest.raises(EngineError, match="with 503: overloaded"):
            await engine.probe()


# -- the start ----------------------------------------------------------------------------------------------


def test_an_unusable_server_is_refused_at_the_start_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    larger = model_folder(tmp_path / "larger", vocab=100)
    smaller = model_folder(tmp_path / "smaller", vocab=32)
    wider = model_folder(tmp_path / "wider", hidden=8)
    refused(folder, "serves a model of type 'llama', but .* is of type 'qwen3'", model_type="llama")
    refused(folder, r"serves another model than .*v0: .* has shape", model_path=str(wider))
    refused(folder, "start it without --preferred-sampling-params", preferred_sampling_params={"top_k": 20})
    refused(folder, "does not say which weights sampled which token .* 0.5.23 or later", reports_spans=False)
    refused(folder, "does not stop a call by its id within 5 s", aborts_by_id=False)
    refused(larger, r"does not take token 99 of .*larger \(vocabulary of 100\)")
    refused(smaller, r"has a larger vocabulary than the 32 of .*smaller: it is another model")


async def test_the_context_leaves_room_to_resume_a_call_one_token_before_its_end(folder: Path) -> None:
    async with serving(folder) as (engine, _):
        limit = engine.capabilities.max_context_tokens
        assert limit == CONTEXT - 6
        head = tuple(1 for _ in range(limit - 4))
        chunks = await collect(engine, request("a", max_new_tokens=limit - 3, response_ids=head))
        assert (len(tokens(chunks)), chunks[-1].finish_reason) == (1, FinishReason.LENGTH)


async def test_tokens_whose_cache_an_update_takes_are_prefilled_again(folder: Path, new: Path) -> None:
    async with serving(folder) as (engine, _):
        call = asyncio.create_task(collect(engine, request("b", prompt_ids=(1,) * 10, max_new_tokens=LONG)))
        await asyncio.sleep(0.2)
        await engine.pause()
        lost = 10 + engine.stats().decoded_tokens
        await engine.load(1, FolderWeights(1, new))
        await engine.resume()
        assert (engine.stats().prefilled_tokens, engine.stats().reprefilled_tokens) == (5 + lost, lost)
        await call


# -- routers ------------------------------------------------------------------------------------------------


class Router:
    """Answers some paths and no other."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    async def handle(self, method: str, target: str, headers: dict[str, str], content: bytes) -> Answer:
        return Answer(body=self.answers[target]) if target in self.answers else Answer(404, {"detail": "Not Found"})


def asked(*routers: dict[str, Any]) -> tuple[str, ...]:
    servers: Any = {f"r{i}": Router(answers) for i, answers in enumerate(routers)}

    async def main() -> tuple[str, ...]:
        clients = [
            HTTPClient(f"http://{host}", settings(f"http://{host}"), transport=ScriptedTransport(servers))
            for host in servers
        ]
        return await worker_urls(clients)

    return run(main())


def test_a_router_is_replaced_by_its_workers_and_a_worker_is_itself() -> None:
    workers = {"workers": [{"url": "http://w1/", "worker_type": "regular"}, {"url": "http://w2"}]}
    assert asked({"/workers": workers}) == ("http://w1", "http://w2")
    assert asked({"/list_workers": {"urls": ["http://w1", "http://w3"]}}) == ("http://w1", "http://w3")
    assert asked({}) == ("http://r0",)
    several = ({"/workers": workers}, {}, {"/list_workers": {"urls": ["http://w2"]}})
    assert asked(*several) == ("http://w1", "http://w2", "http://r1")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"workers": []}, "router without workers"),
        ({"workers": [{"url": "http://w", "worker_type": "prefill"}]}, "worker of type 'prefill'"),
        ({"workers": "http://w"}, "field 'workers': Input should be a valid array"),
        ({"workers": [7]}, r"field 'workers\.0"),
        ({"workers": ["file:///etc/passwd"]}, "which is not the address of a server"),
        ({"workers": [{"url": "http://user:word@w"}]}, "which is not the address of a server"),
    ],
)
def test_a_router_that_cannot_be_used_says_why(answer: Any, complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        asked({"/workers": json.loads(json.dumps(answer))})


@pytest.mark.real_time
async def test_a_pool_is_opened_from_the_url_of_a_router(folder: Path, tmp_path: Path) -> None:
    worker = ScriptedSGLang()
    async with serve(worker) as port:
        router: Any = Router({"/workers": {"workers": [{"url": f"http://127.0.0.1:{port}"}]}})
        async with serve(router) as router_port:
            config = settings(f"http://127.0.0.1:{router_port}")
            setup = EngineSetup(folder=folder, run="ours", root=tmp_path, clock=SystemClock())
            pool = await open_sglang(config, setup)
            try:
                assert repr(pool) == f"http://127.0.0.1:{port}"
                assert len(tokens(await collect(pool, request("a")))) == 12
            finally:
                await pool.close()
