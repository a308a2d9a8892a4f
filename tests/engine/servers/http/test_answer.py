"""Whatever a server answers: one error that names it, no traceback, no secret of ours, no memory without bound."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from rollover.engine.servers.http import answer as answers
from rollover.engine.servers.http import client
from rollover.engine.servers.http.client import HTTPClient, Patience
from rollover.engine.servers.vllm.answers import Completion, PauseState
from rollover.errors import EngineError
from tests.engine.contract import collect, request, tokens
from tests.engine.servers.http.test_client import BODY, SECRET, call, streamed
from tests.engine.servers.scripted_server import Answer, ScriptedTransport, ScriptedVLLM
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import model_folder, settings
from tests.virtual_time import run


def asked(*replies: Answer) -> PauseState:
    server = ScriptedVLLM()
    server.answer_once("/is_paused", *replies)
    return call(server)


def answered(*replies: Answer) -> tuple[list[Completion], float]:
    """Events, and how long they took."""
    server = ScriptedVLLM()
    server.answer_once("/v1/completions", *replies)
    return streamed(server, first_s=1e3, between_s=1e3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304])
def test_a_redirect_is_no_success_and_is_not_followed(status: int) -> None:
    reply = Answer(status, headers={"location": "https://user:word@elsewhere/login?token=abc"})
    for ask in (asked, answered):
        with pytest.raises(EngineError, match=f"^http://one answered .* with {status}, a redirect to") as caught:
            ask(reply)
        assert "https://elsewhere/login," in str(caught.value)
        assert "word" not in str(caught.value) and "abc" not in str(caught.value)
    with pytest.raises(EngineError, match="a redirect to nowhere"):
        asked(Answer(status))


DEEP = b'{"is_paused":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "the whole of it: Input should be an object, got \\[\\]$"),
        ("yes", "the whole of it: Input should be an object"),
        ({}, "field 'is_paused': Field required, got {}$"),
        ({"is_paused": None}, "field 'is_paused': Input should be a valid boolean, got None$"),
        ({"is_paused": 10**400}, "field 'is_paused': Input should be a valid boolean, got 1000"),
        ({"is_paused": {"is_paused": True}}, "field 'is_paused'"),
        (b"1" * 5000, "invalid JSON \\(number out of range"),
        (b"\xff\xfe", "invalid JSON"),
        (b'{"is_paused": "\\ud800"}', "invalid JSON"),
        (DEEP, "invalid JSON \\(recursion limit exceeded"),
        (None, "invalid JSON \\(EOF"),
    ],
)
def test_an_answer_of_another_type_names_server_call_and_field(body: Any, complaint: str) -> None:
    with pytest.raises(EngineError, match=f"^http://one answered GET /is_paused with .*{complaint}") as caught:
        asked(Answer(body=body))
    assert len(str(caught.value)) < 400


LIES: list[Any] = [[], {}, None, "x", 10**400, -1, [[]], [None], {"a": []}, {"data": [{"id": []}]}, 1e400, [{}], True]


def test_no_lie_of_a_server_is_anything_but_an_error_of_the_engine(kind: ModuleType, tmp_path: Path) -> None:
    """Each answer of an opening server in turn is replaced by each lie, and parts of each are."""
    folder = model_folder(tmp_path / "v0")

    def lies_for(right: Any) -> list[Any]:
        parts = [{**right, key: lie} for key in right for lie in LIES[::4]] if isinstance(right, dict) else []
        return [*LIES[::2], *parts]

    async def attempt(turn: int, lie: Any) -> tuple[bool, Any]:
        """Whether there was a ``turn``-th answer, and what would have been right."""
        server = kind.Server()
        handle, seen = server.handle, [-1]
        right: list[Any] = []

        async def lying(method: str, target: str, headers: dict[str, str], content: bytes) -> Answer:
            answer = await handle(method, target, headers, content)
            if answer.stream is None:
                seen[0] += 1
                if seen[0] == turn:
                    right.append(answer.body)
                    if lie is not None:
                        return Answer(body=lie[0])
            return answer

        server.handle = lying
        engine = kind.make_engine(server, folder, abort_timeout_s=1.0, control_timeout_s=2.0, load_timeout_s=2.0)
        try:
            await engine.open()
        except EngineError as e:
            assert len(str(e)) < 1500
        finally:
            await engine.close()
        return bool(right), right[0] if right else None

    async def main() -> int:
        tried = 0
        for turn in range(100):
            there, right = await attempt(turn, None)
            if not there:
                return tried
            for lie in lies_for(right):
                await attempt(turn, (lie,))
                tried += 1
        raise AssertionError("it opens for ever")

    assert run(main()) > 100


async def test_no_lie_in_a_stream_is_anything_but_an_error_of_the_engine(kind: ModuleType, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "v0")

    def spoilt(value: Any, lie: Any) -> list[Any]:
        """``value`` with each of its parts replaced, at any depth."""
        if isinstance(value, dict):
            return [lie] + [{**value, k: s} for k, v in value.items() for s in spoilt(v, lie)]
        if isinstance(value, list):
            return [lie] + [[*value[:i], s, *value[i + 1 :]] for i, v in enumerate(value) for s in spoilt(v, lie)]
        return [lie]

    server = kind.Server()
    async with kind.opened(server, folder) as engine:
        events: list[bytes] = []
        server.mangle = lambda event: events.append(event) or event  # type: ignore[func-returns-value]
        assert len(tokens(await collect(engine, request("right", max_new_tokens=2)))) == 2
        first = json.loads(events[0].removeprefix(b"data: "))
        names = iter(range(10**6))
        for lie in ([], {}, "x", 10**400, -1, [[[]]], 1e400, None, True):
            for event in spoilt(first, lie):
                server.mangle = lambda _, event=event: f"data: {json.dumps(event)}\n\n".encode()
                try:
                    await collect(engine, request(f"r{next(names)}", max_new_tokens=2))
                except EngineError as e:
                    assert len(str(e)) < 1500


async def endless(piece: bytes, sent: list[int]) -> AsyncIterator[bytes]:
    while True:
        sent[0] += len(piece)
        yield piece


def test_no_body_is_read_beyond_its_bound() -> None:
    sent = [0]
    with pytest.raises(EngineError, match=r"^http://one answered GET /is_paused with more than 16777216 bytes$"):
        asked(Answer(stream=endless(b" " * 65536, sent)))
    assert sent[0] <= answers.MAX_ANSWER_BYTES + 2 * 65536
    sent = [0]
    with pytest.raises(EngineError, match=r"with 500: x+"):
        asked(Answer(500, stream=endless(b"x" * 65536, sent)))
    assert sent[0] <= 3 * 65536


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 65530, b"data: " + b"x" * 65529 + b"\n"], ids=["line", "lines"])
def test_no_event_is_read_beyond_its_bound(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_EVENT_CHARS", 2**20)
    sent = [0]
    with pytest.raises(EngineError, match="an event stream: an event of more than 1048576 characters"):
        answered(Answer(stream=endless(piece, sent)))
    assert sent[0] <= 2**20 + 2**18


def test_what_is_compressed_though_nobody_asked_is_not_unpacked() -> None:
    bomb = gzip.compress(b'{"is_paused": false' + b" " * 50_000_000 + b"}")
    reply = Answer(body=bomb, headers={"content-encoding": "gzip"})
    for ask in (asked, answered):
        with pytest.raises(EngineError, match=r"^http://one answered .* in the encoding 'gzip', although the call"):
            ask(reply)
    with pytest.raises(EngineError, match="with 500: no reason given"):
        asked(Answer(500, bomb, headers={"content-encoding": "gzip"}))


def echo(headers: dict[str, str]) -> str:
    """As a debugging proxy says it: after so much that the key is where messages are cut."""
    said = json.dumps({**headers, "authorization": headers.get("authorization", "")})
    return "x" * (600 - said.index("Bearer") - len("Bearer ") - len(SECRET) // 2) + said


@pytest.mark.parametrize("status", [200, 307, 400, 401, 500])
def test_a_server_that_repeats_our_headers_leaks_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    shapes: list[Any] = [
        lambda text: text,
        lambda text: {"error": {"message": text}},
        lambda text: {"error": text},
        lambda text: {"is_paused": text},
        lambda text: {text: text},
        lambda text: [text],
    ]

    class Echo(ScriptedVLLM):
        def __init__(self, shape: Any) -> None:
            super().__init__()
            self.shape = shape

        async def handle(self, method: str, target: str, headers: dict[str, str], content: bytes) -> Answer:
            body = self.shape(echo(headers))
            body = body.encode() if isinstance(body, str) else body
            return Answer(status, body, headers={"location": f"http://else/{headers['authorization']}"})

    for shape in shapes:
        client = HTTPClient(
            "http://one", settings(api_key_env="ENGINE_KEY"), transport=ScriptedTransport({"one": Echo(shape)})
        )

        async def both(client: HTTPClient = client) -> list[str]:
            said = []
            for asking in (
                client.ask(PauseState, "GET", "/is_paused"),
                anext(client.events(Completion, "/v1/completions", BODY, Patience(first_s=9.0, between_s=9.0))),
            ):
                try:
                    await asking
                except (EngineError, StopAsyncIteration) as e:
                    said.append(str(e))
            await client.close()
            return said

        for message in run(both()):
            for length in range(6, len(SECRET) + 1):
                assert SECRET[:length] not in message, message


def test_what_a_server_says_in_its_fields_shows_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    folder = model_folder(tmp_path / "v0")

    def message(path: str, body: Any, kind: ModuleType) -> str:
        async def main() -> str:
            server = kind.Server()
            server.api_key = SECRET
            server.answer_once(path, Answer(body=body), Answer(body=body))
            engine = kind.make_engine(server, folder, api_key_env="ENGINE_KEY")
            with pytest.raises(EngineError) as caught:
                await engine.open()
            await engine.close()
            return str(caught.value)

        return run(main())

    for path, body, kind in (
        ("/v1/models", {"data": [{"id": f"model of {SECRET}"}]}, vllm_kit),
        ("/weight_info", {"weight_version": f"rollover:{SECRET}:3"}, vllm_kit),
        (
            "/model_info",
            {"model_path": SECRET, "is_generation": True, "weight_version": f"rollover:{SECRET}:3"},
            sglang_kit,
        ),
        (
            "/model_info",
            {"model_path": "", "is_generation": True, "weight_version": "", "model_type": SECRET},
            sglang_kit,
        ),
        ("/update_weights_from_disk", {"success": False, "message": f"not with {SECRET}"}, sglang_kit),
    ):
        assert SECRET not in message(path, body, kind)


async def test_an_error_of_the_connection_that_quotes_the_server_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", SECRET)

    class Quoting(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.RemoteProtocolError(f"illegal header line: bytearray(b'x: Bearer {SECRET}')")

    client = HTTPClient("http://one", settings(api_key_env="ENGINE_KEY"), transport=Quoting())
    with pytest.raises(EngineError, match=r"broke off GET /is_paused: illegal header line: .*Bearer \*\*\*") as e:
        await client.call("GET", "/is_paused")
    assert SECRET not in str(e.value)
    await client.close()
