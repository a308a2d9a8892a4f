"""A scripted coordinator on loopback, and what a worker needs in its tests: weights, a clock that the test moves."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from rollover.engine.base import GenerateRequest
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import (
    PROTOCOL,
    SUBPROTOCOL,
    Ack,
    Adopt,
    Assign,
    Beat,
    CallFailed,
    Decoded,
    FromCoordinator,
    FromWorker,
    Head,
    Heartbeat,
    HeldCall,
    Hello,
    Serving,
    Welcome,
    decode_up,
    encode,
    pack_ids,
    unpack_ids,
    unpack_logprobs,
)
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.waiting import BackOff
from rollover.swarm.worker.worker import SwarmWorker
from rollover.weights.sources import MemoryWeights
from tests.engine.fake import FakeEngine, opened, token_at
from tests.speed import within

T = TypeVar("T")
M = TypeVar("M")
E = TypeVar("E", bound=BaseException)
Law = Callable[..., Coroutine[Any, Any, None]]
DEADLINE_S = within(30.0)
TOKEN = WorkerToken.make("laptop", Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key())


def head(version: int, epoch: int = 1) -> Head:
    return Head(version=version, manifest=hashlib.sha256(f"{epoch}/{version}".encode()).hexdigest())


def assign(call_id: str, *, sample: str = "", seed: int = 7, done: Any = (), limit: int = 40, **more: Any) -> Assign:
    return Assign(
        call_id=call_id,
        sample_key=sample or f"{call_id}.",
        prompt_key="p.",
        prompt_ids=pack_ids((1, 2, 3)),
        response_ids=pack_ids(done),
        max_new_tokens=limit,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=seed,
        **{"least_version": 0, **more},
    )


class MovedClock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._numbers), future))
        await future

    def jump(self, seconds: float) -> None:
        """Let time pass at once, as for a process that was stopped; who should have woken up meanwhile does so when the
        time is moved next."""
        self._now_s += seconds

    async def move(self, seconds: float) -> None:
        """Let time pass; who wakes up acts before the next one does."""
        until_s = self._now_s + seconds
        while self._sleepers and self._sleepers[0][0] <= until_s:
            due_s, _, future = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, due_s)
            if not future.done():
                future.set_result(None)
            for _ in range(20):
                await asyncio.sleep(0)
        self._now_s = until_s


class FakeFetched(MemoryWeights):
    def __init__(self, head: Head) -> None:
        super().__init__(head.version, {"w": torch.zeros(1)})
        self.version, self.digest = head.version, head.manifest
        self.prepare_s, self.wire_bytes = 0.5, 1000

    def write_folder(self, root: Path) -> Path:
        self.folder = root / f"v{self.version}"
        return self.folder


class FakeFetcher:
    """Gives every publication at once, unless told to wait or to fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[Head, tuple[str, ...], int]] = []
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_closed = False

    async def fetch(self, head: Head, urls: Sequence[str], *, run_epoch: int, deadline_s: float) -> FakeFetched:
        self.asked.append((head, tuple(urls), run_epoch))
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        return FakeFetched(head)

    async def close(self) -> None:
        self.is_closed = True


class Link:
    """One connection of the worker, as its coordinator sees it. Tokens are put at their positions."""

    def __init__(self, socket: ServerConnection, coordinator: ScriptedCoordinator, hello: Hello) -> None:
        self.socket, self.coordinator, self.hello = socket, coordinator, hello
        self.lease = 0
        self.beats = True
        self.seen: list[FromWorker] = []
        self._changed = asyncio.Event()
        self.is_closed = False

    async def welcome(self, head_: Head, *, run_id: str = "sums", epoch: int = 1, **changes: Any) -> None:
        self.coordinator.lease += 1
        self.lease = self.coordinator.lease
        fields = {"protocol": PROTOCOL, "member": "laptop", "lease": self.lease, "ttl_s": 15.0, "run_id": run_id}
        await self.send(Welcome(**{**fields, "run_epoch": epoch, "head": head_, **changes}))
        self.head = head_

    async def send(self, message: FromCoordinator) -> None:
        await self.socket.send(encode(self.lease, message))

    async def adopt(self, held: HeldCall, *, as_id: str = "", offset: int | None = None) -> None:
        """Ask for a call behind what has arrived."""
        tokens = self.coordinator.tokens.get(held.call_id, {})
        offset = held.start if offset is None else offset
        prefix = hashlib.sha256(pack_ids([tokens[i] for i in range(offset)])).hexdigest()
        self.coordinator.tokens.setdefault(as_id or held.call_id, {}).update(tokens)
        await self.send(Adopt(held=held.call_id, call_id=as_id or held.call_id, offset=offset, prefix=prefix))

    async def cut(self) -> None:
        """End the connection without a word."""
        self.socket.transport.abort()
        await self.until(lambda: self.is_closed)

    async def read(self) -> None:
        try:
            async for frame in self.socket:
                assert isinstance(frame, bytes)
                envelope = decode_up(frame)
                assert envelope.lease == self.lease
                self.seen.append(envelope.message)
                self.coordinator.take(envelope.message)
                if isinstance(envelope.message, Heartbeat) and self.beats:
                    await self.send(Beat(number=envelope.message.number, head=self.head))
                self._wake()
        except ConnectionClosed:
            pass
        finally:
            self.is_closed = True
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], T]) -> T:
        async with asyncio.timeout(DEADLINE_S):
            while not (value := condition()):
                await self._changed.wait()
            return value

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.seen if isinstance(message, kind)]

    async def first(self, kind: type[M]) -> M:
        return (await self.until(lambda: self.all(kind)))[0]

    async def serving(self, version: int) -> Serving:
        return (await self.until(lambda: [s for s in self.all(Serving) if s.version == version]))[0]

    async def ended(self, call_id: str) -> str:
        """Return how a call ended."""
        return await self.until(lambda: self.coordinator.endings.get(call_id))


class ScriptedCoordinator:
    """Accepts a worker's connections and says what the test says."""

    def __init__(self) -> None:
        self.lease = 0
        self.tokens: dict[str, dict[int, int]] = {}
        self.versions: dict[str, dict[int, int]] = {}
        self.endings: dict[str, str] = {}
        self.num_repeated = 0
        self.refuse_with: Response | None = None
        self.subprotocol: str | None = SUBPROTOCOL
        self.authorizations: list[str] = []
        self.raw: Callable[[ServerConnection], Any] | None = None
        """Talks in place of ``Link``."""
        self._links: asyncio.Queue[Link] = asyncio.Queue()
        self.port = 0

    @property
    def address(self) -> CoordinatorAddress:
        return CoordinatorAddress.parse(f"ws://127.0.0.1:{self.port}")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[ScriptedCoordinator]:
        """Listen on a port, the same one each time."""
        async with serve(
            self._serve,
            "127.0.0.1",
            self.port,
            select_subprotocol=self._select,
            process_request=self._request,
            max_size=None,
            compression=None,
        ) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            yield self

    def _select(self, connection: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
        return None if self.subprotocol is None else Subprotocol(self.subprotocol)

    def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        assert request.path == "/v1/session"
        self.authorizations.append(request.headers["Authorization"])
        return self.refuse_with

    def refuse(self, status: int, text: str = "") -> None:
        from websockets.datastructures import Headers

        self.refuse_with = Response(status, HTTPStatus(status).phrase, Headers(), text.encode())

    async def _serve(self, socket: ServerConnection) -> None:
        if self.raw is not None:
            await self.raw(socket)
            return
        frame = await socket.recv()
        assert isinstance(frame, bytes)
        envelope = decode_up(frame)
        assert envelope.lease == 0 and isinstance(envelope.message, Hello)
        link = Link(socket, self, envelope.message)
        self._links.put_nowait(link)
        await link.read()

    async def next_link(self) -> Link:
        async with asyncio.timeout(DEADLINE_S):
            return await self._links.get()

    def take(self, message: FromWorker) -> None:
        """Put tokens at their positions; a position never changes."""
        if isinstance(message, CallFailed):
            self.endings[message.call_id] = f"failed: {message.reason}"
        if not isinstance(message, Decoded):
            return
        tokens = self.tokens.setdefault(message.call_id, {})
        versions = self.versions.setdefault(message.call_id, {})
        ids = unpack_ids(message.token_ids)
        assert len(unpack_logprobs(message.logprobs)) == len(ids)
        for position, token in enumerate(ids, start=message.offset):
            self.num_repeated += position in tokens
            assert tokens.setdefault(position, token) == token
            versions[position] = message.version
        if message.finish_reason is not None:
            self.endings[message.call_id] = message.finish_reason

    def response(self, call_id: str) -> tuple[int, ...]:
        """Return a response that has no gap behind its first token."""
        tokens = self.tokens.get(call_id, {})
        assert not tokens or sorted(tokens) == list(range(min(tokens), max(tokens) + 1))
        return tuple(tokens[position] for position in sorted(tokens))


class Bench:
    """A worker with a fake engine, joined to a scripted coordinator."""

    def __init__(self, tmp_path: Path, **config: Any) -> None:
        self.coordinator = ScriptedCoordinator()
        self.clock = MovedClock()
        self.fetcher = FakeFetcher()
        self.engines: list[FakeEngine] = []
        self.lines: list[str] = []
        self.config = WorkerConfig(**config)
        self.make_engine: Callable[[], Any] = lambda: FakeEngine(length_of)
        self._tmp_path = tmp_path
        self.running: asyncio.Task[None] | None = None

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    async def open_on(self, folder: Path) -> Any:
        self.opened_on = folder
        self.engines.append(self.make_engine())
        return opened(self.engine)

    def worker(self) -> SwarmWorker:
        return SwarmWorker(
            self.coordinator.address,
            TOKEN,
            self.config,
            open_on=self.open_on,
            open_fetcher=lambda run_id: self.fetcher,
            clock=self.clock,
            random=Random(0),
            say=self.lines.append,
            work=self._tmp_path,
            back_off=BackOff(first_s=1.0, most_s=4.0),
            fetch_back_off=BackOff(first_s=1.0, most_s=4.0),
        )

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[SwarmWorker]:
        """Listen and start the worker; in the end stop it, where the test has not."""
        async with asyncio.timeout(DEADLINE_S), self.coordinator.listening():
            self.made = worker = self.worker()
            self.running = asyncio.create_task(worker.run())
            try:
                yield worker
            finally:
                self.running.cancel()
                await asyncio.gather(self.running, return_exceptions=True)

    async def member(self, head_: Head, **welcome: Any) -> Link:
        """Welcome the worker's next connection and wait until it serves."""
        link = await self.coordinator.next_link()
        await link.welcome(head_, **welcome)
        await link.serving(head_.version)
        return link

    async def decoding(self, ticks: int = 0, *calls: Assign, version: int = 0, **welcome: Any) -> Link:
        """Welcome the worker and have it decode some tokens of ``calls``, which are a call "a" if none is given."""
        link = await self.member(head(version), **welcome)
        for call in (calls := calls or (assign("a"),)):
            await link.send(call)
        num_running = sum(call.least_version <= version for call in calls)
        await self.until(lambda: len(self.engine.requests) == num_running)
        await self.engine.tick(ticks)
        return link

    async def again(self, seconds: float = 4.0) -> Link:
        """Let the back-off pass and return the next connection."""
        link = asyncio.create_task(self.coordinator.next_link())
        while not link.done():
            await self.clock.move(seconds)
            await asyncio.wait((link,), timeout=0.01)
        return link.result()

    async def member_again(self, head_: Head, **welcome: Any) -> Link:
        """Let the back-off pass, welcome the next connection and wait until it serves."""
        link = await self.again()
        await link.welcome(head_, **welcome)
        await link.serving(head_.version)
        return link

    async def serving_after(self, link: Link, version: int) -> None:
        """Let the back-off pass until the worker serves a version."""
        while not [message for message in link.all(Serving) if message.version == version]:
            await self.clock.move(0.5)
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], T]) -> T:
        while not (value := condition()):
            await asyncio.sleep(0)
        return value

    async def failure(self, kind: type[E]) -> E:
        """Return the error that has ended the worker."""
        assert self.running is not None
        while not self.running.done():
            await self.clock.move(1.0)
            await asyncio.wait((self.running,), timeout=0.01)
        error = self.running.exception()
        assert isinstance(error, kind)
        return error

    async def stopped(self, reason: str = "stopped by its user") -> None:
        """Stop the worker and wait for its end."""
        self.made.stop(reason)
        assert self.running is not None
        await self.running


def with_worker(make_engine: Callable[[], Any] | None = None, **config: Any) -> Callable[[Law], Law]:
    """Make a test of a coroutine that takes a bench whose worker joins, and the test's parameters."""

    def decorate(law: Law) -> Law:
        @functools.wraps(law)
        async def test(tmp_path: Path, **given: Any) -> None:
            bench = Bench(tmp_path, **config)
            bench.make_engine = make_engine or bench.make_engine
            async with bench.joined():
                await law(bench, **given)

        _, *others = inspect.signature(law).parameters.values()
        tmp_path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([tmp_path, *others])  # type: ignore[attr-defined]
        return test

    return decorate


def acked(call_id: str, offset: int) -> Ack:
    return Ack(call_id=call_id, offset=offset)


def length_of(request: GenerateRequest) -> int:
    return 1000


def tokens(seed: int, start: int, end: int, version: int = 0) -> tuple[int, ...]:
    """What the fake engine samples at these positions of a response."""
    return tuple(token_at(seed, position, version) for position in range(start, end))
