"""Scripted inference servers: one token per running request and tick, faults on demand; and vLLM's server, with its
endpoints and its peculiarities.

Invariants: the token and the log-prob of a request at position ``i`` of *its own* output are ``token_at(seed, i,
weights)`` and ``logprob_at(...)``, where ``weights`` is the path that was loaded last; so a test can compute what it should
see, and see which weights a token really came from.

``ScriptedTransport`` puts it behind an ``httpx`` client without a network, which also works in virtual time; ``serve`` puts it
behind a real socket.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import httpx

if TYPE_CHECKING:  # torch takes long to import
    from tests.engine.servers.meetings import Meetings, Seat

VOCAB = 64
CONTEXT = 512
MODEL = "policy"


def token_at(seed: int, position: int, weights: str) -> int:
    return zlib.crc32(f"t{seed}/{position}/{weights}".encode()) % VOCAB


def logprob_at(seed: int, position: int, weights: str, temperature: float = 1.0) -> float:
    return -(1 + zlib.crc32(f"p{seed}/{position}/{weights}".encode()) % 1024) / 256 / temperature


@dataclass
class Answer:
    """What a request gets: a body, or a stream of pieces."""

    status: int = 200
    body: Any = None
    stream: AsyncIterator[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return (
            self.body if isinstance(self.body, bytes) else b"" if self.body is None else json.dumps(self.body).encode()
        )


class Broken(Exception):
    """The connection is gone."""


class ScriptedServer:
    """What all kinds share. Public attributes are the script; ``log`` holds (method, path, query, body) of every call.

    A path is answered by the method of its name, ``_post_abort_requests`` for ``POST /abort_requests``.
    """

    generate_path: str
    load_path: str

    def __init__(self, *, tick_s: float = 0.01, weights: str = "initial") -> None:
        self.tick_s = tick_s
        self.weights = weights
        self.version = "default"
        self.paused = False
        self.vocab = VOCAB
        self.aborts_by_id = True
        """False acknowledges an abort of one request and does nothing."""
        self.api_key: str | None = None
        self.load_error: str | None = None
        """Why it loads no weights."""
        self.is_wedged = False
        """It answers, and what decodes behind it does nothing any more."""
        self.text: dict[int, str] = {}
        """What tokens spell, for stop strings."""
        self.adapters: dict[str, str] | None = None
        """Folders of adapters by name; ``None`` where it was started for none."""
        self.adapter_rank = 8
        self.network_delay_s = 0.0
        """How late events reach the client."""
        self.mangle: Callable[[bytes], bytes] = lambda event: event
        """Applied to each event of a stream."""
        self.break_after: int | None = None
        """Streams break after so many events."""
        self.scripted: dict[str, deque[Answer]] = {}
        """Answers by path that are given, once each, in place of the right one."""
        self.log: list[tuple[str, str, dict[str, str], Any]] = []
        self.decoded_tokens = 0
        self.sampled: set[tuple[str, int, float]] = set()
        """(weights, token, log-prob) of everything that was decoded."""
        self.can_sleep = True
        """It was started so that it can give memory back."""
        self.asleep: set[str] = set()
        """What it has given back, by its own names."""
        self.died = False
        """It was asked for something that it does not survive."""
        self.requests: dict[str, Any] = {}
        self._alive = asyncio.Event()
        self._alive.set()
        self._dead = False
        self._ticker: asyncio.Task[None] | None = None

    # -- what can befall it ----------------------------------------------------------------------------------

    def freeze(self) -> None:
        """As SIGSTOP: connections are accepted, nothing moves."""
        self._alive.clear()

    def thaw(self) -> None:
        self._alive.set()

    def kill(self) -> None:
        """As SIGKILL: connections break, new ones are refused."""
        self._dead = True
        for running in self.requests.values():
            running.events.put_nowait(None)
        self.requests.clear()

    def restart(self) -> None:
        """A new process with the weights it was started with."""
        self.kill()
        self._dead = self.paused = False
        self.asleep.clear()
        self.version, self.weights = "default", "initial"
        if self.adapters is not None:
            self.adapters = {}
        self._alive.set()

    def die(self) -> Answer:
        """Do as a server whose process fails."""
        self.died = True
        self.kill()
        raise Broken

    def answer_once(self, path: str, *answers: Answer) -> None:
        self.scripted.setdefault(path, deque()).extend(answers)

    # -- HTTP ------------------------------------------------------------------------------------------------

    async def handle(self, method: str, target: str, headers: dict[str, str], content: bytes) -> Answer:
        if self._dead:
            raise Broken
        await self._alive.wait()
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query))
        body = json.loads(content) if content else None
        self.log.append((method, parts.path, query, body))
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return Answer(401, {"error": "Unauthorized"})
        if self.scripted.get(parts.path):
            return self.scripted[parts.path].popleft()
        is_streamed = isinstance(body, dict) and body.get("stream")
        while self.is_wedged and parts.path in (self.generate_path, "/health_generate") and not is_streamed:
            await asyncio.sleep(self.tick_s)
        route = getattr(self, f"_{method.lower()}{parts.path.replace('/', '_')}", None)
        if route is None or not self._offers(parts.path):
            return Answer(404, {"detail": "Not Found"})
        answer: Answer = await route(query, body)
        if self._dead:
            raise Broken
        return answer

    def _offers(self, path: str) -> bool:
        return True

    def weights_under(self, adapter: str | None) -> str:
        """Name what computes a call with an adapter, or without one."""
        return self.weights if adapter is None or self.adapters is None else f"{self.weights}+{self.adapters[adapter]}"

    # -- decoding --------------------------------------------------------------------------------------------

    def _start(self, name: str, running: Any) -> None:
        self.requests[name] = running
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _events(self, running: Any) -> AsyncGenerator[bytes, None]:
        """As the client gets them."""
        sent = 0
        while (event := await running.events.get()) is not None:
            await asyncio.sleep(self.network_delay_s)
            await self._alive.wait()
            if self._dead or sent == self.break_after:
                raise Broken
            yield self.mangle(f"data: {json.dumps(event)}\n\n".encode())
            sent += 1
        if self._dead:
            raise Broken

    async def _tick(self) -> None:
        while self.requests:
            await asyncio.sleep(self.tick_s)
            await self._alive.wait()
            if not (self.paused or self.is_wedged):
                if self.asleep and self.requests:
                    self.died = True
                    self.kill()
                    return
                for name, running in list(self.requests.items()):
                    self._decode(name, running)

    def _decode(self, name: str, running: Any) -> None:
        """One token of a request."""
        raise NotImplementedError

    def scripted_token(self, seed: int, position: int, weights: str, temperature: float) -> tuple[int, float]:
        token, logprob = token_at(seed, position, weights), logprob_at(seed, position, weights, temperature or 1.0)
        self.sampled.add((weights, token, round(logprob, 9)))
        return token, logprob


class _Running:
    """A request as the server knows it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.sampled: list[int] = []
        self.unsent: list[tuple[int, float]] = []
        self.first = True
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def flush(self, reason: str | None, stop_reason: Any = None) -> None:
        pieces, self.unsent = self.unsent, []
        if not pieces and reason is None:
            return
        choice = {
            "index": 0,
            "text": "",
            "token_ids": [t for t, _ in pieces],
            "logprobs": {"token_logprobs": [p for _, p in pieces], "tokens": [f"token_id:{t}" for t, _ in pieces]},
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        if pieces or not self.first:  # vLLM leaves out an event without a token before the first one
            self.events.put_nowait({"id": "cmpl-x", "choices": [choice]})
        self.first = False
        if reason is not None:
            self.events.put_nowait(None)


class ScriptedVLLM(ScriptedServer):
    """A vLLM server. ``aborts_by_id`` is false in a release in which the inner id has another form."""

    generate_path, load_path = "/v1/completions", "/collective_rpc"

    def __init__(self, *, tick_s: float = 0.01, weights: str = "initial") -> None:
        super().__init__(tick_s=tick_s, weights=weights)
        self.max_model_len = CONTEXT
        self.root = "/elsewhere"
        self.dev_mode = True
        self.device: str | None = "cuda"
        self.caches = True
        """Whether the last event of a stream says how much of the prompt was cached; half of it is."""
        self.held_resets = 0
        """So many resets of the prefix cache fail."""
        self.num_workers = 2
        self.meetings: Meetings | None = None
        self.seat: Seat | None = None
        """Where its workers sit."""

    def _offers(self, path: str) -> bool:
        return self.dev_mode or path in ("/v1/models", "/v1/completions", "/health")

    async def _get_health(self, query: dict[str, str], body: Any) -> Answer:
        return Answer()

    async def _get_v1_models(self, query: dict[str, str], body: Any) -> Answer:
        base = {"id": MODEL, "root": self.root, "max_model_len": self.max_model_len}
        beside = [{"id": name, "root": path, "parent": MODEL} for name, path in (self.adapters or {}).items()]
        return Answer(body={"data": [base, *beside]})

    async def _get_server_info(self, query: dict[str, str], body: Any) -> Answer:
        lora = None if self.adapters is None else {"max_lora_rank": self.adapter_rank, "max_loras": 1}
        settings = {"device_config": {"device": self.device}, "model_config": {"enable_sleep_mode": self.can_sleep}}
        return Answer(body={"vllm_config": {**settings, "lora_config": lora}})

    async def _get_is_paused(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(body={"is_paused": self.paused})

    async def _get_weight_info(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(body={"weight_version": self.version})

    async def _post_update_weight_version(self, query: dict[str, str], body: Any) -> Answer:
        self.version = body["new_version"]
        return Answer(body={"success": True})

    async def _post_pause(self, query: dict[str, str], body: Any) -> Answer:
        if query.get("mode", "abort") == "abort":
            self._abort(list(self.requests))
        self.paused = True
        return Answer(body={"status": "paused"})

    async def _post_resume(self, query: dict[str, str], body: Any) -> Answer:
        self.paused = False
        return Answer(body={"status": "resumed"})

    async def _post_sleep(self, query: dict[str, str], body: Any) -> Answer:
        """It says that it sleeps also where it cannot."""
        assert query == {"level": "2"}
        self._abort(list(self.requests))
        self.paused = True
        if self.can_sleep:
            self.asleep, self.weights = {"weights", "kv_cache"}, "nothing"
        return Answer(body={"status": "sleeping", "level": 2})

    async def _post_wake_up(self, query: dict[str, str], body: Any) -> Answer:
        """It goes on as soon as all is there."""
        self.asleep -= {query["tags"]}
        if not self.asleep:
            self.paused = False
        return Answer(body={"status": "sleeping" if self.asleep else "awake", "tags": [query["tags"]]})

    async def _post_abort_requests(self, query: dict[str, str], body: Any) -> Answer:
        ids = body.get("request_ids") or list(self.requests)
        if self.aborts_by_id:
            self._abort(ids)
        return Answer(body={"status": "aborted", "aborted": len(ids)})

    async def _post_reset_prefix_cache(self, query: dict[str, str], body: Any) -> Answer:
        self.held_resets -= self.held_resets > 0
        return Answer(body={"success": not self.requests and not self.held_resets})

    async def _post_collective_rpc(self, query: dict[str, str], body: Any) -> Answer:
        assert body["method"] == "reload_weights" and "weights" not in self.asleep
        if self.load_error is not None:
            self.weights = "broken"
            return Answer(500, {"error": {"message": self.load_error}})
        self.weights = body["kwargs"]["weights_path"]
        return Answer(body={"results": [None]})

    async def _post_v1_load_lora_adapter(self, query: dict[str, str], body: Any) -> Answer:
        if self.adapters is None:
            return Answer(404, {"detail": "Not Found"})
        if body["lora_name"] in self.adapters:
            return Answer(400, {"error": {"message": "has already been loaded"}})
        self.adapters[body["lora_name"]] = body["lora_path"]
        return Answer(body=f"Success: LoRA adapter {body['lora_name']!r} added successfully.".encode())

    async def _post_v1_unload_lora_adapter(self, query: dict[str, str], body: Any) -> Answer:
        assert self.adapters is not None
        if self.adapters.pop(body["lora_name"], None) is None:
            return Answer(404, {"error": {"message": "cannot be found"}})
        return Answer(body=b"Success")

    # -- weights through a process group ---------------------------------------------------------------------

    async def _get_get_world_size(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(body={"world_size": self.num_workers})

    async def _post_init_weight_transfer_engine(self, query: dict[str, str], body: Any) -> Answer:
        assert self.meetings is not None
        self.seat = self.meetings.meet(body["init_info"], self.num_workers)
        return Answer(body={"message": "Weight transfer initialized"})

    async def _post_start_weight_update(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(body={"message": "Weight update started"})

    async def _post_update_weights(self, query: dict[str, str], body: Any) -> Answer:
        assert self.seat is not None
        info = body["update_info"]
        try:
            self.weights = await self.seat.receive(info["names"], info["dtype_names"], info["shapes"])
        except RuntimeError as e:
            return Answer(500, {"error": {"message": str(e)}})
        return Answer(body={"message": "Weights updated"})

    async def _post_finish_weight_update(self, query: dict[str, str], body: Any) -> Answer:
        self.version = body["weight_version"]
        return Answer(body={"message": "Weight update finished"})

    async def _post_shutdown_weight_transfer_engine(self, query: dict[str, str], body: Any) -> Answer:
        if self.seat is not None:
            self.seat.leave()
        return Answer(body={"message": "Weight transfer shut down"})

    async def _post_v1_completions(self, query: dict[str, str], body: Any) -> Answer:
        refusal = self._refusal(body)
        if refusal is not None:
            return Answer(400, {"error": {"message": refusal, "type": "BadRequestError", "code": 400}})
        if not body.get("stream"):
            while self.paused:
                await asyncio.sleep(self.tick_s)
            await asyncio.sleep(self.tick_s * body["max_tokens"])
            return Answer(body={"choices": [{"text": "x", "finish_reason": "length"}]})
        return Answer(stream=self._stream(body), headers={"content-type": "text/event-stream"})

    def _refusal(self, body: dict[str, Any]) -> str | None:
        if body["model"] not in (MODEL, *(self.adapters or {})):
            return f"The model `{body['model']}` does not exist."
        if max(body["prompt"]) >= self.vocab:
            return f"Token id {max(body['prompt'])} is out of vocabulary"
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return f"This model's maximum context length is {self.max_model_len} tokens."
        return None

    # -- decoding --------------------------------------------------------------------------------------------

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """A request comes to exist only when its stream is read: after the head of the answer has been sent."""
        if body["seed"] is None:
            body = {**body, "seed": zlib.crc32(body["request_id"].encode())}
        running = _Running(body)
        name = f"cmpl-{body['request_id']}-0"
        self._start(name, running)
        try:
            async with aclosing(self._events(running)) as pieces:
                async for piece in pieces:
                    yield piece
            usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
            if self.caches:
                usage["prompt_tokens_details"] = {"cached_tokens": len(body["prompt"]) // 2}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            self.requests.pop(name, None)

    def _decode(self, name: str, running: _Running) -> None:
        body = running.body
        token, logprob = self._draw(body, running.sampled)
        running.sampled.append(token)
        running.unsent.append((token, logprob))
        self.decoded_tokens += 1
        text = "".join(self.text.get(token, "") for token in running.sampled)
        matched = next((s for s in body["stop"] if s in text), None)
        if token in body["stop_token_ids"]:
            self._finish(name, "stop", token)
        elif matched is not None:
            self._finish(name, "stop", matched)
        elif len(running.sampled) == body["max_tokens"]:
            self._finish(name, "length")
        elif running.first or len(running.unsent) >= body.get("stream_interval", 1):
            running.flush(None)

    def _draw(self, body: dict[str, Any], sampled: list[int]) -> tuple[int, float]:
        """The next token of a request and its log-prob."""
        weights = self.weights_under(None if body["model"] == MODEL else body["model"])
        return self.scripted_token(body["seed"], len(sampled), weights, body["temperature"])

    def _finish(self, name: str, reason: str, stop_reason: Any = None) -> None:
        if (running := self.requests.pop(name, None)) is not None:
            running.flush(reason, stop_reason)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self._finish(name, "abort")


class ScriptedTransport(httpx.AsyncBaseTransport):
    """A network of scripted servers by host name; what is not among them cannot be reached."""

    def __init__(self, servers: dict[str, ScriptedServer]) -> None:
        self.servers = servers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self.servers.get(request.url.host)
        if server is None:
            raise httpx.ConnectError("connection refused", request=request)
        headers = {k.lower(): v for k, v in request.headers.items()}
        target = request.url.raw_path.decode()
        try:
            answer = await server.handle(request.method, target, headers, await request.aread())
        except Broken:
            raise httpx.ConnectError("connection refused", request=request) from None
        stream = _ByteStream(answer.stream or _whole(answer.content), request)
        return httpx.Response(answer.status, headers=answer.headers, stream=stream, request=request)


async def _whole(content: bytes) -> AsyncIterator[bytes]:
    yield content


class _ByteStream(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes], request: httpx.Request) -> None:
        self._pieces = pieces
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                yield piece
        except Broken:
            raise httpx.ReadError("connection reset by peer", request=self._request) from None

    async def aclose(self) -> None:
        await self._pieces.aclose()  # type: ignore[attr-defined]


@asynccontextmanager
async def serve(
    server: ScriptedServer, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """``server`` on a port of the loopback interface unless told otherwise, one request per connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(Broken, ConnectionError, asyncio.IncompleteReadError):
                await _answer_one(server, reader, writer)
        finally:
            writer.close()

    listener = await asyncio.start_server(answer, host, port, ssl=tls)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def _answer_one(server: ScriptedServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    answer = await server.handle(method, target, headers, content)
    lines = [f"HTTP/1.1 {answer.status} X", "Connection: close", *(f"{k}: {v}" for k, v in answer.headers.items())]
    if answer.stream is None:
        lines.append(f"Content-Length: {len(answer.content)}")
    writer.write("\r\n".join([*lines, "", ""]).encode() + answer.content)
    if answer.stream is None:
        await writer.drain()
        return
    gone = asyncio.create_task(reader.read(1))  # ends when the client hangs up
    pieces = answer.stream
    try:
        while True:
            piece = asyncio.ensure_future(anext(pieces))
            await asyncio.wait([piece, gone], return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                piece.cancel()
                await asyncio.gather(piece, return_exceptions=True)
                return
            writer.write(piece.result())
            await writer.drain()
    except StopAsyncIteration:
        return
    finally:
        gone.cancel()
        await pieces.aclose()  # type: ignore[attr-defined]
