"""Weights through a process group: what servers are told and when, and what happens when one of the two sides fails.

The group is a stand-in here, except where gloo itself is tried; a real server is sent weights in ``tests/real``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.open import launch_arguments
from rollover.engine.servers.weights.transfer import Receiver, send_weights
from rollover.errors import EngineError
from rollover.weights.buckets import BUCKET_BYTES, buckets
from rollover.weights.groups import GroupPlan, TorchGroup, address_towards, is_loopback
from rollover.weights.sending import Sender, SenderLost
from rollover.weights.sources import FolderWeights
from tests.engine.contract import collect, request, update
from tests.engine.servers.kit import bodies
from tests.engine.servers.meetings import Meetings, Seat
from tests.engine.servers.scripted_server import Answer, ScriptedServer, ScriptedVLLM
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import label

pytestmark = pytest.mark.real_time


@pytest.fixture
def first(folder: Path) -> Path:
    return filled(folder, 1.0)


@pytest.fixture
def second(new: Path) -> Path:
    return filled(new, 2.0)


def filled(folder: Path, value: float) -> Path:
    weights = {name: torch.full_like(t, value) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Meetings:
    """Where the workers of servers are sent weights."""
    meetings = Meetings()
    monkeypatch.setattr("rollover.weights.sending.open_group", meetings.open_group)
    return meetings


def receiving(server: Any, folder: Path, meetings: Meetings, **changes: Any) -> AbstractAsyncContextManager[Any]:
    """An engine and its server, whose workers come to ``meetings``."""
    kit: Any = vllm_kit if isinstance(server, ScriptedVLLM) else sglang_kit
    server.meetings = meetings
    return kit.serving(folder, server, weight_transfer="nccl", **changes)


def assert_received(seat: Seat, weights: Mapping[str, torch.Tensor]) -> None:
    assert seat.received.keys() == weights.keys()
    assert all(torch.equal(seat.received[name], tensor) for name, tensor in weights.items())


def posted(server: ScriptedServer) -> list[str]:
    return [path for method, path, _, _ in server.log if method == "POST"]


async def test_vllm_gets_all_weights_and_then_the_version(first: Path, second: Path, meetings: Meetings) -> None:
    async with receiving(ScriptedVLLM(), first, meetings) as (engine, server):
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
        assert bodies(server, "/finish_weight_update") == [{"weight_version": label(1)}]
        [met] = [body["init_info"] for body in bodies(server, "/init_weight_transfer_engine")]
        assert met["packed"] is meetings.all[-1].plan.is_flat is True
        assert met["packed_buffer_size_bytes"] >= BUCKET_BYTES
        assert {c.policy_version for c in await collect(engine, request("a"))} == {1}
    assert [m.closed for m in meetings.all] == [True, True]
    for meeting, folder in zip(meetings.all, (first, second), strict=True):
        assert meeting.offsets == [1]
        assert_received(meeting.seats[0], load_file(folder / "model.safetensors"))


async def test_vllm_refusing_midway_gets_the_former_weights(first: Path, second: Path, meetings: Meetings) -> None:
    async with receiving(ScriptedVLLM(), first, meetings) as (engine, server):
        before = server.weights
        server.answer_once("/finish_weight_update", Answer(500, {"error": {"message": "CUDA out of memory"}}))
        with pytest.raises(EngineError, match=r"did not load weights version 1: .*out of memory"):
            await update(engine, FolderWeights(1, second))
        assert server.weights == before
        assert {c.policy_version for c in await collect(engine, request("a"))} == {0}
    assert [m.closed for m in meetings.all] == [True] * 3


def test_a_launched_vllm_server_is_told_to_expect_weights(folder: Path) -> None:
    arguments = launch_arguments(VLLMConfig(launch=True, weight_transfer="nccl"), folder, 8000)
    assert arguments[arguments.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert "--weight-transfer-config" not in launch_arguments(VLLMConfig(launch=True), folder, 8000)


async def test_sglang_gets_all_weights_in_a_session_and_the_version_last(
    first: Path, second: Path, meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollover.engine.servers.weights.transfer.buckets", partial(buckets, limit_bytes=1))
    async with receiving(ScriptedSGLang(), first, meetings) as (engine, server):
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
        pieces = bodies(server, "/update_weights_from_distributed")
        assert [(p.get("weight_version"), p["flush_cache"]) for p in pieces] == [(None, False), (label(1), True)]
        assert not any(p["abort_all_requests"] for p in pieces)
        assert {c.policy_version for c in await running} == {0, 1}
    assert_received(meetings.all[-1].seats[0], load_file(second / "model.safetensors"))
    assert [m.closed for m in meetings.all] == [True, True]


async def test_sglang_refusing_midway_has_no_session_or_weights(first: Path, second: Path, meetings: Meetings) -> None:
    async with receiving(ScriptedSGLang(), first, meetings) as (engine, server):
        server.load_error = "partially updated"
        with pytest.raises(EngineError, match=r"did not load weights version 1: .*partially updated"):
            await update(engine, FolderWeights(1, second))
        assert not server.session
        assert posted(server).count("/destroy_weights_update_group") == len(meetings.all) - 1 == 2
        with pytest.raises(EngineError, match="its weights are unknown"):
            await collect(engine, request("a"))
        server.load_error = None
        await update(engine, FolderWeights(1, second))
        assert {c.policy_version for c in await collect(engine, request("b"))} == {1}


async def test_a_transfer_that_is_cancelled_leaves_no_session(
    first: Path, second: Path, meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(query: Any, body: Any) -> Answer:
        asked.set()
        await never.wait()
        raise AssertionError

    async with receiving(ScriptedSGLang(), first, meetings) as (engine, server):
        monkeypatch.setattr(server, "_post_update_weights_from_distributed", hang)
        updating = asyncio.create_task(update(engine, FolderWeights(1, second)))
        await asked.wait()
        assert server.session
        updating.cancel()
        await asyncio.wait([updating])
        assert updating.cancelled() and not server.session


async def test_a_data_parallel_sglang_server_is_refused_with_the_mend(folder: Path, meetings: Meetings) -> None:
    server = ScriptedSGLang()
    server.dp_size = 2
    with pytest.raises(EngineError, match=r"data or pipeline parallel .*set engine\.weight_transfer to 'folder'"):
        async with receiving(server, folder, meetings):
            pass


@pytest.mark.parametrize("server", [ScriptedVLLM(), ScriptedSGLang()], ids=["vllm", "sglang"])
async def test_weights_in_a_folder_are_sent_from_the_runs_device(server: Any, folder: Path, meetings: Meetings) -> None:
    async with receiving(server, folder, meetings, device="cuda:1"):
        assert [meeting.plan.sends_from for meeting in meetings.all] == ["cuda:1"]


def test_a_group_listens_on_one_address() -> None:
    group = TorchGroup("gloo", "127.0.0.1", "run/7", num_workers=1, timeout_s=30.0)
    port = group.address["master_port"]
    socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=1.0)
    group.close()


def test_our_address_is_the_one_from_which_the_server_is_reached() -> None:
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    assert address_towards("http://localhost:8000/engine") in ("127.0.0.1", "::1")
    assert is_loopback("http://0.0.0.0:8000"), "what servers log as their address"


LOCAL, FAR = "http://localhost:30000", "http://10.0.0.6:30000"


@pytest.mark.parametrize(
    "urls", [(LOCAL, FAR), (FAR, LOCAL), ("http://[::1]:1", "http://127.0.1.1:2", FAR), ("http://own-name:1", FAR)]
)
async def test_a_group_meets_where_all_servers_reach_it(urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
