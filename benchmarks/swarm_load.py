"""Light members of a swarm, many in one process: they answer what they are sent and decode in no time.

Started by ``swarm_coordinator.py``. A member speaks the protocol over a WebSocket of its own, by hand: the frames of a
client may be masked with zeros, which costs nothing, so that a core of load is worth more than a core of coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import struct
import time
from dataclasses import dataclass, field
from functools import partial

import msgspec

from rollover.swarm.wire.messages import (
    PROTOCOL,
    SUBPROTOCOL,
    Abort,
    Ack,
    Adopt,
    Assign,
    Beat,
    Decoded,
    Goodbye,
    Head,
    Heartbeat,
    Hello,
    Ready,
    Release,
    Serving,
    Welcome,
    decode_down,
    encode,
    pack_ids,
    pack_logprobs,
)

_UPGRADE = (
    "GET /v1/session HTTP/1.1\r\nHost: load\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: {protocol}\r\n"
    "Authorization: Bearer {name}\r\n\r\n"
)
_BINARY, _CLOSE, _PING, _PONG = 0x2, 0x8, 0x9, 0xA


@dataclass
class Load:
    """The counts of all members of this process, and what they do."""

    tokens: int
    """Tokens of a response."""
    piece: int
    """Tokens of a message."""
    room: int
    max_context_tokens: int
    pieces: list[tuple[int, bytes, bytes, bool]] = field(default_factory=list)
    num_members: int = 0
    num_over: int = 0
    num_assigned: int = 0
    num_frames_down: int = 0
    num_frames_up: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    goodbyes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pieces = self.between(0, self.tokens)

    def between(self, begin: int, end: int) -> list[tuple[int, bytes, bytes, bool]]:
        """Return the pieces of a response from one position to another: offset, ids, log-probs, whether it is the
        last."""
        pieces = []
        for start in range(begin, end, self.piece):
            at = range(start, min(end, start + self.piece))
            packed = pack_ids([i * 7919 % 30000 for i in at]), pack_logprobs([-0.01 * (i % 300) for i in at])
            pieces.append((start, *packed, at[-1] + 1 == end))
        return pieces


class Member(asyncio.Protocol):
    def __init__(self, name: str, load: Load) -> None:
        self.name, self.load = name, load
        self.buffer = b""
        self.is_open = False
        self.lease = 0
        self.serving: Head | None = None
        self.calls: dict[str, tuple[int, int]] = {}
        """Of the calls that are held, all of which have ended: the positions up to which they are acknowledged, and
        their ends."""
        self.number = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        transport.write(_UPGRADE.format(key=key, protocol=SUBPROTOCOL, name=self.name).encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.num_members -= self.lease > 0
        self.lease = 0

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.is_open:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self.is_open, self.buffer = True, rest
            self.say(Hello(protocols=(PROTOCOL,), software="load"))
        position, buffer = 0, self.buffer
        while len(buffer) - position >= 2:
            opcode, size, begin = buffer[position] & 15, buffer[position + 1] & 127, position + 2
            if size >= 126:
                width, form = (2, ">H") if size == 126 else (8, ">Q")
                if len(buffer) < begin + width:
                    break
                (size,) = struct.unpack_from(form, buffer, begin)
                begin += width
            if len(buffer) < begin + size:
                break
            self.frame(opcode, buffer[begin : begin + size])
            position = begin + size
        self.buffer = buffer[position:]

    def frame(self, opcode: int, payload: bytes) -> None:
        if opcode == _BINARY:
            self.load.num_frames_down += 1
            self.load.bytes_down += len(payload)
            self.got(decode_down(payload))
        elif opcode == _PING:
            self.send(_PONG, payload)
        elif opcode == _CLOSE and self.transport is not None:
            self.transport.close()

    def send(self, opcode: int, payload: bytes) -> None:
        assert self.transport is not None
        if self.transport.is_closing():
            return
        size = len(payload)
        lengths = (
            struct.pack(">B", 0x80 | size)
            if size < 126
            else struct.pack(">BH", 0xFE, size)
            if size < 2**16
            else struct.pack(">BQ", 0xFF, size)
        )
        self.transport.write(b"".join((bytes([0x80 | opcode]), lengths, bytes(4), payload)))

    def say(self, message: object) -> None:
        frame = encode(self.lease, message)  # type: ignore[arg-type]
        self.load.num_frames_up += 1
        self.load.bytes_up += len(frame)
        self.send(_BINARY, frame)

    def got(self, envelope: object) -> None:
        message = envelope.message  # type: ignore[attr-defined]
        match message:
            case Assign(call_id=call_id, response_ids=response_ids, max_new_tokens=limit):
                self.load.num_assigned += 1
                self.decode(call_id, len(response_ids) // 4, limit)
            case Ack(call_id=call_id, offset=offset, is_over=is_over):
                if is_over:
                    self.load.num_over += self.calls.pop(call_id, None) is not None
                elif call_id in self.calls:
                    self.calls[call_id] = (offset, self.calls[call_id][1])
            case Release(call_ids=call_ids):
                for call_id in call_ids:
                    self.calls.pop(call_id, None)
            case Welcome(lease=lease, head=head, ttl_s=ttl_s):
                self.lease = lease
                self.load.num_members += 1
                size = self.load.max_context_tokens
                self.say(Ready(max_running=self.load.room, max_context_tokens=size, seeded=True, number_format="x"))
                self.serve(head)
                asyncio.get_running_loop().call_later(0.2, self.beat, ttl_s / 3)
            case Head():
                self.serve(message)
            case Beat(head=head):
                self.serve(head)
            case Goodbye(reason=reason):
                self.load.goodbyes.append(reason)
            case Adopt() | Abort():
                pass

    def serve(self, head: Head) -> None:
        if self.serving is None or head.version > self.serving.version:
            self.serving = head
            self.say(Serving(version=head.version, manifest=head.manifest))

    def decode(self, call_id: str, begin: int, end: int) -> None:
        assert self.serving is not None
        self.calls[call_id] = (begin, end)
        version = self.serving.version
        is_whole = (begin, end) == (0, self.load.tokens)
        for start, ids, logprobs, is_last in self.load.pieces if is_whole else self.load.between(begin, end):
            self.say(
                Decoded(
                    call_id=call_id,
                    offset=start,
                    token_ids=ids,
                    logprobs=logprobs,
                    version=version,
                    kv_version=version,
                    finish_reason="length" if is_last else None,
                )
            )

    def beat(self, interval_s: float) -> None:
        if not self.lease or self.transport is None or self.transport.is_closing():
            return
        self.number += 1
        self.say(
            Heartbeat(
                number=self.number,
                num_running=len(self.calls),
                mean_running=self.load.room,
                tokens_per_s=1000.0,
                num_held=0,
            )
        )
        asyncio.get_running_loop().call_later(interval_s, self.beat, interval_s)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--room", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--piece", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    args = parser.parse_args()
    load = Load(args.tokens, args.piece, args.room, args.context)
    loop = asyncio.get_running_loop()
    members = []
    for i in range(args.first, args.first + args.members):
        _, member = await loop.create_connection(partial(Member, f"m{i:04d}", load), "127.0.0.1", args.port)
        members.append(member)
    while True:
        counts = {name: value for name, value in vars(load).items() if isinstance(value, int)}
        print(json.dumps({"time_s": time.monotonic(), "cpu_s": time.process_time(), **counts}), flush=True)
        await asyncio.sleep(0.25)
        if load.num_members == 0 and load.num_over:
            return


if __name__ == "__main__":
    assert msgspec
    asyncio.run(main())
