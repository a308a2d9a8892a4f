"""What is peculiar to vLLM: its traps, each sprung by a scripted server, in virtual time."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.dialect import call_seed
from rollover.engine.servers.vllm.open import launch_arguments, launch_environment
from rollover.errors import EngineError, EngineTimeout
from rollover.types import FinishReason
from rollover.weights.sources import FolderWeights
from tests.engine.contract import LONG, assert_wellformed, collect, request, tokens, update
from tests.engine.servers.kit import bodies
from tests.engine.servers.scripted_server import CONTEXT, VOCAB, Answer, ScriptedVLLM, token_at
from tests.engine.servers.vllm.kit import label, model_folder, opened, refused, serving


def scripted(seed: int, count: int, weights: str, start: int = 0) -> tuple[int, ...]:
    return tuple(token_at(seed, i, weights) for i in range(start, start + count))


# -- what is asked ------------------------------------------------------------------------------------------


async def test_every_sampling_field_is_sent_whatever_the_servers_defaults(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await collect(engine, request("a", top_p=0.5, top_k=7, min_p=0.1, temperature=0.25, stop_token_ids=(1, 2)))
    (body,) = bodies(server, "/v1/completions")
    expected = {"top_p": 0.5, "top_k": 7, "min_p": 0.1, "temperature": 0.25, "n": 1, "logprobs": 0}
    expected |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
    expected |= {"stop_token_ids": [1, 2], "ignore_eos": True, "return_token_ids": True, "stream": True}
    assert {key: body[key] for key in expected} == expected
    assert not {"text", "messages", "suffix"} & body.keys()


async def test_a_resumed_call_sends_ids_the_remaining_budget_and_another_seed(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await collect(engine, request("a", max_new_tokens=50, seed=3))
        await collect(engine, request("a", call=1, max_new_tokens=50, seed=3, response_ids=tuple(range(30))))
    first, second = bodies(server, "/v1/completions")
    assert second["prompt"] == first["prompt"] + list(range(30))
    assert (first["max_tokens"], second["max_tokens"]) == (50, 20)
    assert first["seed"] != second["seed"]
    assert 0 <= second["seed"] < 2**63
    assert first["request_id"] != second["request_id"]


@pytest.mark.parametrize(
    ("device", "seed_calls", "seeded"),
    [
        ("cuda", "auto", True),
        ("cpu", "auto", False),
        (None, "auto", False),
        ("cpu", "always", True),
        ("cuda", "never", False),
    ],
)
async def test_no_seed_is_sent_where_it_kills(folder: Path, device: str | None, seed_calls: str, seeded: bool) -> None:
    server = ScriptedVLLM()
    server.device = device
    async with opened(server, folder, seed_calls=seed_calls) as engine:
        await collect(engine, request("a"))
    assert (bodies(server, "/v1/completions")[-1]["seed"] is not None) == seeded


def test_a_launched_server_is_told_what_training_needs(folder: Path) -> None:
    arguments = launch_arguments(VLLMConfig(launch=True, max_running=9), folder, 8123)
    text = " ".join(arguments)
    assert "--dtype float32" in text  # that of the weights
    assert "--logprobs-mode processed_logprobs" in text
    assert "--generation-config vllm" in text
    assert "--max-num-seqs 9" in text and "--port 8123" in text and "--host 127.0.0.1" in text


def test_the_model_is_given_as_the_program_that_starts_it_takes_it(folder: Path) -> None:
    def given(*command: str) -> list[str]:
        config = VLLMConfig(launch=True, **({"launch_command": command} if command else {}))  # type: ignore[arg-type]
        return launch_arguments(config, folder, 8123)[:2]

    assert given()[0] == given("python", "-m", "vllm.entrypoints.cli.main", "serve")[0] == str(folder)
    assert given("python", "-m", "vllm.entrypoints.openai.api_server") == ["--model", str(folder)]
    assert VLLMConfig(launch=True).launch_command == ("vllm", "serve")


def test_a_server_on_the_cpu_leaves_threads_and_memory_to_the_trainer(tmp_path: Path) -> None:
    """A token of this model takes 2 x 2 layers x 2^10 float32: 16 KiB."""
    large = model_folder(tmp_path / "large", hidden=2**10, max_position_embeddings=2**12)
    env = launch_environment(VLLMConfig(launch=True, max_running=2**6), large)
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["VLLM_API_KEY"]) == ("nobind", ""), "and no key of this process"
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert int(env["VLLM_CPU_KVCACHE_SPACE"]) == max(1, min(4, int(0.4 * memory_gib)))
    env = launch_environment(VLLMConfig(launch=True, max_running=2**16, num_servers=2), large)
    assert int(env["VLLM_CPU_KVCACHE_SPACE"]) == max(1, int(0.2 * memory_gib))


# -- abort --------------------------------------------------------------------------------------------------


async def test_a_pause_of_ours_that_has_not_ended_is_ended_by_the_next_probe(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        server.answer_once("/resume", Answer(500, {"error": "busy"}))
        with pytest.raises(EngineError):
            await engine._dialect.ask_to_abort_all()
        assert server.paused
        await engine.probe()
        assert not server.paused
        server.paused = True
        with pytest.raises(EngineError, match="was paused by another program"):
            await engine.probe()


async def test_a_server_that_decodes_shows_it_by_the_tokens_of_its_calls(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(1.0)
        server.log.clear()
        await engine.probe(decode=True)
        assert bodies(server, "/v1/completions") == []
        await engine.abort(["a#0"])
        await call
        await asyncio.sleep(2.5)
        await engine.probe(decode=True)
        assert [body["max_tokens"] for body in bodies(server, "/v1/completions")] == [1]


async def test_an_abort_that_overtakes_its_call_is_repeated_until_the_call_ends(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        held = asyncio.Event()
        stream = server._stream

        async def late(body: dict[str, Any]) -> Any:
            await held.wait()  # accepted, but not yet a request that could be aborted
            async for piece in stream(body):
                yield piece

        server._stream = late  # type: ignore[method-assign, assignment]
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.01)
        abort = asyncio.create_task(engine.abort(["a#0"]))
        await asyncio.sleep(0.5)
        assert not abort.done()
        held.set()
        await abort
        chunks = await call
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert len(bodies(server, "/abort_requests")) > 2
        assert asyncio.get_running_loop().time() < 5.0


async def test_a_hung_server_delays_no_abort_and_its_tokens_are_kept(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG, seed=3)))
        await asyncio.sleep(0.2)
        server.freeze()
        seen = engine.stats().decoded_tokens
        start_s = asyncio.get_running_loop().time()
        await engine.abort(["a#0"])
        assert asyncio.get_running_loop().time() - start_s <= 10.5
        chunks = await call
        assert_wellformed(chunks)
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert tokens(chunks) == scripted(call_seed(3, 0), seen, str(folder)) != ()
        server.thaw()


async def test_a_call_that_is_aborted_before_its_first_token_ends_without_one(folder: Path) -> None:
    """vLLM then ends the stream without a word of the call."""
    async with serving(folder) as (engine, server):
        server.is_wedged = True
        call = asyncio.create_task(collect(engine, replace(request("a"), response_ids=(1, 2))))
        while "cmpl-a#0-0" not in server.requests:
            await asyncio.sleep(0.01)
        await engine.abort(["a#0"])
        (end,) = await call
        assert (end.token_ids, end.finish_reason) == ((), FinishReason.ABORT)


async def test_a_finish_that_races_with_an_abort_wins(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        server.network_delay_s = 0.5
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=3)))
        await asyncio.sleep(0.2)
        assert not server.requests, "it has finished there, and we do not know yet"
        await engine.abort(["a#0"])
        chunks = await call
        assert (len(tokens(chunks)), chunks[-1].finish_reason) == (3, FinishReason.LENGTH)


# -- answers that cannot be true ----------------------------------------------------------------------------


def spoiled(**changes: Any) -> Callable[[bytes], bytes]:
    """Events with some fields of their choice replaced."""

    def mangle(event: bytes) -> bytes:
        data = json.loads(event.removeprefix(b"data: "))
        data["choices"][0] |= changes
        return f"data: {json.dumps(data)}\n\n".encode()

    return mangle


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (spoiled(token_ids=[64]), r"token 64 is outside the vocabulary of 64"),
        (spoiled(token_ids=[1, 2]), r"2 tokens came with 1 log-probs"),
        (spoiled(token_ids=["1"]), r"field 'choices\.0\.token_ids\.0': Input should be a valid integer, got '1'$"),
        (spoiled(token_ids=None), r"field 'choices\.0\.token_ids': Input should be a valid array, got None$"),
        (spoiled(logprobs=None), r"1 tokens came with 0 log-probs"),
        (spoiled(logprobs={"token_logprobs": [0.5]}), r"has the log-prob 0\.5"),
        (spoiled(logprobs={"token_logprobs": [None]}), r"field 'choices\.0\.logprobs\.token_logprobs\.0': .*got None$"),
        (spoiled(finish_reason="content_filter"), r"field 'choices\.0\.finish_reason': .*, got 'content_filter'$"),
        (spoiled(token_ids=[1] * 13, logprobs={"token_logprobs": [-1.0] * 13}), "13 tokens came, but at most 12 were"),
        (spoiled(finish_reason="length"), r"for its length after 1 tokens, but 12"),
        (spoiled(finish_reason="stop"), r"stopped at token \d+, but its stop tokens are"),
    ],
)
async def test_an_impossible_answer_is_an_error(folder: Path, mangle: Callable[[bytes], bytes], message: str) -> None:
    async with serving(folder) as (engine, server):
        server.mangle = mangle
        with pytest.raises(EngineError, match=message):
            await collect(engine, request("a"))
        assert engine.stats().decoded_tokens == 0


async def test_a_stream_without_a_finish_reason_is_no_end(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        server.mangle = lambda event: b"data: [DONE]\n\n" if b'"length"' in event else event
        with pytest.raises(EngineError, match=r"the stream of a#0 ended without a finish reason"):
            await collect(engine, request("a"))


async def test_a_server_that_dies_costs_no_token_that_had_come(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        stream = engine.generate(request("a", max_new_tokens=LONG, seed=3))
        head = [await anext(stream) for _ in range(30)]
        server.kill()
        with pytest.raises(EngineError, match="broke off POST /v1/completions"):
            async for chunk in stream:
                head.append(chunk)
        assert tokens(head) == scripted(call_seed(3, 0), len(tokens(head)), str(folder))
        assert len(tokens(head)) >= 30
        server.restart()


async def test_the_clock_of_a_frozen_call_stops_while_the_server_is_paused(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.2)
        await engine.pause()
        await asyncio.sleep(500.0)
        await engine.resume()
        assert len(tokens(await call)) == LONG
        server.freeze()
        with pytest.raises(EngineTimeout):
            await collect(engine, request("b"))
        server.thaw()


# -- stop strings -------------------------------------------------------------------------------------------


TEXT = {token: f"<{token}>" for token in range(VOCAB)}
"""What each token spells."""


class Spelling:
    """A tokenizer for stop strings."""

    def complete(self, response_ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        return any(stop in "".join(TEXT[token] for token in response_ids) for stop in stop_strings)


async def test_the_response_ends_with_the_token_that_completes_a_stop_string(folder: Path) -> None:
    ids = scripted(call_seed(3, 0), 60, str(folder))
    stop = TEXT[ids[4]] + TEXT[ids[5]]
    end = next(end for end in range(61) if Spelling().complete(ids[:end], (stop,)))
    async with serving(folder) as (engine, server):
        server.text, engine._calls._stop_strings = TEXT, Spelling()  # type: ignore[assignment]
        for interval, name in ((1, "a"), (16, "b")):
            engine._dialect._config = replace(engine._dialect._config, stream_interval_tokens=interval)
            chunks = await collect(engine, request(name, max_new_tokens=60, seed=3, stop_strings=(stop,)))
            assert_wellformed(chunks)
            assert tokens(chunks) == ids[:end]
            assert chunks[-1].finish_reason is FinishReason.STOP
    assert bodies(server, "/v1/completions")[0]["include_stop_str_in_output"] is True


async def test_a_stop_string_over_the_cut_stops_the_call_at_the_server(folder: Path) -> None:
    ids = scripted(call_seed(3, 3), 2, str(folder))
    stop = "".join(TEXT[token] for token in (63, *ids))
    async with serving(folder) as (engine, server):
        server.text, engine._calls._stop_strings = TEXT, Spelling()  # type: ignore[assignment]
        resumed = request("a", call=1, max_new_tokens=60, seed=3, response_ids=(0, 1, 63), stop_strings=(stop,))
        chunks = await collect(engine, resumed)
        assert_wellformed(chunks)
        assert tokens(chunks) == ids
        assert chunks[-1].finish_reason is FinishReason.STOP
        await asyncio.sleep(0.2)
        assert not server.requests, "it does not decode on for nobody"
        assert engine.stats().num_running == 0


# -- weights ------------------------------------------------------------------------------------------------


async def test_weights_are_replaced_without_a_stale_cache_or_label(folder: Path, new: Path) -> None:
    async with serving(folder) as (engine, server):
        await update(engine, FolderWeights(7, new))
        assert (server.version, server.weights) == (label(7), str(new))
        assert [path for _, path, _, _ in server.log] == [
            "/weight_info",  # is it still ours?
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/weight_info",
            "/resume",
        ]


async def test_a_reset_of_the_prefix_cache_that_fails_is_repeated(folder: Path, new: Path) -> None:
    async with serving(folder) as (engine, server):
        server.held_resets = 4
        await engine.pause()
        await engine.load(1, FolderWeights(1, new))
        server.held_resets = 10**9
        with pytest.raises(EngineError, match="did not free its prefix cache within 30 s"):
            await engine.load(2, FolderWeights(2, new))
        server.held_resets = 0
        await engine.load(2, FolderWeights(2, new))
        await engine.resume()


async def test_calls_still_open_at_a_load_are_stopped_before_it(folder: Path, new: Path) -> None:
    async with serving(folder) as (engine, _):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.2)
        await update(engine, FolderWeights(1, new))
        chunks = await call
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert {c.policy_version for c in chunks} == {0}


async def test_with_a_kept_cache_tokens_that_come_late_belong_to_the_old_weights(folder: Path, new: Path) -> None:
    async with serving(folder, kv_on_update="keep") as (engine, server):
        server.network_delay_s = 0.2
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG, seed=3)))
        await asyncio.sleep(0.5)
        await update(engine, FolderWeights(1, new))
        chunks = await call
        seed = call_seed(3, 0)
        labelled = [c.policy_version for c in chunks for _ in c.token_ids]
        cut = labelled.index(1)
        assert 0 < cut < LONG
        assert tokens(chunks)[:cut] == scripted(seed, cut, str(folder))
        assert tokens(chunks)[cut:] == scripted(seed, LONG - cut, str(new), start=cut)
        assert {c.kv_version for c in chunks} == {0}
        assert engine.capabilities.prefill_tokens_per_iteration == math.inf


async def test_a_server_that_was_restarted_behind_our_back_gets_no_call(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await collect(engine, request("a"))
        server.restart()
        await asyncio.sleep(5.0)
        with pytest.raises(EngineError, match=r"says it serves weights 'default', though version 0 was loaded"):
            await collect(engine, request("b"))
        with pytest.raises(EngineError, match="restarted"):
            await engine.probe()
        assert len(bodies(server, "/v1/completions")) == 1


async def test_calls_that_come_together_after_a_silence_ask_for_the_version_once(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await asyncio.sleep(5.0)
        await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(50)))
        assert len(bodies(server, "/weight_info")) == 1
        server.kill()
        await asyncio.sleep(5.0)
        ends = await asyncio.gather(*(collect(engine, request(f"s{i}")) for i in range(50)), return_exceptions=True)
        assert all(isinstance(end, EngineError) and "cannot be reached" in str(end) for end in ends)


async def test_a_server_that_answers_but_fails_to_decode_is_not_well(folder: Path) -> None:
    async with serving(folder) as (engine, server):
        await engine.probe(decode=True)
        await asyncio.sleep(2.5)  # its last token is no sign of life then
        server.answer_once("/v1/completions", Answer(500, {"error": "CUDA error"}))
        with pytest.raises(EngineError, match="CUDA error"):
            await engine.probe(decode=True)


# -- the start ----------------------------------------------------------------------------------------------


def test_an_unusable_server_is_refused_at_the_start_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    larger = model_folder(tmp_path / "larger", vocab=100)
    smaller = model_folder(tmp_path / "smaller", vocab=32)
    other = model_folder(tmp_path / "shape", hidden=8)
    refused(folder, r"http://one serves another model than .*has shape \[64, 8\], expected", root=str(other))
    refused(folder, "has no /is_paused: start it with VLLM_SERVER_DEV_MODE=1", dev_mode=False)
    refused(folder, r"serves policy, not engine\.served_model = 'other'", settings={"served_model": "other"})
    refused(folder, "does not stop a call by its id within 5 s", aborts_by_id=False)
    refused(larger, r"which serves 'policy', does not take token 99 of .*larger \(vocabulary of 100\)")
    refused(smaller, r"has a larger vocabulary than the 32 of .*smaller: it is another model")
    refused(folder, "cannot be reached", _dead=True)


async def test_the_context_is_the_shorter_of_the_models_and_the_servers(folder: Path) -> None:
    server = ScriptedVLLM()
    server.max_model_len = 200
    async with opened(server, folder) as engine:
        assert engine.capabilities.max_context_tokens == 200 < CONTEXT
        with pytest.raises(EngineError, match="may reach 203 tokens, but http://one takes 200"):
            await collect(engine, request("a", max_new_tokens=200))


async def test_a_server_is_given_our_weights_before_the_first_call(folder: Path) -> None:
    server = ScriptedVLLM(weights="somebody else's")
    server.version, server.paused = "41", True  # as a run leaves it that is killed in an update
    async with opened(server, folder) as engine:
        assert (server.weights, server.version) == (str(folder), label(0))
        assert engine.stats().decoded_tokens == 0
