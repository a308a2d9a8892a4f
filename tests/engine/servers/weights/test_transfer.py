"""Weights through a process group: what servers are told and when, and what happens when one of the two sides fails.

The group is a stand-in here, except where gloo itself is tried; a real server is sent weights in ``tests/real``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.open import launch_arguments
from rollover.engine.servers.weights.transfer import Receiver, send_weights
from rollover.errors import EngineError
from rollover.weights.buckets import BUCKET_BYTES, buckets
from rollover.weights.groups import GroupPlan, TorchGroup, address_towards, is_loopback
from rollover.weights.sending import Sender, SenderLost
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, update
from tests.engine.servers.meetings import Meetings, Seat
from tests.engine.servers.scripted_server import Answer, ScriptedServer, ScriptedVLLM
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import label
from tests.speed import within

pytestmark = pytest.mark.real_time


def folder_of(path: Path, value: float) -> Path:
    folder = vllm_kit.model_folder(path)
    weights = {name: torch.full_like(t, value) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def engine_before(
    server: Any, folder: Path, meetings: Meetings, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Any:
    """An engine, not open yet, whose server's workers come to ``meetings``."""
    kit: Any = vllm_kit if isinstance(server, ScriptedVLLM) else sglang_kit
    server.meetings = meetings
    monkeypatch.setattr("rollover.weights.sending.open_group", meetings.open_group)
    return kit.make_engine(server, folder, weight_transfer="nccl", **changes)


def assert_received(seat: Seat, weights: Mapping[str, torch.Tensor]) -> None:
    assert seat.received.keys() == weights.keys()
    assert all(torch.equal(seat.received[name], tensor) for name, tensor in weights.items())


def posted(server: ScriptedServer, *ignored: str) -> list[str]:
    return [path for method, path, _, _ in server.log if method == "POST" and path not in ignored]


# -- vLLM --------------------------------------------------------------------------------------------------------


async def test_vllm_gets_all_weights_and_then_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folder_of(tmp_path / "v0", 1.0), folder_of(tmp_path / "v1", 2.0)
    server, meetings = ScriptedVLLM(), Meetings()
    engine = engine_before(server, first, meetings, monkeypatch)
    await engine.open()
    server.log.clear()
    await update(engine, FolderWeights(1, second))
    assert posted(server) == [
        "/pause",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert ("POST", "/finish_weight_update", {}, {"weight_version": label(1)}) in server.log
    (met,) = (body["init_info"] for _, path, _, body in server.log if path == "/init_weight_transfer_engine")
    assert met["packed"] is meetings.all[-1].plan.is_flat is True
    assert met["packed_buffer_size_bytes"] >= BUCKET_BYTES
    chunks = await collect(engine, request("a"))
    assert {c.policy_version for c in chunks} == {1}
    await engine.close()
    assert [m.closed for m in meetings.all] == [True, True]
    for meeting, folder in zip(meetings.all, (first, second), strict=True):
        assert meeting.offsets == [1]
        assert_received(meeting.seats[0], load_file(folder / "model.safetensors"))


async def test_a_vllm_server_that_refuses_midway_gets_the_former_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder_of(tmp_path / "v0", 1.0), folder_of(tmp_path / "v1", 2.0)
    server, meetings = ScriptedVLLM(), Meetings()
    engine = engine_before(server, first, meetings, monkeypatch)
    await engine.open()
    before = server.weights
    server.answer_once("/finish_weight_update", Answer(500, {"error": {"message": "CUDA out of memory"}}))
    with pytest.raises(EngineError, match=r"did not load weights version 1: .*out of memory"):
        await update(engine, FolderWeights(1, second))
    assert server.weights == before
    assert {c.policy_version for c in await collect(engine, request("a"))} == {0}
    await engine.close()
    assert [m.closed for m in meetings.all] == [True] * 3


def test_a_launched_vllm_server_is_told_to_expect_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "v0", 1.0)
    arguments = launch_arguments(VLLMConfig(launch=True, weight_transfer="nccl"), folder, 8000)
    assert arguments[arguments.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert "--weight-transfer-config" not in launch_arguments(VLLMConfig(launch=True), folder, 8000)


# -- SGLang ------------------------------------------------------------------------------------------------------


async def test_sglang_gets_all_weights_in_a_session_and_the_version_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder_of(tmp_path / "v0", 1.0), folder_of(tmp_path / "v1", 2.0)
    server, meetings = ScriptedSGLang(), Meetings()
    monkeypatch.setattr("rollover.engine.servers.weights.transfer.buckets", partial(buckets, limit_bytes=1))
    engine = engine_before(server, first, meetings, monkeypatch)
    await engine.open()
    running = asyncio.create_task(collect(engine, request("r", max_new_tokens=60)))
    while engine.stats().decoded_tokens == 0:
        await asyncio.sleep(0.001)
    server.log.clear()
    await update(engine, FolderWeights(1, second))
    assert posted(server) == [
        "/pause_generation",
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/destroy_weights_update_group",
        "/continue_generation",
    ]
    pieces = [body for _, path, _, body in server.log if path == "/update_weights_from_distributed"]
    assert [(p.get("weight_version"), p["flush_cache"]) for p in pieces] == [(None, False), (label(1), True)]
    assert not any(p["abort_all_requests"] for p in pieces)
    chunks = await running
    assert {c.policy_version for c in chunks} == {0, 1}
    await engine.close()
    assert_received(meetings.all[-1].seats[0], load_file(second / "model.safetensors"))
    assert [m.closed for m in meetings.all] == [True, True]


async def test_an_sglang_server_that_refuses_midway_has_no_session_or_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder_of(tmp_path / "v0", 1.0), folder_of(tmp_path / "v1", 2.0)
    server, meetings = ScriptedSGLang(), Meetings()
    engine = engine_before(server, first, meetings, monkeypatch)
    await engine.open()
    server.load_error = "partially updated"
    with pytest.raises(EngineError, match=r"did not load weights version 1: .*partially updated"):
        await update(engine, FolderWeights(1, second))
    assert not server.session
    assert posted(server).count("/destroy_weights_update_group") == len(meetings.all) == 3
    with pytest.raises(EngineError, match="its weights are unknown"):
        await collect(engine, request("a"))
    server.load_error = None
    await update(engine, FolderWeights(1, second))
    assert {c.policy_version for c in await collect(engine, request("b"))} == {1}
    await engine.close()


async def test_a_transfer_that_is_cancelled_leaves_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folder_of(tmp_path / "v0", 1.0), folder_of(tmp_path / "v1", 2.0)
    server, meetings = ScriptedSGLang(), Meetings()
    engine = engine_before(server, first, meetings, monkeypatch)
    await engine.open()
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(query: Any, body: Any) -> Answer:
        asked.set()
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(server, "_post_update_weights_from_distributed", hang)
    updating = asyncio.create_task(update(engine, FolderWeights(1, second)))
    await asked.wait()
    assert server.session
    updating.cancel()
    await asyncio.wait([updating])
    assert updating.cancelled() and not server.session
    await engine.close()


async def test_a_data_parallel_sglang_server_is_refused_with_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ScriptedSGLang()
    server.dp_size = 2
    engine = engine_before(server, folder_of(tmp_path / "v0", 1.0), Meetings(), monkeypatch)
    with pytest.raises(EngineError, match=r"data or pipeline parallel .*set engine\.weight_transfer to 'folder'"):
        await engine.open()
    await engine.close()


def test_an_address_that_nobody_uses_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="transfer_host has no effect"):
        SGLangConfig(launch=True, transfer_host="10.0.0.1")


# -- both sides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [ScriptedVLLM(), ScriptedSGLang()], ids=["vllm", "sglang"])
async def test_weights_in_a_folder_are_sent_from_the_device_that_the_run_names(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings = Meetings()
    engine = engine_before(server, folder_of(tmp_path / "v0", 1.0), meetings, monkeypatch, device="cuda:1")
    await engine.open()
    await engine.close()
    assert [meeting.plan.sends_from for meeting in meetings.all] == ["cuda:1"]


def test_a_gloo_group_carries_tensors_and_listens_on_one_address() -> None:
    group = TorchGroup("gloo", "127.0.0.1", "run/7", num_workers=1, timeout_s=30.0)
    told = group.address
    sent = [torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    received = [torch.empty_like(t) for t in sent]

    def worker() -> None:
        limit = timedelta(seconds=30)
        store = TCPStore(told["master_address"], told["master_port"], is_master=False, timeout=limit)
        for prefix in (told["group_name"], f"{told['group_name']}/", "cpu/"):
            store = PrefixStore(prefix, store)
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], limit
        peers = ProcessGroupGloo(store, told["rank_offset"], told["world_size"], options)
        for tensor in received:
            peers.broadcast([tensor], BroadcastOptions()).wait()

    thread = threading.Thread(target=worker, daemon=True)
    thread.start()
    group.join()
    for tensor in sent:
        group.broadcast(tensor)
    thread.join(within(30.0))
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
    with socket.socket() as elsewhere, pytest.raises(OSError):
        elsewhere.settimeout(1.0)
        elsewhere.connect(("127.0.0.2", told["master_port"]))
    group.close()


def test_our_address_is_the_one_from_which_the_server_is_reached() -> None:
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    assert address_towards("http://localhost:8000/engine") in ("127.0.0.1", "::1")
    assert is_loopback("http://0.0.0.0:8000"), "what servers log as their address"


LOCAL, FAR = "http://localhost:30000", "http://10.0.0.6:30000"


@pytest.mark.parametrize(
    "urls", [(LOCAL, FAR), (FAR, LOCAL), ("http://[::1]:1", "http://127.0.1.1:2", FAR), ("http://own-name:1", FAR)]
)
async def test_the_group_meets_where_all_servers_reach_it(
    urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    own = {"own-name": "127.0.1.1"}  # as in /etc/hosts of Debian
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **kind: resolve(own.get(host, host), *rest, **kind))
    opened: list[GroupPlan] = []

    def open_sender(plan: GroupPlan) -> Sender:
        opened.append(plan)
        raise SenderLost("gone")

    plan = GroupPlan(meets="torch", backend="gloo", towards="", name="run/7", num_workers=2, timeout_s=30.0)
    calls: Any = None
    receivers = [
        Receiver(name=url, plan=replace(plan, towards=url), calls=calls, post=calls, ping=calls) for url in urls
    ]
    with pytest.raises(SenderLost):
        await send_weights(open_sender, [], receivers, limit_s=30.0, part_s=1.0)
    assert opened == [replace(plan, towards=FAR, num_workers=2 * len(urls))]
