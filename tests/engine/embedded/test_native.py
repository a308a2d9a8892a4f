"""The compiled decoder computes what PyTorch computes, row by row, and its absence is said or made up for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rollover.engine.embedded import native
from rollover.engine.embedded.native import Kernels, compiled
from rollover.engine.embedded.sampler import draw_tokens, uniforms
from rollover.errors import EngineError
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import request
from tests.engine.embedded.harness import Calls, core_of, run
from tests.engine.models import logprobs, saved, tiny_model

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, native._COMPILERS)), reason="there is no C compiler on this machine"
)
ODD: dict[str, Any] = {"hidden_size": 20, "intermediate_size": 37, "vocab_size": 61}
"""Sizes that fill no vector and no panel."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return compiled(16, 4, 2)


@pytest.mark.parametrize("num_running", [1, 6, 7, 13, 14, 15, 29])
def test_any_sizes_and_any_number_of_rows_give_transformers_logprobs(num_running: int, tmp_path: Path) -> None:
    model = tiny_model(sharpness=2.0, **ODD)
    core = core_of(saved(model, tmp_path), cpu_kernels="compiled", max_running=num_running)
    asked = [request(f"s{i}", prompt_ids=tuple(range(1, 2 + i)), seed=i, max_new_tokens=6) for i in range(num_running)]
    run(core, *asked).assert_logprobs_of(model, *asked, within=2e-5)


@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (4, 4), (6, 2), (9, 1)])
def test_any_prompt_length_and_number_of_heads_attends_as_transformers(heads: int, groups: int, tmp_path: Path) -> None:
    model = tiny_model(sharpness=2.0, num_attention_heads=heads, num_key_value_heads=groups)
    core = core_of(saved(model, tmp_path), cpu_kernels="compiled", block_size_tokens=16)
    prompts = [tuple((7 * i + j) % 60 for j in range(length)) for i, length in enumerate((1, 2, 16, 17, 33, 250))]
    asked = [request(f"s{i}", prompt_ids=prompt, max_new_tokens=4) for i, prompt in enumerate(prompts)]
    run(core, *asked).assert_logprobs_of(model, *asked, within=2e-5)


def test_bfloat16_weights_are_computed_with_in_float32(tmp_path: Path) -> None:
    model = tiny_model(sharpness=2.0, **ODD)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    core = core_of(saved(model, tmp_path), cpu_kernels="compiled", dtype="bfloat16")
    asked = request("a", max_new_tokens=30)
    run(core, asked).assert_logprobs_of(model, asked, within=2e-5)


@pytest.mark.usefixtures("num_threads")
def test_any_number_of_threads_gives_the_same_bits(tmp_path: Path) -> None:
    folder = saved(tiny_model(sharpness=2.0), tmp_path)
    asked = [request(f"s{i}", prompt_ids=tuple(range(1, 2 + 9 * i)), seed=i, max_new_tokens=8) for i in range(5)]
    seen = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        calls = run(core_of(folder, cpu_kernels="compiled"), *asked)
        seen.append([calls.logprobs(req.request_id) for req in asked])
    assert seen[0] == seen[1] == seen[2]


def test_loaded_weights_replace_all_others(tmp_path: Path) -> None:
    settings = ODD | {"tie_word_embeddings": True}
    old, new = tiny_model(sharpness=2.0, **settings), tiny_model(sharpness=2.0, seed=1, **settings)
    core = core_of(saved(old, tmp_path), cpu_kernels="compiled", kv_on_update="recompute")
    calls = Calls(core, [request("a", max_new_tokens=10)])
    calls.step(5)
    calls.take(core.load(1, MemoryWeights(1, new.state_dict())))
    calls.finish()
    expected = [*logprobs(old, (5, 6, 7), calls.tokens("a#0"))[:5], *logprobs(new, (5, 6, 7), calls.tokens("a#0"))[5:]]
    assert calls.logprobs("a#0") == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_tokens_are_drawn_as_by_torch(kernels: Kernels, vocab: int) -> None:
    draws = 400
    logits = 4 * torch.randn(draws, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[::3, : vocab // 2] = -torch.inf  # what a cut leaves
    temperatures = np.array([0.5, 1.0, 2.0, 0.0] * (draws // 4), dtype=np.float32)
    noise = uniforms(range(draws), [vocab] * draws)
    tokens, logprobs = kernels.draw_tokens(logits, temperatures, noise)
    expected_tokens, expected_logprobs = draw_tokens(logits, temperatures, noise)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)


def test_no_noise_draws_a_token_of_probability_zero(kernels: Kernels) -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [3, 70, 130]] = torch.tensor([0.0, -1.0, -90.0])
    for noise, token in ((2.0**-53, 3), (0.7, 3), (0.75, 70), (1 - 2.0**-53, 70)):
        tokens, logprobs = kernels.draw_tokens(logits, np.ones(1, dtype=np.float32), np.array([noise]))
        assert tokens.item() == token and torch.isfinite(logprobs).all()


def test_logits_that_are_not_finite_give_no_finite_logprob(kernels: Kernels) -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(1, 100)
        logits[0, 50] = bad
        for noise in (0.1, 0.9):
            _, logprobs = kernels.draw_tokens(logits, np.ones(1, dtype=np.float32), np.array([noise]))
            assert not torch.isfinite(logprobs).any()


def test_without_a_compiler_torch_computes_or_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tiny_model(), tmp_path)
    req = request("a", max_new_tokens=10)
    expected = run(core_of(folder, cpu_kernels="compiled"), req).tokens("a#0")
    refuse = Mock(side_effect=OSError("failed to map segment from shared object"))
    for change, message in (
        ((native.ctypes, "CDLL", refuse), r"failed to map segment.*set TMPDIR"),
        ((native, "_COMPILERS", ("no-such-compiler",)), r"cpu_kernels = 'compiled'.*no-such-compiler"),
    ):
        monkeypatch.setattr(*change)
        compiled.cache_clear()
        assert run(core_of(folder, cpu_kernels="auto"), req).tokens("a#0") == expected
        with pytest.raises(EngineError, match=message):
            core_of(folder, cpu_kernels="compiled")
    compiled.cache_clear()


@pytest.mark.parametrize(
    ("script", "message"), [("echo 'no such option' >&2; exit 1", "no such option"), ("sleep 9", "within 0.05 s")]
)
def test_a_compiler_error_is_quoted(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "failing-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "_COMPILERS", (str(compiler),))
    monkeypatch.setattr(native, "_TIMEOUT_S", 0.05 if "sleep" in script else 60)
    compiled.cache_clear()
    with pytest.raises(EngineError, match=f"failing-cc.*{message}"):
        compiled(16, 4, 2)
    compiled.cache_clear()
