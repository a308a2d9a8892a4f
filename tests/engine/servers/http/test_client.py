"""The client's laws: events survive any cut of the bytes, every failure is told, no call waits for ever, keys stay secret."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.servers.http.client import EventDecoder, HTTPClient, Patience, Unreachable, meant_for
from rollover.engine.servers.vllm.answers import Completion, PauseState
from rollover.errors import ConfigError, EngineError, EngineTimeout
from tests.engine.contract import collect, request, tokens
from tests.engine.servers.scripted_server import Answer, ScriptedTransport, ScriptedVLLM, serve
from tests.engine.servers.vllm.kit import engine_over, model_folder, settings
from tests.speed import within
from tests.virtual_time import run

pytestmark = pytest.mark.real_time

SECRET = "sk-very-secret-0123"
BODY = {"model": "policy", "prompt": [1], "max_tokens": 3, "request_id": "r", "seed": 1, "temperature": 1.0}
BODY |= {"stream": True, "stop": [], "stop_token_ids": [], "ignore_eos": True}


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12), max_size=6),
    st.lists(st.integers(0, 200)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_wherever_the_network_cuts_them(payloads: list[str], cuts: list[int], newline: str) -> None:
    received = "".join(f": comment{newline}id: 7{newline}data: {p}{newline}{newline}" for p in payloads).encode()
    decoder = EventDecoder()
    edges = [0, *sorted(min(c, len(received)) for c in cuts), len(received)]
    events = [e for a, b in itertools.pairwise(edges) for e in decoder.feed(received[a:b])]
    assert events == payloads


@pytest.mark.parametrize("received", [b"data: 1", b"data: 1\n", b"dat"])
def test_an_event_that_is_cut_off_never_happened(received: bytes) -> None:
    assert EventDecoder().feed(received) == []


def client_of(server: ScriptedVLLM, **changes: Any) -> HTTPClient:
    return HTTPClient("http://one", settings(**changes), transport=ScriptedTransport({"one": server}))


def call(server: ScriptedVLLM, path: str = "/is_paused", kind: Any = PauseState, **changes: Any) -> Any:
    async def main() -> Any:
        client = client_of(server, **changes)
        try:
            return await client.ask(kind, "GET", path)
        finally:
            await client.close()

    return run(main())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(400, {"error": {"message": "too long", "code": 400}}), r"refused GET /is_paused with 400: too long$"),
        (Answer(404, {"detail": "Not Found"}), r"with 404: Not Found$"),
        (Answer(500, b"<html>oops</html>"), r"with 500: <html>oops</html>$"),
        (Answer(500), r"with 500: no reason given$"),
        (Answer(401, {"error": "Unauthorized"}), r"with 401: Unauthorized; is engine\.api_key_env set\?$"),
        (Answer(418, {"message": "m"}), "with 418: m$"),
        (Answer(418, {"error": {"detail": "m"}}), "m"),
        (Answer(418, ["m"]), "m"),
        (Answer(418, "m"), "m"),
        (Answer(418, {"odd": 1}), "odd"),
        (Answer(200, b"{half"), r"with invalid JSON \(.*\): '\{half'$"),
    ],
)
def test_a_refusal_is_told_in_the_servers_own_words(answer: Answer, message: str) -> None:
    server = ScriptedVLLM()
    server.answer_once("/is_paused", answer)
    with pytest.raises(EngineError, match=f"^http://one .*{message}"):
        call(server)


def test_a_server_that_is_not_there_is_named() -> None:
    server = ScriptedVLLM()
    server.kill()
    is_missing = pytest.raises(
        Unreachable, match=r"^http://one cannot be reached for GET /is_paused .*running there\?$"
    )
    with is_missing, meant_for("vllm", "vLLM servers"):
        call(server)


def test_a_server_of_another_kind_is_told_with_the_key() -> None:
    server = ScriptedVLLM()
    server.answer_once("/is_paused", Answer(404, "Not Found"))
    is_other = pytest.raises(EngineError, match=r"404: Not Found; engine.kind 'vllm' is for vLLM servers$")
    with is_other, meant_for("vllm", "vLLM servers"):
        call(server)


def test_a_server_that_does_not_answer_is_given_up_after_the_deadline() -> None:
    server = ScriptedVLLM()
    server.freeze()
    with pytest.raises(EngineTimeout, match=r"^http://one did not answer GET /is_paused within 7 s"):
        call(server, control_timeout_s=7.0)


def test_an_api_key_is_in_the_header_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    server = ScriptedVLLM()
    server.api_key = SECRET
    assert call(server, api_key_env="ENGINE_KEY") == PauseState(is_paused=False)
    assert SECRET not in repr(client_of(server, api_key_env="ENGINE_KEY"))
    server.answer_once("/is_paused", Answer(500, {"error": f"key {SECRET} is not welcome"}))
    with pytest.raises(EngineError, match=r"key \*\*\* is not welcome"):
        call(server, api_key_env="ENGINE_KEY")
    with pytest.raises(EngineError, match="401"):
        call(server)
    assert SECRET not in caplog.text


def test_a_missing_or_odd_key_is_a_mistake_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", " padded ", "schlüssel", "line\x01break"):
        monkeypatch.delenv("ENGINE_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("ENGINE_KEY", value)
        with pytest.raises(ConfigError, match="the environment variable ENGINE_KEY must hold the API key") as caught:
            client_of(ScriptedVLLM(), api_key_env="ENGINE_KEY")
        assert "break" not in str(caught.value)


def streamed(
    server: ScriptedVLLM, first_s: float = 10.0, between_s: float = 5.0, **changes: Any
) -> tuple[list[Completion], float]:
    """Events, and how long they took."""

    async def main() -> tuple[list[Completion], float]:
        client = client_of(server, **changes)
        patience = Patience(first_s=first_s, between_s=between_s)
        received = []
        try:
            async for event in client.events(Completion, "/v1/completions", BODY, patience):
                received.append(event)
                patience.heard()
        finally:
            await client.close()
        return received, asyncio.get_running_loop().time()

    return run(main())


@pytest.mark.parametrize(
    ("status", "waits", "least_s", "most_s"),
    [
        pytest.param(429, ["30"], 30.0, 31.0, id="when it says"),
        pytest.param(503, ["30"], 30.0, 31.0, id="when it says, unavailable"),
        pytest.param(503, ["soon"] * 3, 0.25 + 0.5 + 1.0, 2.0, id="after a growing time"),
        pytest.param(503, ["1e-9"] * 4, 4 * 0.25, 1.1, id="never at once"),
        pytest.param(503, ["0", "1e-9", "nan", "-5", "x" * 9] * 2, 1.0, 1e3, id="whatever it says"),
    ],
)
def test_a_busy_server_is_asked_after_a_pause(status: int, waits: list[str], least_s: float, most_s: float) -> None:
    server = ScriptedVLLM()
    server.answer_once("/v1/completions", *(Answer(status, headers={"retry-after": wait}) for wait in waits))
    assert least_s <= streamed(server, first_s=1e3, between_s=1e3)[1] < most_s
    assert len(server.log) == len(waits) + 1


def test_a_server_that_stays_busy_is_given_up() -> None:
    server = ScriptedVLLM()
    server.answer_once("/v1/completions", *[Answer(503, {"error": "overloaded"})] * 50)
    with pytest.raises(EngineTimeout, match=r"with 503: overloaded; busy for 20 s"):
        streamed(server, busy_timeout_s=20.0, first_s=1000.0)


def test_patience_ends_with_the_first_token_or_a_silence_between_two() -> None:
    with pytest.raises(EngineTimeout, match=r"did not send /v1/completions its first token for 10 s"):
        streamed(ScriptedVLLM(tick_s=11.0))
    with pytest.raises(EngineTimeout, match=r"its next token for 5 s"):
        streamed(ScriptedVLLM(tick_s=6.0))
    assert len(streamed(ScriptedVLLM(tick_s=4.0))[0]) == 4


def test_a_stream_that_is_no_event_stream_or_breaks_off_is_an_error() -> None:
    server = ScriptedVLLM()
    server.mangle = lambda event: event[: len(event) // 2]
    with pytest.raises(EngineError, match=r"with invalid JSON|broke off in the middle of an event"):
        streamed(server)
    server.mangle = lambda event: b"data: {nonsense}\n\n"
    with pytest.raises(EngineError, match=r"with invalid JSON .*: '\{nonsense\}'"):
        streamed(server)
    server.mangle = lambda event: b"\xff\xfe\n\n"
    with pytest.raises(EngineError, match="something other than an event stream"):
        streamed(server)
    server.mangle = lambda event: b'data: {"error": {"message": "EngineCore died"}}\n\n'
    with pytest.raises(EngineError, match="refused POST /v1/completions in the middle of its answer: EngineCore died"):
        streamed(server)
    server = ScriptedVLLM()
    server.break_after = 1
    with pytest.raises(EngineError, match="broke off POST /v1/completions: connection reset"):
        streamed(server)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for the loopback address, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True, timeout=within(60))
    return cert, key


async def test_tls_is_checked_against_the_given_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with serve(ScriptedVLLM(), tls=context) as port:
        url = f"https://127.0.0.1:{port}"
        own = {"ca_file": str(cert)}
        for changes, system, works in (
            (own, "", True),
            ({"verify_tls": False}, "", True),
            ({}, "", False),
            ({}, str(cert), True),
        ):
            monkeypatch.setenv("SSL_CERT_FILE", system)
            client = HTTPClient(url, settings(url, **changes))
            try:
                assert (await client.ask(PauseState, "GET", "/is_paused") == PauseState(is_paused=False)) == works
            except EngineError as e:
                assert not works and "certificate" in str(e).lower()
            finally:
                await client.close()
    with pytest.raises(ConfigError, match="ca_file"):
        HTTPClient(url, settings(url, ca_file=str(tmp_path / "missing.pem")))


async def test_an_engine_works_over_a_socket_and_a_dropped_call_stops_there(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    server = ScriptedVLLM(tick_s=0.002)
    async with serve(server) as port:
        url = f"http://127.0.0.1:{port}"
        client = HTTPClient(url, settings(url))
        engine = engine_over(client, settings(url), folder)
        await engine.open()
        calls = [collect(engine, request(f"r{i}", seed=i, max_new_tokens=20)) for i in range(8)]
        assert [len(tokens(chunks)) for chunks in await asyncio.gather(*calls)] == [20] * 8
        stream = engine.generate(request("gone", max_new_tokens=400))
        await anext(stream)
        assert server.requests
        await client.close()
        async with asyncio.timeout(within(20)):
            while server.requests:
                await asyncio.sleep(0.01)
        client._http = HTTPClient(url, settings(url))._http
        await engine.close()


def test_each_url_may_have_a_cap_of_its_own(tmp_path: Path) -> None:
    each = settings(urls=("http://a:1", "http://b:2/"), max_running=(8, 32))
    folder = model_folder(tmp_path / "model")
    engines = [engine_over(HTTPClient(url, each), each, folder) for url in each.urls]
    assert [engine.capabilities.max_running for engine in engines] == [8, 32]
