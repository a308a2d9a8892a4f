"""Decoding in batches of fixed sizes, as a GPU does it, is decoding."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from rollover.engine.embedded import graphs
from rollover.engine.embedded.experts import Experts, apply_by_expert, apply_to_all, choose
from rollover.engine.embedded.graphs import GatheredAttention, bucket
from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.model import Weights
from rollover.engine.embedded.ops import TorchLayout
from rollover.engine.embedded.rotary import Rotary
from rollover.hf.architecture import Architecture
from tests.engine.contract import request
from tests.engine.embedded.harness import Calls, core_of, run
from tests.engine.models import EXPERTS, FAMILIES, greedy, saved, tiny_model

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ON_CPU = ("qwen3", "qwen3_moe, a dense layer, a window", "olmo2", "smollm3 with a window", "granite", "glm4 with yarn")
"""Families that differ in what a batch of a fixed size computes; ``test_model.py`` has all."""


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in ON_CPU),
        *(pytest.param(name, "cuda", marks=GPU) for name in ("llama", "qwen2", "qwen3", *FAMILIES)),
    ],
)
def test_greedy_tokens_and_their_logprobs_equal_transformers(name: str, device: str, tmp_path: Path) -> None:
    kind, config = FAMILIES.get(name, (name, {}))
    model = tiny_model(kind, **config)
    prompts = [tuple(range(1, n)) for n in (2, 5, 6, 20, 41)]
    asked = [request(str(i), prompt_ids=p, max_new_tokens=20 + i, temperature=0.0) for i, p in enumerate(prompts)]
    core = core_of(
        saved(model, tmp_path), recorded=True, max_running=5, device=device, dtype="float32", block_size_tokens=16
    )
    calls = run(core, *asked)
    for req in asked:
        response = calls.tokens(req.request_id)
        assert response == greedy(model, req.prompt_ids, len(response))
    calls.assert_logprobs_of(model, *asked, within=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rollout_is_the_same_in_any_batch_cut_or_not_parked_or_not(device: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(sharpness=3.0), tmp_path)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}]
    asked = [request(f"s{i}", seed=i, max_new_tokens=10 + i, **kinds[i % 4]) for i in range(19)]
    where: dict[str, Any] = {"recorded": True, "device": device, "dtype": "float32"}
    alone = [run(core_of(folder, **where), req).tokens(req.request_id) for req in asked]
    core = core_of(folder, max_running=19, **where)
    calls = Calls(core, asked)
    calls.step(7)
    calls.abort(*(req.request_id for req in asked))
    heads = [calls.tokens(req.request_id) for req in asked]
    resumed = [
        request(f"s{i}", seed=i, max_new_tokens=10 + i, response_ids=head, call=1, **kinds[i % 4])
        for i, head in enumerate(heads)
    ]
    calls.add(*resumed)
    calls.finish()
    assert core.stats().prefilled_tokens == 2  # of one prompt, shared
    assert [head + calls.tokens(req.request_id) for head, req in zip(heads, resumed, strict=True)] == alone


def test_other_threads_may_use_the_gpu_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", cuda := MagicMock())
    graphs._Recording(Mock(), torch.device("cuda"), graphs._SharedMemory())
    assert cuda.graph.call_args.kwargs["capture_error_mode"] == "thread_local"


def test_a_batch_is_filled_up_by_an_eighth_at_most() -> None:
    for most in (1, 7, 100, 512):
        sizes = [bucket(n, most) for n in range(1, most + 1)]
        assert all(n <= size <= min(most, max(n, 9 * n // 8 + 1)) for n, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes) and len(set(sizes)) <= 16 + 8 * most.bit_length()


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter on NumPy 1
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", ["qwen3", "olmo2", "smollm3 with a window"])
def test_triton_kernels_attend_as_torch_does(name: str, splits: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from rollover.engine.embedded import paged_triton

    kind, config = FAMILIES.get(name, (name, {}))
    arch = Architecture.from_folder(saved(tiny_model(kind, **config), tmp_path))
    generator = torch.Generator().manual_seed(0)
    index = 1  # of SmolLM3, the layer that slides and does not rotate
    layer = Weights(arch, CPU, TorchLayout(torch.float32, CPU)).layers[index]
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.uniform_(0.5, 1.5, generator=generator)
    rotary = Rotary(arch, 128, torch.float32, CPU)
    inputs = torch.tensor([[47, 1, 2, 3], [0, 4, 0, 0], [16, 5, 6, 0]])
    lengths, tables = inputs[:, 0], inputs[:, 1:]
    qkv = torch.randn(3, (4 + 2 * 2) * 16, generator=generator)
    outputs, pools = [], []
    for attention in (GatheredAttention, paged_triton.TritonAttention):
        kv = KVCache(arch, 7, 16, torch.float32, CPU)
        for pool in (kv.keys[index], kv.values[index]):
            pool[1:].normal_(generator=torch.Generator().manual_seed(1))
        made = attention(kv, rotary, tables, lengths)
        if isinstance(made, paged_triton.TritonAttention):
            made._splits = splits
        outputs.append(made(index, layer, qkv.clone()))
        pools.append((kv.keys[index], kv.values[index]))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(pools[0], pools[1])


def experts_of(folder: Path, **sizes: int) -> Experts:
    """The experts of a layer, without weights but for those that a test gives them."""
    arch = Architecture.from_folder(saved(tiny_model("qwen3_moe", **EXPERTS | sizes), folder))
    experts = Weights(arch, CPU, TorchLayout(torch.float32, CPU)).layers[0].mlp
    assert isinstance(experts, Experts)
    return experts


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("num_tokens", [1, 5, 50])
def test_all_ways_to_compute_experts_agree(num_tokens: int, tmp_path: Path) -> None:
    """With sizes that fill no block, and experts that nobody chose."""
    pytest.importorskip("triton")
    from rollover.engine.embedded.experts_triton import apply_with_triton

    sizes = {"hidden_size": 40, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
    experts = experts_of(tmp_path, **sizes)
    generator = torch.Generator().manual_seed(num_tokens)
    for stack in (experts.gate_up.stack_EIO, experts.down.stack_EIO):
        assert stack is not None
        stack.normal_(0, 0.2, generator=generator)
    x = torch.randn(num_tokens, 40, generator=generator)
    weights, ids = torch.rand(num_tokens, 2, generator=generator), torch.randint(0, 6, (num_tokens, 1))
    ids = torch.cat([ids, (ids + 1) % 7], 1)
    found = [apply(experts, x, weights, ids) for apply in (apply_by_expert, apply_to_all, apply_with_triton)]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_of_equal_experts_the_lower_id_is_chosen(tmp_path: Path) -> None:
    experts = experts_of(tmp_path)
    experts.router.fill(0, torch.tensor([1.0, 2, 2, 1, 3, 1, 2, 3])[:, None].expand(8, 32))
    weights, ids = choose(experts, torch.ones(1, 32) / 32)
    assert ids.tolist() == [[4, 7, 1]] and weights.sum().item() == pytest.approx(1)


def test_the_gpu_benchmark_measures_the_engine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # ``test_gpu_training.py`` has its training
    out, lengths = tmp_path / "gpu.json", tmp_path / "lengths.json"
    lengths.write_text(json.dumps([[5 + 3 * i, 40 - 2 * i] for i in range(16)]))
    options = ("--device", "cpu", "--small", "--dtype", "float32", "--parts", "engine", "--lengths", str(lengths))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options, "--out", str(out)])
    importlib.import_module("gpu").main()
    found = json.loads(out.read_text())["shapes"]["tiny"]
    assert found["correctness"]["float32"]["largest_logprob_error"] < 1e-4
    assert [row["batch"] for row in found["decode"]] == [1, 3]
    assert found["sync"]["reprefilled_tokens"] == found["april"]["reprefilled_tokens"] == 0
    assert found["sync"]["trained_tokens"] > 0 and found["april"]["iterations"] > 0
