"""Drafts change when tokens are drawn, not which."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollover.engine.base import GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore
from rollover.engine.embedded.graphs import GraphModelRunner
from rollover.engine.embedded.model_runner import InputBatch
from rollover.types import FinishReason, SamplingParams
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import request
from tests.engine.embedded import harness
from tests.engine.embedded.harness import Calls, core_of, run
from tests.engine.embedded.test_stopping import LETTERS, with_tokenizer
from tests.engine.models import logprobs, saved, tiny_model

PROMPTS = ((5, 6, 7, 8, 9, 10), (1, 2, 3), tuple(range(11, 40)), (4,))
MODEL = tiny_model(sharpness=3.0)
BLOCK = 16


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    settings = {"cpu_kernels": request.param, "block_size_tokens": BLOCK, "max_running": 32}
    monkeypatch.setattr(harness, "CONFIG", replace(harness.CONFIG, **settings))
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODEL, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token depends on the last one alone, so that what it says goes in circles."""
    return with_tokenizer(saved(looping_model(0), tmp_path_factory.mktemp("looping")))


def looping_model(seed: int) -> PreTrainedModel:
    model = tiny_model(seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
    return model


def drafting(folder: Path, draft_rows: int = 16, **settings: Any) -> EngineCore:
    """A core that is watched: draft tokens keep to their number of rows, to blocks of one holder and within the longest
    response that was asked for."""
    core = core_of(folder, draft_rows=draft_rows, **settings)
    decode, scheduler = core._model_runner.decode, core.scheduler

    def watched(
        tokens: InputBatch, params: AbstractSequence[SamplingParams], uniforms_B: NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        running = [s for s in scheduler.running if not s.num_missing]
        num_rows = len(tokens.token_ids_T)
        assert len(running) <= num_rows <= max(len(running), draft_rows)
        blocks = tokens.tables_BN[np.arange(num_rows), tokens.starts_B // BLOCK]
        assert all(scheduler.blocks.blocks[block].ref_count == 1 for block in blocks), "a shared block is written"
        assert len(set(zip(blocks, tokens.starts_B % BLOCK, strict=True))) == num_rows, "two write to one place"
        room = {s.block_table[-1]: s.max_tokens for s in running}
        assert all(start + 1 < room[block] for block, start in zip(blocks, tokens.starts_B, strict=True))
        return decode(tokens, params, uniforms_B)

    core._model_runner.decode = watched  # type: ignore[method-assign]
    return core


def siblings(**params: Any) -> list[GenerateRequest]:
    """Four of each prompt, of lengths from 20 to 80; two of the four share their noise."""
    return [
        request(f"p{p}s{i}", prompt_ids=ids, seed=10 * p + i // 2, max_new_tokens=20 + 20 * i, **params)
        for p, ids in enumerate(PROMPTS)
        for i in range(4)
    ]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.5}, {}, {"top_k": 9}], ids=str)
def test_drafts_do_not_change_what_is_sampled(folder: Path, params: dict[str, Any], kernels: str) -> None:
    asked = siblings(**params)
    plain, drafter = core_of(folder), drafting(folder)
    without, calls = run(plain, *asked), run(drafter, *asked)
    for req in asked:
        name = req.request_id
        assert calls.tokens(name) == without.tokens(name)
        # compiled, each row is computed alone and in one order, whatever else there is
        assert calls.logprobs(name) == pytest.approx(without.logprobs(name), abs=0 if kernels == "compiled" else 1e-5)
        if "top_k" not in params:
            expected = logprobs(MODEL, req.prompt_ids, calls.tokens(name), params.get("temperature", 1.0) or 1.0)
            assert calls.logprobs(name) == pytest.approx(expected, abs=1e-4)
    stats = drafter.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.decoded_tokens == plain.stats().decoded_tokens
    assert plain.stats().drafted_tokens == 0


def test_on_fixed_batch_sizes_too(folder: Path) -> None:
    asked = siblings(temperature=0.5)
    core = EngineCore(folder, replace(harness.CONFIG, draft_rows=16), make_model_runner=GraphModelRunner)
    without, calls = run(core_of(folder), *asked), run(core, *asked)
    assert all(calls.tokens(req.request_id) == without.tokens(req.request_id) for req in asked)
    assert core.stats().accepted_tokens > 0


def test_one_that_repeats_itself_takes_fewer_iterations_than_tokens(looping: Path) -> None:
    core = drafting(looping, draft_rows=8)
    req = request("a", max_new_tokens=200, temperature=0.0)
    assert run(core, req).tokens("a#0") == run(core_of(looping), req).tokens("a#0")
    stats = core.stats()
    assert stats.decoded_tokens == 200 == stats.decode_iterations + stats.accepted_tokens
    assert stats.decode_iterations < 70
    assert stats.accepted_tokens > 0.8 * stats.drafted_tokens


def test_one_that_follows_a_finished_sibling_takes_its_words(folder: Path) -> None:
    core = drafting(folder, draft_rows=8)
    first = run(core, request("a", max_new_tokens=100)).tokens("a#0")
    iterations = core.stats().decode_iterations
    assert run(core, request("b", max_new_tokens=100)).tokens("b#0") == first
    assert core.stats().decode_iterations - iterations < 50 < iterations


def test_the_acceptance_rate_follows_what_becomes_of_them(folder: Path, looping: Path) -> None:
    for model, temperature in ((folder, 3.0), (looping, 0.0)):
        core = drafting(model, draft_rows=8)
        run(core, *(request(f"s{i}", seed=i, max_new_tokens=150, temperature=temperature) for i in range(2)))
        assert core._drafter is not None
        if model == folder:
            assert core._drafter.acceptance.rate(2) < 0.45
        else:
            assert core._drafter.acceptance.rate(16) > 0.9


def test_with_as_many_sequences_as_rows_nothing_is_drafted(looping: Path) -> None:
    core = drafting(looping, draft_rows=4)
    run(core, *(request(f"s{i}", max_new_tokens=50, temperature=0.0) for i in range(4)))
    assert core.stats().drafted_tokens == 0
    run(core, *(request(f"t{i}", max_new_tokens=50, temperature=0.0) for i in range(3)))
    assert core.stats().drafted_tokens > 0


def test_a_limit_is_met_exactly(looping: Path) -> None:
    core = drafting(looping, draft_rows=16)
    first = run(core, request("a", max_new_tokens=60, temperature=0.0)).tokens("a#0")
    for limit in range(1, 40):
        calls = run(core, request(f"b{limit}", max_new_tokens=limit, temperature=0.0))
        assert calls.tokens(f"b{limit}#0") == first[:limit]
        assert calls.chunks[f"b{limit}#0"][-1].finish_reason is FinishReason.LENGTH


def test_a_stop_token_among_accepted_draft_tokens_ends_the_call_there(folder: Path) -> None:
    core = drafting(folder)
    first = run(core, request("a", max_new_tokens=60)).tokens("a#0")
    for at, stop in enumerate(first[1:30], 1):
        before = core.stats()
        calls = run(core, request(f"b{at}", max_new_tokens=60, stop_token_ids=(stop,)))
        response = calls.tokens(f"b{at}#0")
        assert response == first[: first.index(stop) + 1]
        assert calls.chunks[f"b{at}#0"][-1].finish_reason is FinishReason.STOP
        after = core.stats()
        num_accepted = after.accepted_tokens - before.accepted_tokens
        assert after.decoded_tokens - before.decoded_tokens == len(response)
        assert after.decode_iterations - before.decode_iterations == len(response) - num_accepted
        assert num_accepted > 0 or len(response) < 6


def test_a_stop_string_among_accepted_draft_tokens_ends_the_call_there(looping: Path) -> None:
    core = drafting(looping)
    first = run(core, request("a", max_new_tokens=100, temperature=0.0)).tokens("a#0")
    text = "".join(LETTERS[t] for t in first)
    stop = text[20:23]
    end = text.index(stop) + 3
    calls = run(core, request("b", max_new_tokens=100, temperature=0.0, stop_strings=("never!", stop)))
    assert calls.tokens("b#0") == first[:end]
    assert calls.chunks["b#0"][-1].finish_reason is FinishReason.STOP


def test_chunks_are_of_the_interval_also_where_an_iteration_gives_more(looping: Path) -> None:
    core = drafting(looping, draft_rows=32, stream_interval_tokens=3)
    calls = run(core, request("a", max_new_tokens=50, temperature=0.0))
    assert [len(c.token_ids) for c in calls.chunks["a#0"]] == [3] * 16 + [2]
    assert core.stats().decode_iterations < 25


@pytest.mark.parametrize("keep", [True, False])
def test_parked_and_resumed_at_every_cut_equals_uninterrupted(looping: Path, folder: Path, keep: bool) -> None:
    for model in (looping, folder):
        core = drafting(model)
        params: dict[str, Any] = {"prompt_ids": PROMPTS[0], "max_new_tokens": 40, "temperature": 0.5}
        whole = run(core, request("whole", **params)).tokens("whole#0")
        lengths = set()
        for cut in range(20):
            name = f"cut{cut}"
            calls = Calls(core, [request(name, **params)])
            calls.step(cut)
            if not core.has_work:
                break
            calls.abort(f"{name}#0")
            head = calls.tokens(f"{name}#0")
            lengths.add(len(head))
            if not keep:
                core.scheduler.blocks.forget_all()
            before = core.stats().prefilled_tokens
            calls.add(request(name, response_ids=head, call=1, **params))
            chunks = calls.finish()[f"{name}#1"]
            assert head + calls.tokens(f"{name}#1") == whole
            lost = 0 if keep or not head else len(head) - 1
            assert chunks[0].num_prefilled_tokens == lost
            if keep:
                assert core.stats().prefilled_tokens == before
        assert max(lengths) > len(lengths)  # some iterations gave several tokens
        assert core.stats().accepted_tokens > 0


def test_a_budget_too_small_for_all_preempts_and_nobody_notices(folder: Path) -> None:
    asked = [request(f"s{i}", seed=i // 2, prompt_ids=PROMPTS[0], max_new_tokens=60) for i in range(6)]
    small: dict[str, Any] = {"block_size_tokens": BLOCK, "max_context_tokens": 66}
    poor = drafting(folder, kv_cache_bytes=12 * 2 * 2 * 2 * BLOCK * 16 * 4, **small)
    expected, calls = run(core_of(folder, **small), *asked), run(poor, *asked)
    assert poor.scheduler.num_preempted > 0 and poor.stats().accepted_tokens > 0
    assert all(calls.tokens(req.request_id) == expected.tokens(req.request_id) for req in asked)


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_across_a_weight_update_each_token_is_scored_by_the_version_on_its_label(
    looping: Path, kv_on_update: str
) -> None:
    """Under ``keep`` too: this model does not look back."""
    models = {0: looping_model(0), 1: looping_model(1)}
    core = drafting(looping, kv_on_update=kv_on_update, stream_interval_tokens=7)
    calls = Calls(core, [request(f"s{i}", seed=i, prompt_ids=PROMPTS[0], max_new_tokens=120) for i in range(3)])
    calls.step(24)
    accepted = core.stats().accepted_tokens
    calls.take(core.load(1, MemoryWeights(1, models[1].state_dict())))
    calls.finish()
    assert 0 < accepted < core.stats().accepted_tokens
    for name, chunks in calls.chunks.items():
        versions = [c.policy_version for c in chunks for _ in c.token_ids]
        assert 24 <= versions.count(0) < 120 == len(versions)
        scores = {v: logprobs(m, PROMPTS[0], calls.tokens(name)) for v, m in models.items()}
        assert calls.logprobs(name) == pytest.approx([scores[v][i] for i, v in enumerate(versions)], abs=1e-4)


def test_weights_that_are_not_finite_fail_the_step_also_in_a_draft_token(looping: Path) -> None:
    core = drafting(looping)
    calls = Calls(core, [request("a", max_new_tokens=60, temperature=0.0)])
    calls.step(12)
    core.load(1, MemoryWeights(1, {k: v * float("nan") for k, v in looping_model(0).state_dict().items()}))
    with pytest.raises(Exception, match=r"version 1.*not finite.*a#0"):
        core.step()
    core.reset()
    core.load(2, MemoryWeights(2, looping_model(0).state_dict()))
    assert len(run(core, request("b", max_new_tokens=60, temperature=0.0)).tokens("b#0")) == 60


def test_more_rows_than_samples_may_run_are_refused() -> None:
    for rows in (-1, 5):
        with pytest.raises(ValueError, match=rf"draft_rows must be from 0 to max_running = 4.*got {rows}"):
            EmbeddedConfig(max_running=4, draft_rows=rows)
