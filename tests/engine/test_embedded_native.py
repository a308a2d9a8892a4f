"""The compiled kernels compute what PyTorch computes, row by row, and their absence is said or made up for."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollover.engine.embedded import native
from rollover.engine.embedded.native import NativeOps, compiled
from rollover.engine.embedded.ops import TorchOps
from rollover.engine.embedded.sampler import draw_tokens, uniforms
from rollover.errors import EngineError
from tests.engine.contract import request
from tests.engine.harness import core_of, run
from tests.engine.models import saved, tiny_model

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, native._COMPILERS)), reason="there is no C compiler on this machine"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(compiled(16, 4, 2), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 30])
def test_products_with_several_parameters_of_any_size_equal_torchs(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for in_size, out_sizes in ((1, (1,)), (5, (31, 2)), (48, (16, 8, 8)), (33, (70, 1, 64))):
        parts = [torch.randn(size, in_size, generator=generator) for size in out_sizes]
        matrix = NativeOps(compiled(16, 4, 2), dtype).matrix(in_size, sum(out_sizes))
        for first, part in zip(np.cumsum([0, *out_sizes]), parts, strict=False):
            matrix.fill(int(first), part)
        x, total = torch.randn(rows, in_size, generator=generator), torch.randn(rows, sum(out_sizes))
        expected = x @ torch.cat(parts).to(dtype).float().t()
        torch.testing.assert_close(matrix.times(x), expected, atol=1e-5, rtol=1e-5)
        added = total.clone()
        matrix.add_times(x, added)
        torch.testing.assert_close(added, total + expected, atol=1e-5, rtol=1e-5)


def test_a_row_of_a_product_does_not_depend_on_the_others(ops: NativeOps) -> None:
    matrix = ops.matrix(96, 80)
    matrix.fill(0, torch.randn(80, 96, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(1))
    together = matrix.times(x)
    for i in range(20):
        assert torch.equal(matrix.times(x[i : i + 1])[0], together[i])


def test_norm_and_activation_equal_torchs(ops: NativeOps) -> None:
    x, weight = torch.randn(9, 40) * 3, torch.rand(40)
    reference = TorchOps(torch.float32, CPU)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    wide = torch.cat([x * 50, x, torch.tensor([[0.0, -200.0, 200.0, -1e-30] * 10])])
    torch.testing.assert_close(ops.silu_product(wide), reference.silu_product(wide))


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_tokens_are_drawn_as_by_torch(ops: NativeOps, vocab: int) -> None:
    draws = 400
    logits = 4 * torch.randn(draws, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[::3, : vocab // 2] = -torch.inf  # what a cut leaves
    temperatures = np.array([0.5, 1.0, 2.0, 0.0] * (draws // 4), dtype=np.float32)
    noise = uniforms(range(draws), [vocab] * draws)
    tokens, logprobs = ops.draw_tokens(logits, temperatures, noise)
    expected_tokens, expected_logprobs = draw_tokens(logits, temperatures, noise)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)


def test_no_noise_draws_a_token_of_probability_zero(ops: NativeOps) -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [3, 70, 130]] = torch.tensor([0.0, -1.0, -90.0])
    for noise, token in ((2.0**-53, 3), (0.7, 3), (0.75, 70), (1 - 2.0**-53, 70)):
        tokens, logprobs = ops.draw_tokens(logits, np.ones(1, dtype=np.float32), np.array([noise]))
        assert tokens.item() == token and torch.isfinite(logprobs).all()


def test_logits_that_are_not_finite_give_no_finite_logprob(ops: NativeOps) -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(1, 100)
        logits[0, 50] = bad
        for noise in (0.1, 0.9):
            _, logprobs = ops.draw_tokens(logits, np.ones(1, dtype=np.float32), np.array([noise]))
            assert not torch.isfinite(logprobs).any()


def test_a_decoded_rollout_is_bit_for_bit_the_same_in_any_batch(tmp_path: Path) -> None:
    folder = saved(tiny_model(sharpness=2.0), tmp_path)
    requests = [request(f"s{i}", prompt_ids=(i + 1,), seed=i, max_new_tokens=20 + i) for i in range(11)]
    together = run(core_of(folder, cpu_kernels="compiled", max_running=11), *requests)
    for req in requests:
        alone = run(core_of(folder, cpu_kernels="compiled"), req)
        assert alone.logprobs(req.request_id) == together.logprobs(req.request_id)


def test_without_a_compiler_torch_computes_or_the_wish_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tiny_model(), tmp_path)
    req = request("a", max_new_tokens=10)
    expected = run(core_of(folder, cpu_kernels="compiled"), req).tokens("a#0")
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
    compiled.cache_clear()
    assert run(core_of(folder, cpu_kernels="auto"), req).tokens("a#0") == expected
    with pytest.raises(EngineError, match=r"cpu_kernels = 'compiled'.*no-such-compiler"):
        core_of(folder, cpu_kernels="compiled")
    compiled.cache_clear()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "failing-cc"
    script.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(native, "_COMPILERS", (str(script),))
    compiled.cache_clear()
    with pytest.raises(EngineError, match=r"failing-cc could not compile.*no such option"):
        compiled(16, 4, 2)
    compiled.cache_clear()
