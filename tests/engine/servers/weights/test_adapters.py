"""Servers that are given adapters alone: what they are asked, which one computes a call, and who is refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rollover.engine.servers.vllm.open import adapter_arguments
from rollover.errors import ConfigError, EngineError
from rollover.types import AdapterShape
from rollover.weights.adapters import AdapterSource, LowRank
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, tokens, update
from tests.engine.servers.kit import bodies
from tests.engine.servers.scripted_server import VOCAB, Answer, ScriptedServer, token_at
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import label

SHAPE = AdapterShape(rank=2, targets=("lm_head",))


def given(folder: Path, version: int, *, hidden: int = 4, base_version: int = 0) -> AdapterSource:
    """Adapters for the models of ``model_folder``, on disk."""
    low_rank = LowRank(a_RI=torch.ones(2, hidden), b_OR=torch.zeros(VOCAB, 2), scale=2.0)
    source = AdapterSource(version, {"lm_head.weight": low_rank}, base_version=base_version, folder=folder)
    source.write(folder)
    return source


def lora_server(kind: ModuleType) -> ScriptedServer:
    server: ScriptedServer = kind.Server()
    server.adapters = {}
    return server


def adapted(kind: ModuleType, folder: Path) -> Any:
    """An engine that gives its server adapters alone, and the server; opened with ``async with``."""
    return kind.serving(folder, lora_server(kind), adapters=SHAPE)


def posts(server: ScriptedServer) -> list[str]:
    return [path for method, path, _, _ in server.log if method == "POST"]


async def test_versions_are_adapters_beside_a_base_sent_once(kind: ModuleType, folder: Path, tmp_path: Path) -> None:
    async with adapted(kind, folder) as (engine, server):
        assert not engine.capabilities.in_flight_update
        names = []
        for version in (1, 2):
            beside = tmp_path / f"adapter{version}"
            await update(engine, given(beside, version))
            assert server.version == label(version)
            assert list(server.adapters.values()) == [str(beside)]
            names += server.adapters
            chunks = await collect(engine, request(f"after-{version}"))
            assert {chunk.policy_version for chunk in chunks} == {version}
            last = bodies(server, server.generate_path)[-1]
            seed = last.get("seed") or last["sampling_params"]["sampling_seed"]
            assert tokens(chunks) == tuple(token_at(seed, i, f"{folder}+{beside}") for i in range(12))
        assert len({*names}) == 2 and all(name.startswith("rollover:ours:") for name in names)
        assert server.load_path not in posts(server)


async def test_a_restarted_server_gets_its_base_first(kind: ModuleType, folder: Path, tmp_path: Path) -> None:
    async with adapted(kind, folder) as (engine, server):
        await update(engine, source := given(tmp_path / "v3", 3))
        server.restart()
        with pytest.raises(EngineError, match="says it serves weights 'default'"):
            await engine.probe()
        server.log.clear()
        await update(engine, source)
        await engine.probe(decode=True)
        loads = [path for path in posts(server) if path == server.load_path or path.endswith("/load_lora_adapter")]
        assert loads == [server.load_path, loads[-1]] and loads[-1] != server.load_path
        assert server.weights == str(folder)
        assert server.version == label(3)


async def test_a_killed_runs_adapters_go_and_foreign_ones_stay(kind: ModuleType, folder: Path, tmp_path: Path) -> None:
    server = lora_server(kind)
    server.adapters = {f"{label(7)}/0123abcd": "/gone", "somebody's": "/theirs"}
    async with kind.opened(server, folder, adapters=SHAPE) as engine:
        await update(engine, given(tmp_path / "v7", 7))
        assert sorted(server.adapters.values()) == sorted(["/theirs", str(tmp_path / "v7")])


async def test_a_new_adapter_ends_calls_so_none_has_two(kind: ModuleType, folder: Path, tmp_path: Path) -> None:
    async with adapted(kind, folder) as (engine, _):
        await update(engine, given(tmp_path / "v1", 1))
        stream = engine.generate(request("long", max_new_tokens=200))
        first = await anext(stream)
        await update(engine, given(tmp_path / "v2", 2))
        rest = [chunk async for chunk in stream]
        assert {chunk.policy_version for chunk in [first, *rest]} == {1}
        assert rest[-1].finish_reason is not None and rest[-1].finish_reason.value == "abort"


async def test_a_refused_adapter_leaves_the_one_before_in_force(kind: ModuleType, folder: Path, tmp_path: Path) -> None:
    async with adapted(kind, folder) as (engine, server):
        await update(engine, given(tmp_path / "v1", 1))
        with pytest.raises(EngineError, match=r"an adapter of .*lm_head\.weight"):
            await update(engine, given(tmp_path / "misfit", 2, hidden=8))
        said = "LoRA rank 16 is greater than max_lora_rank 8"
        if kind is vllm_kit:
            server.answer_once("/v1/load_lora_adapter", Answer(500, {"error": {"message": said}}))
        else:
            body = {"success": False, "error_message": said, "loaded_adapters": None}
            server.answer_once("/load_lora_adapter", Answer(200, body))
        with pytest.raises(EngineError, match=f"version 2: .*{said}.*--enable-lora --max-lora-rank"):
            await update(engine, given(tmp_path / "v2", 2))
        assert server.version == label(1)
        chunks = await collect(engine, request("after"))
        assert {chunk.policy_version for chunk in chunks} == {1}


async def test_a_server_that_takes_no_such_adapters_is_refused_with_the_flags(kind: ModuleType, folder: Path) -> None:
    async def refused(server: ScriptedServer, shape: AdapterShape) -> str:
        with pytest.raises(EngineError) as caught:
            async with kind.opened(server, folder, adapters=shape):
                pass
        return str(caught.value)

    said = await refused(kind.Server(), SHAPE)
    assert "accepts no adapters" in said and "--enable-lora" in said and "trainer.lora.publish = 'merged'" in said
    wide = AdapterShape(rank=12, targets=("lm_head",))
    said = await refused(lora_server(kind), wide)
    assert "accepts adapters up to rank 8" in said and "of rank 12" in said
    assert f"--max-lora-rank {16 if kind is vllm_kit else 12}" in said


async def test_an_sglang_server_that_adapts_other_matrices_is_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"beside lm_head, but .* beside q_proj; .*--lora-target-modules q_proj"):
        async with sglang_kit.opened(
            lora_server(sglang_kit), folder, adapters=AdapterShape(rank=2, targets=("q_proj",))
        ):
            pass


async def test_a_vllm_server_with_fixed_adapters_is_named_with_the_variable(folder: Path, tmp_path: Path) -> None:
    """It was started with --enable-lora, but without the endpoints."""
    async with adapted(vllm_kit, folder) as (engine, server):
        server.answer_once("/v1/load_lora_adapter", Answer(404, {"detail": "Not Found"}))
        with pytest.raises(EngineError, match=r"404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await update(engine, given(tmp_path / "v1", 1))


async def test_a_server_for_full_weights_takes_no_adapters(kind: ModuleType, folder: Path, tmp_path: Path) -> None:
    async with kind.opened(lora_server(kind), folder) as engine:
        with pytest.raises(EngineError, match="loads full weights only, but version 1 is given as adapter"):
            await update(engine, given(tmp_path / "v1", 1))
    async with adapted(kind, folder) as (engine, _):
        with pytest.raises(EngineError, match="has weights version 0 to apply adapters to"):
            await update(engine, given(tmp_path / "v2", 2, base_version=1))
        await update(engine, FolderWeights(2, folder))
        assert (await collect(engine, request("full")))[-1].policy_version == 2


def test_vllm_makes_room_in_steps_and_no_further() -> None:
    assert adapter_arguments(None) == []
    for rank, served in ((1, 1), (2, 8), (8, 8), (9, 16), (300, 320)):
        arguments = adapter_arguments(AdapterShape(rank=rank, targets=("q_proj",)))
        assert arguments == ["--enable-lora", "--max-lora-rank", str(served), "--max-loras", "1"]
    with pytest.raises(ConfigError, match=r"trainer.lora.rank 513: vLLM serves adapters up to rank 512"):
        adapter_arguments(AdapterShape(rank=513, targets=("q_proj",)))
