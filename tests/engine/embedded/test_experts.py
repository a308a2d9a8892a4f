"""Mixtures of experts: what is chosen is transformers' choice, comes with the token, and depends on no other row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore
from rollover.engine.embedded.experts import Experts, apply_by_expert, choose
from rollover.engine.embedded.model import Weights
from rollover.engine.embedded.native import _Routing
from rollover.engine.embedded.ops import TorchLayout
from rollover.errors import EngineError
from rollover.hf.architecture import Architecture
from rollover.routes import check_routes
from rollover.trainer.memory import _Allocations
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, tokens
from tests.engine.embedded.harness import Calls, core_of, digests_in, digests_of, run
from tests.engine.models import EXPERTS, FAMILIES, logprobs, saved, tiny_model
from tests.engine.servers.embedded.kit import CONTEXT, opened, serving

WAYS = ["compiled", "torch", "recorded"]
ROUNDING = 1e-5
"""Of log-probs: float32 rounds at 6e-8 of its sums, here of up to 64 terms of about 1 in each of two layers, 8e-6 in
all. A wrong expert moves the worst of a response by more than a tenth."""


def experts_model(seed: int = 0, **settings: Any) -> PreTrainedModel:
    return tiny_model("qwen3_moe", seed=seed, sharpness=1.0, **EXPERTS | settings)


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64: float32 puts transformers' own log-probs off by up to 6e-6."""
    model.set_experts_implementation("eager")
    return model.double()


def core_by(way: str, folder: Path, **settings: Any) -> EngineCore:
    kernels = {} if way == "recorded" else {"cpu_kernels": way}
    return core_of(folder, recorded=way == "recorded", **kernels, **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_an_iteration_takes_for_its_experts(dtype: Any) -> None:
    sizes = {"hidden_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    shape = experts_model(**sizes).config.to_dict()
    arch, cpu = Architecture.from_config(shape), torch.device("cpu")
    config = EmbeddedConfig(device="cpu", cpu_kernels="torch", dtype=dtype, prefill_chunk_tokens=512, max_running=8)

    def estimate(config: EmbeddedConfig) -> int:
        return config.memory(1, shape, on_gpu=False, capacity=None)["rows of experts"]

    layout = TorchLayout(getattr(torch, dtype), cpu)
    experts = Weights(arch, cpu, layout).layers[0].mlp
    assert isinstance(experts, Experts)
    for matrices in (experts.gate_up, experts.down):
        assert matrices.stack_EIO is not None
        matrices.stack_EIO.normal_(0, 0.1)
    experts.router.fill(0, torch.randn(16, 256))
    x_TH = torch.randn(512, 256).to(layout.dtype)
    with _Allocations(known=[x_TH]) as allocations:
        apply_by_expert(experts, x_TH, *choose(experts, x_TH))
    assert allocations.peak == pytest.approx(estimate(config), rel=0.1)
    compiled = sum(array.nbytes for array in _Routing(arch, 512, apart=0)._arrays)
    assert compiled == pytest.approx(estimate(replace(config, cpu_kernels="compiled")), rel=0.05)


def routes_of(chunks: list[Chunk]) -> tuple[bytes, ...]:
    return tuple(route for chunk in chunks for route in chunk.routes)


def chosen(model: PreTrainedModel, req: GenerateRequest, response: tuple[int, ...]) -> list[list[int]]:
    """The experts that transformers' routers choose for the row before each token of a response, layer by layer."""
    found: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert all(isinstance(router, nn.Module) for router in routers)
    hooks = [router.register_forward_hook(lambda *given: found.append(given[2][2])) for router in routers]
    with torch.no_grad():
        model(input_ids=torch.tensor([req.prompt_ids + req.response_ids + response]))
    for hook in hooks:
        hook.remove()
    rows = torch.stack(found, 1)[-len(response) - 1 : -1]
    return [row.flatten().tolist() for row in rows]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe, a dense layer, a window"])
def test_routes_and_logprobs_are_those_of_transformers(name: str, way: str, tmp_path: Path) -> None:
    model = experts_model(**FAMILIES[name][1])
    core = core_by(way, saved(model, tmp_path), prefill_chunk_tokens=16, max_running=3)
    model = exact(model)
    prompts = [tuple(range(1, n)) for n in (2, 5, 20, 41)]
    asked = [
        request(str(i), prompt_ids=prompt, max_new_tokens=30, seed=i, returns_routes=i != 1)
        for i, prompt in enumerate(prompts)
    ]
    calls = run(core, *asked)
    calls.assert_logprobs_of(model, *asked, within=ROUNDING)
    for req in asked:
        response, routes = calls.tokens(req.request_id), routes_of(calls.chunks[req.request_id])
        if req.params.returns_routes:
            check_routes(routes, len(response))
            assert [list(route) for route in routes] == chosen(model, req, response)
        else:
            assert not routes


@pytest.mark.parametrize("way", WAYS)
def test_ids_of_many_experts_take_two_bytes(way: str, tmp_path: Path) -> None:
    model = experts_model(num_experts=300, moe_intermediate_size=8)
    req = request("a", returns_routes=True, max_new_tokens=40)
    calls = run(core_by(way, saved(model, tmp_path)), req)
    found = [memoryview(route).cast("H").tolist() for route in routes_of(calls.chunks["a#0"])]
    assert found == chosen(model, req, calls.tokens("a#0")) and max(map(max, found)) > 255


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_rollout_keeps_the_routes_of_the_weights_that_sampled(way: str, tmp_path: Path) -> None:
    old, new = experts_model(), experts_model(seed=1)
    core = core_by(way, saved(old, tmp_path / "old"), kv_on_update="recompute")
    first = request("a", returns_routes=True, max_new_tokens=20)
    calls = Calls(core, [first])
    calls.step(8)
    calls.abort("a#0")
    head = calls.tokens("a#0")
    core.load(1, FolderWeights(1, saved(new, tmp_path / "new")))
    old, new = exact(old), exact(new)
    later = request("a", returns_routes=True, max_new_tokens=20, response_ids=head, call=1)
    calls.add(later)
    calls.finish()
    rest = calls.tokens("a#1")
    assert len(head) == 8 and len(rest) == 12
    assert [list(r) for r in routes_of(calls.chunks["a#0"])] == chosen(old, first, head)
    assert [list(r) for r in routes_of(calls.chunks["a#1"])] == chosen(new, later, rest)
    calls.assert_logprobs_of(new, later, within=ROUNDING)


@pytest.mark.usefixtures("num_threads")
def test_compiled_experts_give_the_same_bits_alone_and_by_threads(tmp_path: Path) -> None:
    folder = saved(experts_model(hidden_size=20, moe_intermediate_size=37), tmp_path)
    asked = [request(f"s{i}", prompt_ids=(i + 1,), seed=i, max_new_tokens=20, returns_routes=True) for i in range(17)]
    seen = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        calls = run(core_of(folder, cpu_kernels="compiled", max_running=17), *asked)
        seen.append([(calls.logprobs(r.request_id), routes_of(calls.chunks[r.request_id])) for r in asked])
    assert seen[0] == seen[1] == seen[2]
    for req, together in list(zip(asked, seen[0], strict=True))[::8]:
        alone = run(core_of(folder, cpu_kernels="compiled"), req)
        assert (alone.logprobs(req.request_id), routes_of(alone.chunks[req.request_id])) == together


@pytest.mark.parametrize("way", ["torch", "recorded"])
def test_bfloat16_experts_stay_near_float32(way: str, tmp_path: Path) -> None:
    """A token whose route differs in bfloat16 is off by more than rounding: the largest difference is bounded loosely."""
    model = experts_model(num_hidden_layers=2)
    calls = run(core_by(way, saved(model, tmp_path), dtype="bfloat16"), request("a", max_new_tokens=120))
    expected = logprobs(model, (5, 6, 7), calls.tokens("a#0"))
    off = [abs(a - b) for a, b in zip(calls.logprobs("a#0"), expected, strict=True)]
    assert sum(off) / len(off) < 0.05 and max(off) < 1


def test_compiled_experts_compute_in_float32_over_bfloat16_weights(tmp_path: Path) -> None:
    model = experts_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    calls = run(core_of(saved(model, tmp_path), cpu_kernels="compiled", dtype="bfloat16"), request("a"))
    calls.assert_logprobs_of(exact(model), request("a"), within=ROUNDING)


@pytest.mark.parametrize("way", ["compiled", "torch"])
@pytest.mark.parametrize(("name", "dtype"), [("qwen3_moe", "float32"), ("glm4", "bfloat16"), ("olmo2", "float32")])
def test_weights_are_read_back_as_the_checkpoint_has_them(name: str, dtype: str, way: str, tmp_path: Path) -> None:
    kind, config = FAMILIES[name]
    folder = saved(tiny_model(kind, **config).to(getattr(torch, dtype)), tmp_path)
    core = core_of(folder, cpu_kernels=way, dtype=dtype)
    assert digests_in(core) == digests_of(FolderWeights(0, folder))


def test_a_model_without_experts_refuses_to_give_routes(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="wants the experts of each token, but the model has none"):
        core_of(saved(tiny_model(), tmp_path)).add(request("a", returns_routes=True))


@pytest.mark.real_time
async def test_a_server_sends_the_routes_of_its_engine(tmp_path: Path) -> None:
    model = experts_model(max_position_embeddings=CONTEXT)
    folder = saved(model, tmp_path)
    with serving(folder) as url:
        async with opened(url, folder) as engine:
            req = request("a", returns_routes=True, max_new_tokens=9)
            chunks = await collect(engine, req)
            assert [list(r) for r in routes_of(chunks)] == chosen(model, req, tokens(chunks))
            assert routes_of(await collect(engine, request("b"))) == ()
