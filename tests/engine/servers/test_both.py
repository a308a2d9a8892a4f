"""What holds before vLLM and SGLang servers alike, in virtual time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from rollover.engine.servers.folder import ModelFolder
from rollover.errors import CallDisplaced, EngineError, ModelError
from rollover.hf.config import max_context
from rollover.types import FinishReason
from rollover.weights.sources import FolderWeights
from tests.engine.contract import LONG, collect, request, tokens, update
from tests.engine.servers.kit import bodies
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm.kit import label


async def test_a_server_left_without_known_weights_gets_no_call(kind: ModuleType, folder: Path, new: Path) -> None:
    async with kind.serving(folder) as (engine, server):
        server.load_error = "out of memory"
        with pytest.raises(EngineError, match="out of memory"):
            await update(engine, FolderWeights(1, new))
        server.log.clear()
        for attempt in (collect(engine, request("a")), engine.probe()):
            with pytest.raises(EngineError, match="failed while its weights were being replaced"):
                await attempt
        assert bodies(server, server.generate_path) == []
        server.load_error = None
        await update(engine, FolderWeights(1, new))
        await engine.probe(decode=True)
        assert {c.policy_version for c in await collect(engine, request("b"))} == {1}


async def test_an_abort_that_stops_nothing_becomes_one_of_all_calls(kind: ModuleType, folder: Path) -> None:
    """vLLM ignores an id that it does not know; SGLang remembers an abort that came too early."""
    async with kind.serving(folder) as (engine, server):
        calls = [asyncio.create_task(collect(engine, request(n, max_new_tokens=400))) for n in "ab"]
        server.tick_s = 1.0
        await asyncio.sleep(2.5)
        server.aborts_by_id = False
        await engine.abort(["a#0"])
        assert (await calls[0])[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(CallDisplaced, match="had to stop all its calls, since one did not end"):
            await calls[1]
        server.tick_s = 0.01
        assert len(tokens(await collect(engine, request("c")))) == 12
    of_vllm, of_sglang = ("/pause", {"mode": "abort"}, None), ("/abort_request", {}, {"rid": "", "abort_all": True})
    assert ("POST", *(of_sglang if kind is sglang_kit else of_vllm)) in server.log


async def test_no_call_can_hit_the_cache_of_older_weights(kind: ModuleType, folder: Path, new: Path) -> None:
    async with kind.serving(folder, kv_on_update="keep") as (engine, server):
        call = asyncio.create_task(collect(engine, request("a", max_new_tokens=LONG)))
        await asyncio.sleep(0.1)
        await update(engine, FolderWeights(1, new))
        await collect(engine, request("b"))
        await call
        await update(engine, FolderWeights(2, folder))
    key = "extra_key" if kind is sglang_kit else "cache_salt"
    assert [body[key] for body in bodies(server, server.generate_path)] == [label(0), label(1)]
    if kind is sglang_kit:
        flushed = [body["flush_cache"] for body in bodies(server, server.load_path)]
        assert flushed == [False, True], "with no call open nothing needs to be kept"


async def test_what_was_cached_is_not_counted_as_prefilled(kind: ModuleType, folder: Path) -> None:
    async with kind.serving(folder) as (engine, _):
        await collect(engine, request("a", prompt_ids=(1,) * 10))
        assert (engine.stats().prefilled_tokens, engine.stats().reprefilled_tokens) == (5, 0)
        await collect(engine, request("a", call=1, prompt_ids=(1,) * 10, response_ids=(2,) * 10, max_new_tokens=20))
        assert (engine.stats().prefilled_tokens, engine.stats().reprefilled_tokens) == (15, 10)
        chunks = await collect(engine, request("b", prompt_ids=(1,) * 2, response_ids=(2,) * 8, max_new_tokens=20))
        known_in_time = 3 if kind is sglang_kit else 0  # vLLM tells it at the end
        assert [c.num_prefilled_tokens for c in chunks] == [8 - known_in_time] + [0] * (len(chunks) - 1)


def test_sizes_are_read_under_the_names_of_gpt2_and_bloom(folder: Path) -> None:
    """A context that nothing names is asked for."""
    gpt2 = {"vocab_size": 8, "n_positions": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
    (folder / "config.json").write_text(json.dumps(gpt2))
    model = ModelFolder.read(folder)
    assert (model.max_context_tokens, model.num_layers, model.cache_numbers_per_token) == (64, 2, 128)
    model.check_shapes({f"transformer.{name}": info.shape for name, info in model.weights.items()}, "weights")
    bloom = {"vocab_size": 8, "n_layer": 3, "n_head": 4, "n_embed": 32}
    (folder / "config.json").write_text(json.dumps({**bloom, "seq_length": 48}))
    assert ModelFolder.read(folder).max_context_tokens == max_context(folder) == 48
    (folder / "config.json").write_text(json.dumps(bloom))
    with pytest.raises(ModelError, match="must state max_position_embeddings as a whole number, got None: add it"):
        ModelFolder.read(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.fc.weight"),
        *("gpt_neox.layers.0.attention.masked_bias", "h.0.attn.bias"),
    ],
)
def test_what_transformers_leaves_out_is_a_weight_on_neither_side(folder: Path, name: str) -> None:
    """Checkpoints of the hub store it, and trainers publish none."""
    model = ModelFolder.read(folder)
    given = {name: info.shape for name, info in model.weights.items()}
    model.check_shapes(given | {name: (8,)}, "weights")
    some = next(iter(model.weights.values()))
    replace(model, weights={**model.weights, name: some}).check_shapes(given, "weights")
    replace(model, weights={**model.weights, "model.layers.2.eh_proj.weight": some}).check_shapes(given, "weights")
    for other in ("other", "model.layers.2.eh_proj.weight", "model.layers.0.other.weight", "h.0.attn.c_attn.bias"):
        with pytest.raises(EngineError, match=f"1 are unknown, first '{other}'"):
            model.check_shapes(given | {other: (8,)}, "weights")
