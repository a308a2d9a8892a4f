"""A network that delays and cuts: a proxy between workers and coordinator.

::

    worker ──▶ proxy ──▶ coordinator       frames of a session, each on time, late, or the last one
    worker, relay ──▶ proxy ──▶ coordinator       blobs, some of them damaged

A direction of a connection draws its lots from a seed, the member's name and the number of the connection: the n-th
frame is delayed or cut alike in every run, whatever the frame may be.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from random import Random

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from rollover.swarm.wire.messages import SUBPROTOCOL, decode_down, decode_up
from tests.swarm.chaos.faults import WireFaults, damaged, delay_of_frame
from tests.swarm.chaos.record import WireRecord

_TIMEOUT_S = 5.0


class FaultProxy:
    """Stands between the workers and the coordinator on ``upstream``, a port of this machine.

    Example: ``proxy.faults = WireFaults(delay=0.02)`` at any time; ``proxy.cut("phone")`` ends the connections of a
    member; ``proxy.freeze("phone", 2.0)`` holds back what it says and hears for two seconds.
    """

    def __init__(self, upstream: int, seed: str) -> None:
        self.faults = WireFaults()
        self.record = WireRecord()
        self.starved: set[str] = set()
        """Members that get no blobs."""
        self.port = 0
        self._upstream = f"127.0.0.1:{upstream}"
        self._seed = seed
        self._numbers: Counter[str] = Counter()
        self._blob_lots = Random(f"{seed}/blobs")
        self._dialled: dict[str, tuple[str, ClientConnection]] = {}
        """Connections to the coordinator whose worker's side is about to open, by the id of that side."""
        self._links: dict[str, list[Connection]] = {}
        self._lanes: dict[str, list[_Lane]] = {}
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FaultProxy]:
        async with serve(
            self._serve,
            "127.0.0.1",
            self.port,
            process_request=self._answer,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=None,
            compression=None,
            ping_interval=None,
            close_timeout=0.5,
        ) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            try:
                yield self
            finally:
                for member in list(self._links):
                    self.cut(member)
                for _, dialled in self._dialled.values():
                    await dialled.close()
        await self._http.aclose()
        await asyncio.sleep(0.1)  # what was cut is closed in a later turn

    def cut(self, member: str) -> None:
        """End the connections of a member without a word."""
        for connection in self._links.get(member, ()):
            connection.transport.abort()

    def freeze(self, member: str, seconds: float) -> None:
        """Let nothing through to and from a member for a while; then all of it."""
        for lane in self._lanes.get(member, ()):
            lane.hold(seconds)

    async def _answer(self, down: ServerConnection, request: Request) -> Response | None:
        """Answer for the coordinator, or dial it and let the session begin."""
        authorization = request.headers.get("Authorization", "")
        parts = authorization.split(".")
        member = parts[1] if len(parts) > 1 else "nobody"
        if request.path.startswith("/v1/blobs/"):
            if member in self.starved:
                return _response(404, b"there is no such blob\n")
            return await self._blob(request, authorization)
        for other, (name, dialled) in list(self._dialled.items()):
            if name == member:  # the worker has given up in between
                del self._dialled[other]
                await dialled.close()
        try:
            up = await connect(
                f"ws://{self._upstream}{request.path}",
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                additional_headers={"Authorization": authorization},
                compression=None,
                max_size=None,
                open_timeout=_TIMEOUT_S,
                close_timeout=0.5,
                ping_interval=None,
                proxy=None,
            )
        except InvalidStatus as e:
            return _response(e.response.status_code, bytes(e.response.body or b""))
        except (OSError, InvalidHandshake, TimeoutError):
            return _response(502, b"the coordinator is not there\n")
        self._dialled[str(down.id)] = (member, up)
        return None

    async def _serve(self, down: ServerConnection) -> None:
        member, up = self._dialled.pop(str(down.id))
        self._numbers[member] += 1
        number = self._numbers[member]
        ends = self._links.setdefault(member, [])
        ends += [up, down]

        def lane(to: Connection, direction: str) -> _Lane:
            made = _Lane(to, Random(f"{self._seed}/{member}/{number}/{direction}"), self._cut_all(up, down))
            self._lanes.setdefault(member, []).append(made)
            return made

        rising, falling = lane(up, "up"), lane(down, "down")
        tasks = [
            asyncio.create_task(work)
            for work in (
                rising.carry(),
                falling.carry(),
                self._take(down, rising, lambda frame: self.record.up(member, decode_up(frame).message)),
                self._take(up, falling, None),
            )
        ]
        falling.on_going = lambda frame: self.record.down(member, decode_down(frame).message)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.05)  # what was on its way arrives, as a goodbye does before the end
            for end in (up, down):
                with suppress(ConnectionClosed, OSError):
                    await end.close()
        finally:
            for task in tasks:
                task.cancel()
            for end in (up, down):
                end.transport.abort()  # also where the proxy is closed meanwhile
                ends.remove(end)
            for lane_ in (rising, falling):
                self._lanes[member].remove(lane_)
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # a mistake of ours, or a law that was broken

    def _cut_all(self, *ends: Connection) -> Callable[[], None]:
        def cut() -> None:
            for end in ends:
                end.transport.abort()

        return cut

    async def _take(self, source: Connection, lane: _Lane, seen: Callable[[bytes], None] | None) -> None:
        """Read one direction of a connection to its end."""
        with suppress(ConnectionClosed):
            async for frame in source:
                assert isinstance(frame, bytes)
                if seen is not None:
                    seen(frame)
                lane.put(frame, self.faults, self.record.faults)

    async def _blob(self, request: Request, authorization: str) -> Response:
        wanted = {"Authorization": authorization, "Accept-Encoding": "identity"}
        wanted |= {"Range": request.headers["Range"]} if "Range" in request.headers else {}
        try:
            answer = await self._http.get(f"http://{self._upstream}{request.path}", headers=wanted)
        except httpx.HTTPError:
            return _response(502, b"the coordinator is not there\n")
        body, fault = damaged(answer.content, self.faults, self._blob_lots)
        self.record.faults[fault or "blobs intact"] += 1
        if body is None:
            return _response(404, b"there is no such blob\n")
        said = {name: answer.headers[name] for name in ("Content-Range", "ETag") if name in answer.headers}
        return _response(answer.status_code, body, {**said, "Content-Length": str(len(answer.content))})


def _response(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    said = {"Connection": "close", "Content-Length": str(len(body)), **(headers or {})}
    return Response(status, HTTPStatus(status).phrase, Headers(said), body)


class _Lane:
    """One direction of a connection: frames that wait for their time."""

    def __init__(self, to: Connection, lots: Random, cut: Callable[[], None]) -> None:
        self.on_going: Callable[[bytes], None] = lambda frame: None
        self._to, self._lots, self._cut = to, lots, cut
        self._waiting: list[tuple[float, int, bytes]] = []
        self._counts = itertools.count()
        self._free_s = 0.0
        """The earliest time at which a frame in its turn may go."""
        self._changed = asyncio.Event()

    def hold(self, seconds: float) -> None:
        until_s = asyncio.get_running_loop().time() + seconds
        self._free_s = max(self._free_s, until_s)
        self._waiting = [(max(at_s, until_s), count, frame) for at_s, count, frame in self._waiting]
        heapq.heapify(self._waiting)

    def put(self, frame: bytes, faults: WireFaults, counts: Counter[str]) -> None:
        delay_s = delay_of_frame(faults, self._lots)
        if delay_s is None:
            counts["cut"] += 1
            self._cut()
            return
        self._free_s = at_s = max(self._free_s, asyncio.get_running_loop().time() + delay_s)
        counts["delayed"] += delay_s > 0
        heapq.heappush(self._waiting, (at_s, next(self._counts), frame))
        self._changed.set()

    async def carry(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                self._changed.clear()
                left_s = self._waiting[0][0] - asyncio.get_running_loop().time() if self._waiting else None
                if left_s is not None and left_s <= 0:
                    _, _, frame = heapq.heappop(self._waiting)
                    self.on_going(frame)
                    await self._to.send(frame)
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left_s)
