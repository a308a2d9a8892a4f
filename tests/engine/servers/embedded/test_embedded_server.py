"""Servers of the embedded engine: who is let in, what becomes of calls and weights when a side fails. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rollover import cli
from rollover.engine.servers.embedded import served
from rollover.engine.servers.embedded.application import application
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.messages import GroupAddress, LoadBody
from rollover.engine.servers.embedded.open import launch_arguments, with_program
from rollover.errors import EngineError, EngineTimeout
from rollover.weights.adapters import AdapterSource, MergedWeights
from rollover.weights.folders import WeightFolders
from rollover.weights.groups import TorchGroup
from rollover.weights.sources import FolderWeights, MemoryWeights
from tests.engine.contract import collect, request, tokens, update
from tests.engine.models import greedy, logprobs, tiny_model
from tests.engine.servers.embedded.kit import CONTEXT, RUN, model, opened, serving
from tests.speed import within
from tests.weights.test_adapters import Q_PROJ, adapters, low_rank

pytestmark = pytest.mark.real_time

DEADLINE_S = within(60.0)
CALL = {
    "request_id": "a",
    "sample_key": "a",
    "prompt_key": "p",
    "prompt_ids": [5, 6, 7],
    "params": {"max_new_tokens": 12, "temperature": 0.0},
    "seed": 1,
}
ENDLESS = {**CALL, "request_id": "endless", "params": {"max_new_tokens": 20_000}}


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


def events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = http.post("/generate", json=body).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def until(done: Any) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_key_is_asked_of_every_request_and_never_repeated(folder: Path) -> None:
    with serving(folder, key="s3cret") as url, httpx.Client(base_url=url, trust_env=False) as http:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"}):
            for answer in (http.get("/info", headers=headers), http.post("/pause", json={}, headers=headers)):
                assert answer.status_code == 401
                assert "s3cret" not in answer.text
        right = {"Authorization": "Bearer s3cret", "Host": "any.example"}
        assert http.get("/info", headers=right).status_code == 200


def test_a_page_of_the_web_can_have_nothing_done(http: httpx.Client) -> None:
    for name in ("evil.example", "evil.example:80", ""):
        assert http.post("/pause", json={}, headers={"Host": name}).status_code == 421
    for name in ("localhost:1", "127.0.0.1", "[::1]:5", "10.0.0.5:8000"):
        assert http.get("/health", headers={"Host": name}).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert http.post("/pause", content=b"{}", headers={"Content-Type": kind}).status_code == 415
    of_no_length = iter([b"{}"])
    assert http.post("/pause", content=of_no_length, headers={"Content-Type": "application/json"}).status_code == 413


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {**CALL, "prompt_ids": "5 6"}, "prompt_ids"),
        ("/generate", {**CALL, "params": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1"),
        ("/generate", {}, "request_id"),
        ("/abort", {"request_ids": "a"}, "request_ids"),
        ("/load_weights", {"folder": "/nowhere"}, "label"),
        ("/load_weights", {"folder": "/nowhere", "label": "x", "keeps_kv": False}, "sees no folder /nowhere: engine.w"),
        ("/group/receive", {"names": [], "dtypes": [], "shapes": []}, "before a group was joined"),
        ("/group/begin", {}, "pause first"),
        ("/group/finish", {"label": "x", "keeps_kv": False}, "no reception of weights was begun"),
    ],
)
def test_a_wrong_field_of_a_body_is_named(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    before = http.get("/info").json()
    answer = http.post(path, json=body)
    assert 400 <= answer.status_code < 500
    assert message in answer.json()["error"]["message"]
    assert http.get("/info").json() == before


def test_a_client_that_leaves_within_its_request_leaves_no_traceback() -> None:
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/pause", "headers": headers, "query_string": b""}
    sent: list[Any] = []
    receive = AsyncMock(return_value={"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(application(MagicMock(), key=None, host="127.0.0.1")(scope, receive, send))
    assert sent[0]["status"] == 499


def test_a_call_streams_what_transformers_computes(http: httpx.Client) -> None:
    pieces = events(http, CALL)
    ids = tuple(i for piece in pieces for i in piece["token_ids"])
    reference = tiny_model(max_position_embeddings=CONTEXT)
    assert ids == greedy(reference, (5, 6, 7), 12)
    reported = [p for piece in pieces for p in piece["logprobs"]]
    assert reported == pytest.approx(logprobs(reference, (5, 6, 7), ids), abs=1e-4)
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_call_that_cannot_run_ends_with_an_error_event(http: httpx.Client) -> None:
    (event,) = events(http, {**CALL, "request_id": "long", "params": {"max_new_tokens": CONTEXT}})
    assert str(CONTEXT + 3) in event["error"]["message"]


def test_a_client_that_goes_away_ends_its_call(http: httpx.Client) -> None:
    with http.stream("POST", "/generate", json=ENDLESS) as answer:
        received = answer.iter_raw()  # which closes the connection when nobody has it any more
        next(received)
        assert http.get("/info").json()["num_calls"] == 1
    until(lambda: http.get("/info").json()["num_calls"] == 0)


def test_the_end_of_the_server_ends_its_calls_as_aborted(folder: Path) -> None:
    pieces: list[bytes] = []
    with httpx.Client(timeout=DEADLINE_S, trust_env=False) as http:
        with serving(folder) as url:
            stream = http.stream("POST", f"{url}/generate", json=ENDLESS)
            answer = stream.__enter__()
            received = answer.iter_raw()
            pieces.append(next(received))
        pieces += received
        stream.__exit__(None, None, None)
    assert json.loads(b"".join(pieces).decode().strip().splitlines()[-1][6:])["finish_reason"] == "abort"


async def test_tied_matrices_are_loaded_and_sent_too(tmp_path: Path) -> None:
    first, second = (model(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in range(2))
    assert "lm_head.weight" not in load_file(second / "model.safetensors")
    with serving(first) as url:
        for transfer in ("folder", "gloo"):
            async with opened(url, first, weight_transfer=transfer) as engine:
                await update(engine, FolderWeights(1, second))
                found = tokens(await collect(engine, request("a", temperature=0.0)))
                reference = tiny_model(seed=1, tie_word_embeddings=True, max_position_embeddings=CONTEXT)
                assert found == greedy(reference, (5, 6, 7), 12)


def test_weights_that_came_in_part_are_nobodys_until_all_are_there(folder: Path, new: Path, http: httpx.Client) -> None:
    assert http.post("/load_weights", json=loading(folder, "ours")).status_code == 200
    http.post("/pause", json={})
    assert http.post("/group/begin", json={}).status_code == 200
    assert http.get("/info").json()["label"].startswith("partial-")
    refused = http.post("/group/finish", json={"label": "new", "keeps_kv": False})
    assert refused.status_code == 400
    assert "weights are missing" in refused.json()["error"]["message"]
    http.post("/resume", json={})
    assert http.get("/info").json()["label"].startswith("partial-")
    assert {e["label"][:8] for e in events(http, {**CALL, "request_id": "in-part"})} == {"partial-"}
    assert http.post("/load_weights", json=loading(new, "whole")).status_code == 200
    assert {e["label"] for e in events(http, {**CALL, "request_id": "whole"})} == {"whole"}


async def test_a_sender_that_vanishes_leaves_a_server_that_can_be_loaded(
    url: str, folder: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for a bucket that never comes, until it is told to leave."""
    async with opened(url, folder, weight_transfer="gloo") as engine:
        monkeypatch.setattr(TorchGroup, "broadcast", Mock(side_effect=RuntimeError("gone")))
        await engine.pause()
        with pytest.raises(EngineError, match=r"did not load weights version 1: .*gone"):
            await engine.load(1, FolderWeights(1, new))
        monkeypatch.undo()
        await engine.load(2, FolderWeights(2, new))
        await engine.resume()
        assert {c.policy_version for c in await collect(engine, request("a"))} == {2}


async def test_a_group_left_while_joined_is_not_received_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer was killed while it joined; the sender has begun another group meanwhile."""
    all_have_joined = threading.Event()
    made: list[SlowGroup] = []

    class SlowGroup:
        def __init__(self, address: GroupAddress, device: torch.device) -> None:
            self.is_closed = False
            made.append(self)
            if len(made) == 1:
                all_have_joined.wait(DEADLINE_S)

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(served, "ReceivingGroup", SlowGroup)
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "backend": "gloo"}
    address = GroupAddress(**where, group_name="run/7")  # type: ignore[arg-type]
    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    server = served.ServedEngine(engine, folder, label="initial")
    first = asyncio.create_task(server.join(address))
    while not made:
        await asyncio.sleep(0.01)
    await server.join(address)
    all_have_joined.set()
    with pytest.raises(EngineError, match="given up before all had joined"):
        await first
    assert [group.is_closed for group in made] == [True, False]
    await server.leave()
    assert made[1].is_closed


async def test_weights_that_may_still_come_have_no_known_label(folder: Path, new: Path) -> None:
    late = AsyncMock(side_effect=EngineTimeout("the embedded engine did not get to 'load'"))
    engine: Any = SimpleNamespace(load=late)
    server = served.ServedEngine(engine, folder, label="old")
    with pytest.raises(EngineTimeout):
        await server.load(LoadBody(**loading(new, "new")))
    assert server._labels[server._version].startswith("partial-") and server._is_partial


def loading(folder: Path, label: str) -> dict[str, Any]:
    return {"folder": str(folder), "label": label, "keeps_kv": False}


async def test_a_server_belongs_to_one_run(url: str, folder: Path, http: httpx.Client) -> None:
    async with opened(url, folder):
        assert http.get("/info").json()["label"] == f"rollover:{RUN}:0"
        with pytest.raises(EngineError, match=f"belongs to run {RUN}"):
            async with opened(url, folder, run="another"):
                pass
    async with opened(url, folder, run="another"):
        assert http.get("/info").json()["label"] == "rollover:another:0"


async def test_another_model_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"a vocabulary of 64, and .*other has one of 80: it is another model"):
        async with opened(url, model(tmp_path / "other", vocab_size=80)):
            pass


def test_what_is_started_gets_the_settings_of_the_run(tmp_path: Path) -> None:
    config = EmbeddedServerConfig(launch=True, max_running=8, kv_cache_bytes=2**20, dtype="float32")
    arguments = launch_arguments(config, tmp_path, 8001, "10.0.0.5")
    assert arguments[:5] == [str(tmp_path.resolve()), "--host", "10.0.0.5", "--port", "8001"]
    assert arguments[5:] == ["--dtype", "float32", "--max_running", "8", "--kv_cache_bytes", "1048576"]
    patient = launch_arguments(replace(config, load_timeout_s=900.0), tmp_path, 8001)
    assert patient[patient.index("--command_timeout_s") + 1] == "900.0"
    assert with_program(config).launch_command[1:] == ("-m", "rollover", "serve")
    own = EmbeddedServerConfig(launch=True, launch_command=("/opt/bin/rollover", "serve"))
    assert with_program(own) is own


def test_mistakes_on_the_command_line_are_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in (
            ([str(folder), "--port", port], f":{port}': Address already in use"),
            (["empty", "--port", "0"], "empty"),
            ([str(folder), "--port", "0", "--max_runing", "3"], "did you mean '--max_running'?"),
            ([str(folder), "--port", "0", "--kv_on_update", "keep"], "no option '--kv_on_update'"),
            ([str(folder), "--port", "0", "--kv_cache_bytes", "9"], "engine.kv_cache_bytes = 9 holds"),
            ([str(folder), "--port", "0", "--api-key-env", "NO_KEY"], "NO_KEY must hold the API key"),
            ([str(folder), "--port", "0", "--host", "192.0.2.1"], "192.0.2.1"),
        ):
            assert cli.main(["serve", *arguments]) == 2, arguments
            said = capsys.readouterr()
            assert message in said.err
            assert "Traceback" not in said.err


def on_disk(folder: Path, source: AdapterSource) -> AdapterSource:
    source.write(folder)
    return AdapterSource(source.manifest.version, source.adapters, folder=folder)


async def test_adapters_are_merged_into_the_model_of_the_run(folder: Path, new: Path, tmp_path: Path) -> None:
    merged = MemoryWeights(2, MergedWeights(dict(FolderWeights(0, folder).tensors()), adapters()))
    whole = WeightFolders(tmp_path / "merged", like=folder).write(merged)
    with serving(new) as url:
        async with opened(url, folder) as engine:
            before = await collect(engine, request("before"))
            await engine.load(1, on_disk(tmp_path / "v1", AdapterSource(1, adapters())))
            ours = await collect(engine, request("ours"))
            await engine.load(2, whole)
            theirs = await collect(engine, request("theirs"))
            assert tokens(ours) == tokens(theirs) != tokens(before)
            assert [p for c in ours for p in c.logprobs] == [p for c in theirs for p in c.logprobs]
            with pytest.raises(EngineError, match=r"an adapter of .*q_proj\.weight"):
                await engine.load(3, on_disk(tmp_path / "v3", AdapterSource(3, {Q_PROJ: low_rank(64, 31)})))
            (tmp_path / "v1" / "adapter_model.safetensors").write_bytes(b"damaged")
            with pytest.raises(EngineError, match=r"version 3: .*the adapters in .*v1 cannot be read"):
                await engine.load(3, AdapterSource(3, adapters(), folder=tmp_path / "v1"))
            after = await collect(engine, request("after"))
            assert tokens(after) == tokens(theirs)
