"""Guesses change when tokens are drawn, not which; and they are looked up where a search through all texts finds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.base import GenerateRequest
from rollover.engine.embedded.core import EngineCore
from tests.engine import harness
from tests.engine.contract import request
from tests.engine.harness import core_of, run
from tests.engine.models import logprobs, saved, tiny_model

PROMPTS = ((5, 6, 7, 8, 9, 10), (1, 2, 3), tuple(range(11, 40)), (4,))
MODEL = tiny_model(sharpness=3.0)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        harness, "CONFIG", replace(harness.CONFIG, cpu_kernels=request.param, block_size_tokens=16, max_running=32)
    )
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODEL, tmp_path_factory.mktemp("model"))


def siblings(**params: Any) -> list[GenerateRequest]:
    """Four of each prompt, of lengths from 20 to 80; two of the four share their noise."""
    return [
        request(f"p{p}s{i}", prompt_ids=ids, seed=10 * p + i // 2, max_new_tokens=20 + 20 * i, **params)
        for p, ids in enumerate(PROMPTS)
        for i in range(4)
    ]


def sampled(core: EngineCore, asked: list[GenerateRequest]) -> dict[str, tuple[int, ...]]:
    calls = run(core, *asked)
    return {req.request_id: calls.tokens(req.request_id) for req in asked}


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}],
    ids=str,
)
def test_guesses_do_not_change_what_is_sampled(folder: Path, params: dict[str, Any], kernels: str) -> None:
    asked = siblings(**params)
    plain, guessing = core_of(folder), core_of(folder, draft_rows=16)
    without, calls = run(plain, *asked), run(guessing, *asked)
    for req in asked:
        name = req.request_id
        assert calls.tokens(name) == without.tokens(name)
        assert calls.logprobs(name) == pytest.approx(without.logprobs(name), abs=0 if kernels == "compiled" else 1e-5)
        if "top_k" not in params:
            expected = logprobs(MODEL, req.prompt_ids, calls.tokens(name), params["temperature"] or 1.0)
            assert calls.logprobs(name) == pytest.approx(expected, abs=1e-4)
    stats = guessing.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.decoded_tokens == plain.stats().decoded_tokens
    assert plain.stats().drafted_tokens == 0
