"""Servers that are given adapters alone: what they are asked, which one computes a call, and who is refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rollover.engine.servers.vllm.open import adapter_arguments
from rollover.engine.servers.weights.ownership import Ownership
from rollover.errors import ConfigError, EngineError
from rollover.types import AdapterShape
from rollover.weights.adapters import AdapterSource, LowRank
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, tokens, update
from tests.engine.servers.kit import RUN
from tests.engine.servers.scripted_server import VOCAB, Answer, ScriptedServer, token_at
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import label, model_folder

SHAPE = AdapterShape(rank=2, targets=("lm_head",))


def given(folder: Path, version: int, *, hidden: int = 4, base_version: int = 0) -> AdapterSource:
    """Adapters for the models of ``model_folder``, on disk."""
    low_rank = LowRank(a_RI=torch.ones(2, hidden), b_OR=torch.zeros(VOCAB, 2), scale=2.0)
    source = AdapterSource(version, {"lm_head.weight": low_rank}, base_version=base_version, folder=folder)
    source.write(folder)
    return source


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "base")


def lora_server(kind: ModuleType) -> ScriptedServer:
    server: ScriptedServer = kind.Server()
    server.adapters = {}
    return server


def posts(server: ScriptedServer) -> list[str]:
    return [path for method, path, _, _ in server.log if method == "POST"]


async def test_each_version_is_an_adapter_beside_a_base_that_is_sent_once(
    kind: ModuleType, base: Path, tmp_path: Path
) -> None:
    server = lora_server(kind)
    async with kind.opened(server, base, adapters=SHAPE) as engine:
        assert not engine.capabilities.in_flight_update
        before = len(server.log)
        names = []
        for version in (1, 2):
            folder = tmp_path / f"v{version}"
            await update(engine, given(folder, version))
            assert server.version == label(version)
            assert server.adapters is not None and list(server.adapters.values()) == [str(folder)]
            names += server.adapters
            req = request(f"after-{version}", temperature=1.0)
            chunks = await collect(engine, req)
            assert {chunk.policy_version for chunk in chunks} == {version}
            seeds = [body for _, path, _, body in server.log if path == server.generate_path and body.get("stream")]
            seed = seeds[-1].get("seed") or seeds[-1]["sampling_params"]["sampling_seed"]
            weights = f"{base}+{folder}"
            assert tokens(chunks) == tuple(token_at(seed, i, weights) for i in range(12))
        assert len({*names}) == 2 and all(name.startswith("rollover:ours:") for name in names)
        assert "/collective_rpc" not in posts(server)[before:]
        assert "/update_weights_from_disk" not in [path for _, path, _, _ in server.log[before:]]


async def test_a_server_that_was_restarted_is_given_its_base_before_the_adapter(
    kind: ModuleType, base: Path, tmp_path: Path
) -> None:
    server = lora_server(kind)
    async with kind.opened(server, base, adapters=SHAPE) as engine:
        await update(engine, source := given(tmp_path / "v3", 3))
        server.restart()
        with pytest.raises(EngineError, match="says it serves weights 'default'"):
            await engine.probe()
        server.log.clear()
        await update(engine, source)
        await engine.probe(decode=True)
        loads = [p for p in posts(server) if p.startswith(("/collective", "/update_weights_from", "/v1/load", "/load"))]
        assert [path.rpartition("/")[2] for path in loads] == [
            "collective_rpc" if kind is vllm_kit else "update_weights_from_disk",
            "load_lora_adapter",
        ]
        assert server.weights == str(base)
        assert server.version == label(3)


async def test_adapters_of_a_killed_run_are_unloaded_and_foreign_ones_stay(
    kind: ModuleType, base: Path, tmp_path: Path
) -> None:
    server = lora_server(kind)
    server.adapters = {f"{label(7)}/0123abcd": "/gone", "somebody's": "/theirs"}
    async with kind.opened(server, base, adapters=SHAPE, ownership=Ownership(RUN)) as engine:
        await update(engine, given(tmp_path / "v7", 7))
        assert server.adapters is not None
        assert sorted(server.adapters.values()) == sorted(["/theirs", str(tmp_path / "v7")])


async def test_a_new_adapter_ends_running_calls_so_none_is_sampled_by_two(
    kind: ModuleType, base: Path, tmp_path: Path
) -> None:
    server = lora_server(kind)
    async with kind.opened(server, base, adapters=SHAPE) as engine:
        await update(engine, given(tmp_path / "v1", 1))
        stream = engine.generate(request("long", max_new_tokens=200))
        first = await anext(stream)
        await update(engine, given(tmp_path / "v2", 2))
        rest = [chunk async for chunk in stream]
        assert {chunk.policy_version for chunk in [first, *rest]} == {1}
        assert rest[-1].finish_reason is not None and rest[-1].finish_reason.value == "abort"


async def test_an_adapter_that_is_refused_leaves_the_one_before_in_force(
    kind: ModuleType, base: Path, tmp_path: Path
) -> None:
    server = lora_server(kind)
    async with kind.opened(server, base, adapters=SHAPE) as engine:
        await update(engine, given(tmp_path / "v1", 1))
        name = "/v1/load_lora_adapter" if kind is vllm_kit else "/load_lora_adapter"
        said = "LoRA rank 16 is greater than max_lora_rank 8"
        server.answer_once(name, refusal(kind, said))
        with pytest.raises(EngineError, match=f"version 2: .*{said}.*--enable-lora --max-lora-rank"):
            await update(engine, given(tmp_path / "v2", 2))
        assert server.version == label(1)
        chunks = await collect(engine, request("after"))
        assert {chunk.policy_version for chunk in chunks} == {1}


def refusal(kind: ModuleType, said: str) -> Any:
    """Return the answer of a server that cannot load an adapter."""
    if kind is vllm_kit:
        return Answer(500, {"error": {"message": said}})
    return Answer(200, {"success": False, "error_message": said, "loaded_adapters": None})


async def test_a_server_that_takes_no_such_adapters_is_refused_with_the_flags(kind: ModuleType, base: Path) -> None:
    async def refused(server: ScriptedServer, shape: AdapterShape) -> str:
        with pytest.raises(EngineError) as caught:
            async with kind.opened(server, base, adapters=shape):
                pass
        return str(caught.value)

    said = await refused(kind.Server(), SHAPE)
    assert "accepts no adapters" in said and "--enable-lora" in said and "trainer.lora.publish = 'merged'" in said
    wide = AdapterShape(rank=12, targets=("lm_head",))
    said = await refused(lora_server(kind), wide)
    assert "accepts adapters up to rank 8" in said and "of rank 12" in said
    assert f"--max-lora-rank {16 if kind is vllm_kit else 12}" in said


async def test_an_sglang_server_that_adapts_other_matrices_is_refused(base: Path) -> None:
    with pytest.raises(EngineError, match=r"beside lm_head, but .* beside q_proj; .*--lora-target-modules q_proj"):
        async with sglang_kit.opened(lora_server(sglang_kit), base, adapters=AdapterShape(rank=2, targets=("q_proj",))):
            pass


async def test_a_vllm_server_with_fixed_adapters_is_named_with_the_variable(base: Path, tmp_path: Path) -> None:
    """It was started with --enable-lora, but without the endpoints."""

    server = lora_server(vllm_kit)
    async with vllm_kit.opened(server, base, adapters=SHAPE) as engine:
        server.answer_once("/v1/load_lora_adapter", Answer(404, {"detail": "Not Found"}))
        with pytest.raises(EngineError, match=r"404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await update(engine, given(tmp_path / "v1", 1))


async def test_a_server_that_was_opened_for_full_weights_takes_no_adapters(
    kind: ModuleType, base: Path, tmp_path: Path
) -> None:
    async with kind.opened(lora_server(kind), base) as engine:
        with pytest.raises(EngineError, match="loads full weights only, but version 1 is given as adapter"):
            await update(engine, given(tmp_path / "v1", 1))
    async with kind.opened(lora_server(kind), base, adapters=SHAPE) as engine:
        with pytest.raises(EngineError, match="has weights version 0 to apply adapters to"):
            await update(engine, given(tmp_path / "v2", 2, base_version=1))
        await update(engine, FolderWeights(2, base))
        assert (await collect(engine, request("full")))[-1].policy_version == 2


def test_vllm_makes_room_in_steps_and_no_further() -> None:
    assert adapter_arguments(None) == []
    for rank, served in ((1, 1), (2, 8), (8, 8), (9, 16), (300, 320)):
        arguments = adapter_arguments(AdapterShape(rank=rank, targets=("q_proj",)))
        assert arguments == ["--enable-lora", "--max-lora-rank", str(served), "--max-loras", "1"]
    with pytest.raises(ConfigError, match=r"trainer.lora.rank 513: vLLM serves adapters up to rank 512"):
        adapter_arguments(AdapterShape(rank=513, targets=("q_proj",)))
