"""What must not matter does not: batching, parking, memory pressure, order. What must be recorded is right."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollover.engine.embedded.core import CPU_PREFILL_TOKENS, EngineCore
from rollover.errors import EngineError
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.engine.contract import assert_wellformed, request
from tests.engine.embedded import harness
from tests.engine.embedded.harness import BOTH, Calls, core_of, run
from tests.engine.models import VOCAB, logprobs, saved, tiny_model

PROMPT = (5, 6, 7, 8, 9, 10)
BLOCK_BYTES = 2 * 2 * 2 * 4 * 16 * 4


@BOTH
@pytest.mark.parametrize("keep", [True, False])
def test_parked_and_resumed_at_every_cut_equals_uninterrupted(folder: Path, keep: bool) -> None:
    core = core_of(folder)
    whole = run(core, request("whole", prompt_ids=PROMPT, max_new_tokens=30))
    for cut in range(30):
        name = f"cut{cut}"
        calls = Calls(core, [request(name, prompt_ids=PROMPT, max_new_tokens=30)])
        calls.step(cut)
        calls.abort(f"{name}#0")
        head = calls.tokens(f"{name}#0")
        assert len(head) == cut
        if not keep:
            core.scheduler.blocks.forget_all()
        before = core.stats()
        calls.add(request(name, prompt_ids=PROMPT, max_new_tokens=30, response_ids=head, call=1))
        chunks = calls.finish()[f"{name}#1"]
        assert head + calls.tokens(f"{name}#1") == whole.tokens("whole#0")
        logprobs = calls.logprobs(f"{name}#0") + calls.logprobs(f"{name}#1")
        assert logprobs == pytest.approx(whole.logprobs("whole#0"), abs=1e-5)
        lost = 0 if keep or not cut else cut - 1  # the last token's cache never existed
        assert chunks[0].num_prefilled_tokens == lost
        if keep:
            assert core.stats().prefilled_tokens == before.prefilled_tokens
        elif cut:
            assert core.stats().reprefilled_tokens - before.reprefilled_tokens == len(PROMPT) + cut - 1


@BOTH
def test_a_rollout_is_the_same_alone_and_in_any_batch(folder: Path) -> None:
    requests = [
        request(
            f"s{i}",
            prompt_ids=tuple(range(1, 3 + 5 * (i % 4))),
            max_new_tokens=10 + 3 * i,
            seed=i,
            temperature=(1.0, 0.0, 0.7)[i % 3],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.9, 1.0)[i % 3],
        )
        for i in range(16)
    ]
    alone = {r.request_id: run(core_of(folder), r).tokens(r.request_id) for r in requests}
    for seed, max_running in ((0, 16), (1, 5), (2, 3)):
        shuffled = random.Random(seed).sample(requests, len(requests))
        calls = run(core_of(folder, max_running=max_running), *shuffled)
        assert {r.request_id: calls.tokens(r.request_id) for r in requests} == alone


@pytest.mark.parametrize("length", [1, 8, 33])
def test_siblings_prefill_their_prompt_once_and_draw_noise_of_their_own(folder: Path, length: int) -> None:
    prompt = tuple(range(1, length + 1))
    core = core_of(folder, max_running=8)
    calls = run(core, *(request(f"s{i}", seed=i, prompt_ids=prompt, max_new_tokens=20) for i in range(12)))
    assert core.stats().prefilled_tokens == length - 1
    for i in range(12):
        alone = run(core_of(folder), request("a", seed=i, prompt_ids=prompt, max_new_tokens=20))
        assert calls.tokens(f"s{i}#0") == alone.tokens("a#0")
    assert len({calls.tokens(f"s{i}#0") for i in range(12)}) == 12


def test_long_prompts_are_prefilled_in_chunks_while_others_decode(folder: Path) -> None:
    core = core_of(folder, prefill_chunk_tokens=10)
    calls = Calls(core, [request("short", max_new_tokens=20)])
    calls.step(2)
    calls.add(request("long", prompt_ids=tuple(range(1, 52)), max_new_tokens=20))
    calls.step(4)
    assert len(calls.tokens("short#0")) == 6 and calls.tokens("long#0") == ()
    calls.step()  # 50 tokens in five chunks; the fifth iteration decodes too
    assert len(calls.tokens("long#0")) == 1
    calls.finish()
    whole = run(core_of(folder), request("a", prompt_ids=tuple(range(1, 52)), max_new_tokens=20))
    assert calls.tokens("long#0") == whole.tokens("a#0")


def test_a_budget_too_small_for_all_preempts_and_nobody_notices(folder: Path) -> None:
    requests = [request(f"s{i}", seed=i, prompt_ids=PROMPT, max_new_tokens=60) for i in range(8)]
    rich = core_of(folder, max_context_tokens=66)
    poor = core_of(folder, max_context_tokens=66, kv_cache_bytes=40 * BLOCK_BYTES)
    expected, calls = run(rich, *requests), run(poor, *requests)
    assert poor.scheduler.num_preempted > 0 and rich.scheduler.num_preempted == 0
    assert poor.stats().reprefilled_tokens > 0 and rich.stats().reprefilled_tokens == 0
    for req in requests:
        assert calls.tokens(req.request_id) == expected.tokens(req.request_id)
        assert_wellformed(calls.chunks[req.request_id])
        assert sum(c.num_prefilled_tokens for c in calls.chunks[req.request_id]) == 0
    assert poor.stats().kv_bytes <= 40 * BLOCK_BYTES


def test_parked_caches_are_evicted_by_block_from_the_oldest_ones_end(folder: Path) -> None:
    core = core_of(folder, max_context_tokens=64, kv_cache_bytes=31 * BLOCK_BYTES)
    calls = Calls(core)
    asked = {name: request(name, seed=seed, prompt_ids=PROMPT, max_new_tokens=50) for seed, name in enumerate("on")}
    for name, req in asked.items():
        calls.add(req)
        calls.step(30)
        calls.abort(f"{name}#0")
    calls.add(request("big", prompt_ids=tuple(range(20, 40)), max_new_tokens=40))
    calls.finish()
    # 35 tokens each in nine blocks, the first one shared, and 59 in fifteen: two more than the thirty there are
    assert core.scheduler.blocks.num_evicted == 2
    for name, lost in (("n", 0), ("o", 35 - 7 * 4)):
        resumed = replace(asked[name], request_id=f"{name}#1", response_ids=calls.tokens(f"{name}#0"))
        before = core.stats()
        calls.add(resumed)
        assert calls.finish()[f"{name}#1"][0].num_prefilled_tokens == lost
        assert core.stats().reprefilled_tokens - before.reprefilled_tokens == lost
        assert core.stats().cached_tokens - before.cached_tokens == 35 - lost
        whole = run(core_of(folder), replace(asked[name], request_id="whole")).tokens("whole")
        assert calls.tokens(f"{name}#0") + calls.tokens(f"{name}#1") == whole


SYSTEM = tuple(range(30, 49))
"""Four full blocks and three tokens more."""
QUESTIONS = [(*SYSTEM, *(1 + i, 9, 20 - i)) for i in range(8)]


@BOTH
def test_shared_prefixes_are_prefilled_once_and_change_no_sample(folder: Path) -> None:
    asked = [request(f"q{i}", seed=i, prompt_ids=ids, max_new_tokens=15) for i, ids in enumerate(QUESTIONS)]
    core = core_of(folder)
    calls = run(core, *asked)
    stats = core.stats()
    assert stats.prefilled_tokens == 21 + 7 * 2, "the others wait for the blocks of the first one"
    assert stats.cached_tokens == 7 * len(SYSTEM)
    assert stats.reprefilled_tokens == 0
    later = run(core, request("later", seed=3, prompt_ids=QUESTIONS[3], max_new_tokens=15)).tokens("later#0")
    assert core.stats().prefilled_tokens == stats.prefilled_tokens
    assert later == calls.tokens("q3#0")
    for req in asked:
        alone = run(core_of(folder), req)
        assert calls.tokens(req.request_id) == alone.tokens(req.request_id)
        assert calls.logprobs(req.request_id) == pytest.approx(alone.logprobs(req.request_id), abs=1e-5)


def test_the_next_turn_prefills_what_is_new_in_it(folder: Path) -> None:
    core = core_of(folder)
    first = run(core, request("turn1", prompt_ids=PROMPT, max_new_tokens=20)).tokens("turn1#0")
    before = core.stats().prefilled_tokens
    second = (*PROMPT, *first, 3, 4, 5)
    calls = run(core, request("turn2", prompt_ids=second, max_new_tokens=15))
    assert core.stats().prefilled_tokens - before == 3, "the last sampled token and two of the three new ones"
    fresh = run(core_of(folder), request("turn2", prompt_ids=second, max_new_tokens=15))
    assert calls.tokens("turn2#0") == fresh.tokens("turn2#0")


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_what_older_weights_computed_is_found_by_nobody_who_starts_afresh(folder: Path, kv_on_update: str) -> None:
    """Also if the version stays the same."""
    core, new = core_of(folder, kv_on_update=kv_on_update), tiny_model(seed=1, sharpness=3.0)
    run(core, request("old", prompt_ids=QUESTIONS[0], max_new_tokens=15))
    core.load(0, MemoryWeights(0, new.state_dict()))
    before = core.stats()
    asked = request("new", prompt_ids=QUESTIONS[0], max_new_tokens=15)
    calls = run(core, asked)
    assert core.stats().prefilled_tokens - before.prefilled_tokens == len(QUESTIONS[0]) - 1
    assert core.stats().cached_tokens == before.cached_tokens
    calls.assert_logprobs_of(new, asked, within=1e-4)


def test_under_keep_new_cache_is_not_found_by_a_call_with_older_cache(folder: Path) -> None:
    core, new = core_of(folder, kv_on_update="keep"), tiny_model(seed=1, sharpness=3.0)
    calls = Calls(core, [request("kept", prompt_ids=PROMPT, max_new_tokens=30)])
    calls.step(5)
    calls.take(core.load(1, MemoryWeights(1, new.state_dict())))
    calls.step(10)
    head = calls.tokens("kept#0")
    calls.abort("kept#0")
    asked = request("fresh", prompt_ids=(*PROMPT, *head), max_new_tokens=5)
    fresh = run(core, asked)
    assert {c.kv_version for c in fresh.chunks["fresh#0"]} == {1}
    fresh.assert_logprobs_of(new, asked, within=1e-4)
    before = core.stats().prefilled_tokens
    calls.add(request("kept", prompt_ids=PROMPT, max_new_tokens=30, response_ids=head, call=1))
    assert {c.kv_version for c in calls.finish()["kept#1"]} == {0}
    assert core.stats().prefilled_tokens == before


def test_isolated_prompts_share_with_their_siblings_alone(folder: Path) -> None:
    core = EngineCore(folder, harness.CONFIG, isolate_prompts=True)
    asked = [
        replace(request(f"q{i}s{j}", prompt_ids=QUESTIONS[i], seed=j, max_new_tokens=9), prompt_key=f"q{i}")
        for i in range(3)
        for j in range(4)
    ]
    calls = run(core, *asked)
    assert core.stats().prefilled_tokens == 3 * 21 and core.stats().cached_tokens == 9 * 21
    both = run(core_of(folder), *asked)
    assert all(calls.tokens(r.request_id) == both.tokens(r.request_id) for r in asked)
    first = (*QUESTIONS[0], *calls.tokens("q0s0#0"))
    run(core, replace(request("turn", prompt_ids=first, max_new_tokens=5), prompt_key="q0"))
    # of a finished response nothing is left but the three tokens in the block in which the prompt ends
    assert core.stats().prefilled_tokens == 3 * 21 + 9 - 3


@BOTH
def test_under_recompute_every_token_is_scored_by_the_version_on_its_label(folder: Path) -> None:
    models = {0: tiny_model(sharpness=3.0), 2: tiny_model(seed=1, sharpness=3.0), 3: tiny_model(seed=2, sharpness=3.0)}
    core = core_of(folder, kv_on_update="recompute", stream_interval_tokens=7)
    calls = Calls(core, [request(f"s{i}", seed=i, prompt_ids=PROMPT, max_new_tokens=40) for i in range(3)])
    calls.step(10)
    calls.abort("s2#0")
    calls.take(core.load(2, MemoryWeights(2, models[2].state_dict())))
    calls.step(10)
    calls.take(core.load(3, FolderWeights(3, saved(models[3], folder.parent / "later"))))
    calls.add(request("s2", seed=2, prompt_ids=PROMPT, max_new_tokens=40, response_ids=calls.tokens("s2#0"), call=1))
    calls.finish()
    calls.chunks["s2#0"] += calls.chunks.pop("s2#1")
    for chunks in calls.chunks.values():
        versions = [c.policy_version for c in chunks for _ in c.token_ids]
        response = tuple(t for c in chunks for t in c.token_ids)
        assert all(c.kv_version == c.policy_version for c in chunks)
        assert len(response) == 40
        scores = {v: logprobs(m, PROMPT, response) for v, m in models.items()}
        recorded = [p for c in chunks for p in c.logprobs]
        assert recorded == pytest.approx([scores[v][i] for i, v in enumerate(versions)], abs=1e-4)
    assert [c.policy_version for c in calls.chunks["s0#0"]] == [0, 0, 2, 2, 3, 3, 3]


@BOTH
def test_under_keep_recorded_logprobs_belong_to_neither_version(folder: Path) -> None:
    old, new = tiny_model(sharpness=3.0), tiny_model(seed=1, sharpness=3.0)
    core = core_of(folder, kv_on_update="keep")
    calls = Calls(core, [request("a", prompt_ids=PROMPT, max_new_tokens=40)])
    calls.step(15)
    prefilled = core.stats().prefilled_tokens
    calls.take(core.load(1, MemoryWeights(1, new.state_dict())))
    chunks = calls.finish()["a#0"]
    assert core.stats().prefilled_tokens == prefilled
    assert [(c.policy_version, c.kv_version) for c in chunks if c.token_ids] == [(0, 0)] * 15 + [(1, 0)] * 25
    response, recorded = calls.tokens("a#0"), calls.logprobs("a#0")
    cache = old(input_ids=torch.tensor([PROMPT + response[:14]]), use_cache=True).past_key_values
    with torch.no_grad():  # transformers' new weights over transformers' old cache
        logits = new(torch.tensor([response[14:-1]]), None, None, cache, use_cache=True).logits
        table = logits[0].log_softmax(-1)
    mixed = [float(row[token]) for row, token in zip(table, response[15:], strict=True)]
    assert recorded[15:] == pytest.approx(mixed, abs=1e-4)
    for model in (old, new):
        pure = logprobs(model, PROMPT, response)[15:]
        assert max(abs(a - b) for a, b in zip(pure, recorded[15:], strict=True)) > 0.1


def test_what_a_weight_update_costs_is_declared(folder: Path) -> None:
    assert core_of(folder, kv_on_update="keep").capabilities.prefill_tokens_per_iteration == math.inf
    assert core_of(folder, kv_on_update="recompute").capabilities.prefill_tokens_per_iteration == CPU_PREFILL_TOKENS


def test_under_keep_a_parked_sample_resumes_with_the_age_of_its_cache(folder: Path) -> None:
    core = core_of(folder, kv_on_update="keep")
    calls = Calls(core, [request("a", prompt_ids=PROMPT, max_new_tokens=20)])
    calls.step(5)
    calls.abort("a#0")
    core.load(4, MemoryWeights(4, tiny_model(seed=1).state_dict()))
    calls.add(
        request("a", prompt_ids=PROMPT, max_new_tokens=20, response_ids=calls.tokens("a#0"), call=1),
        request("fresh", prompt_ids=PROMPT, max_new_tokens=20),
    )
    calls.finish()
    assert {(c.policy_version, c.kv_version) for c in calls.chunks["a#1"]} == {(4, 0)}
    assert calls.chunks["a#1"][0].num_prefilled_tokens == 0
    assert {(c.policy_version, c.kv_version) for c in calls.chunks["fresh#0"]} == {(4, 4)}


def test_fewer_tokens_than_were_parked_resume_from_what_they_share(folder: Path) -> None:
    core = core_of(folder)
    whole = run(core, request("whole", prompt_ids=PROMPT, max_new_tokens=20)).tokens("whole#0")
    for kept in range(9):
        name = f"a{kept}"
        calls = Calls(core, [request(name, prompt_ids=PROMPT, max_new_tokens=20)])
        calls.step(9)
        calls.abort(f"{name}#0")
        calls.add(request(name, prompt_ids=PROMPT, max_new_tokens=20, response_ids=whole[:kept], call=1))
        assert calls.finish()[f"{name}#1"][0].num_prefilled_tokens == 0
        assert whole[:kept] + calls.tokens(f"{name}#1") == whole


def test_requests_that_cannot_run_are_refused_by_name(folder: Path) -> None:
    core = core_of(folder, max_context_tokens=64)
    core.add(request("a"))
    for bad, message in (
        (request("a"), "'a#0' was used before"),
        (request("b", prompt_ids=()), "empty prompt"),
        (request("c", max_new_tokens=2, response_ids=(1, 2)), "no budget left.*has 2 tokens of"),
        (request("d", prompt_ids=(1,) * 60), "may reach 72 tokens, but the embedded engine takes 64"),
        (request("e", prompt_ids=(1, VOCAB)), f"{VOCAB}.*{VOCAB - 1}"),
        (request("f", stop_strings=("x",)), "tokenizer"),
    ):
        with pytest.raises(EngineError, match=message):
            core.add(bad)
    assert core.stats().num_waiting == 1


def test_an_iteration_runs_on_the_engines_own_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, used = core_of(folder), []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        used.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    for device in (torch.device("cpu"), torch.device("cuda:1")):
        core.device = device
        core.step()
    assert used == [torch.device("cuda:1")]


@BOTH
def test_nonfinite_logits_fail_the_step_and_leave_a_usable_engine(folder: Path) -> None:
    core = core_of(folder)
    good = tiny_model(sharpness=3.0).state_dict()
    before = run(core, request("a", max_new_tokens=10)).tokens("a#0")
    core.load(1, MemoryWeights(1, {k: v * float("nan") for k, v in good.items()}))
    core.add(request("b"))
    with pytest.raises(EngineError, match=r"version 1.*not finite.*b#0"):
        core.step()
    assert core.reset() == ["b#0"]
    core.load(2, MemoryWeights(2, good))
    assert run(core, request("c", max_new_tokens=10)).tokens("c#0") == before
