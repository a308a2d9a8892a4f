"""A session over NATS: frames as sealed messages, numbered, cut to a size, and no more on the way than a window holds.

NATS delivers a message at most once, to whoever may listen, and drops what a slow listener does not take. A session
makes of that what a connection is: whatever is lost, doubled, reordered, altered or invented on the way ends it or is
ignored, and frames come out as they went in.

::

    message = kind (1 byte) + number (8 bytes, little-endian) + seal (16 bytes) + content
    seal    = the first 16 bytes of HMAC-SHA256(key of the direction, kind + number + content)

=====  ==========================================================================
kind   content
=====  ==========================================================================
1      a part of a frame; more of it follow
2      the last part of a frame, or all of it
3      bytes that were taken so far in the other direction (8 bytes, little-endian)
=====  ==========================================================================

What it keeps true: a frame comes out once, in order and unchanged, or the session ends; a sender has at most
``WINDOW_BYTES`` and one message on the way; only those who know the token or its hash can add to a session.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollover.swarm.wire.messages import MAX_FRAME_BYTES, ProtocolError

WINDOW_BYTES = 256 * 1024
"""Bytes of messages, in each direction, that may be on the way: more are sent once some were taken."""
PART_BYTES = 64 * 1024
"""Largest content of a message, where the NATS server allows as much."""
HEADER_BYTES = 25
_ACK_EVERY_BYTES = WINDOW_BYTES // 4
_PART, _LAST, _TAKEN = b"\x01", b"\x02", b"\x03"


class SequenceBroken(ProtocolError):
    """Messages of a session were lost on the way."""


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of one session's two directions.

    Example: ``SessionKeys.of(token.hash, inbox, session)`` is the same on both sides, and for no other session.
    """

    up: bytes = field(repr=False)
    """From the worker to the coordinator."""
    down: bytes = field(repr=False)

    @classmethod
    def of(cls, token_hash: str, inbox: str, session: str) -> SessionKeys:
        """Derive the keys from the SHA-256 of the token, in hexadecimal, and the subjects of the session. The
        coordinator keeps that hash in a file, which is therefore as secret as the tokens."""
        secret = bytes.fromhex(token_hash)
        return cls(*(_derived(secret, direction, inbox, session) for direction in ("up", "down")))


def _derived(secret: bytes, direction: str, inbox: str, session: str) -> bytes:
    text = "\0".join(("rollover.swarm.nats.v1", direction, inbox, session))
    return hmac.digest(secret, text.encode(), hashlib.sha256)


class SealedChannel:
    """One side of a session; it sends and receives nothing itself.

    Args:
        sending: the key of what goes out.
        receiving: the key of what comes in.
        part_bytes: largest content of a message.

    Example: after ``a.put(frame)``, with ``for message in a.outgoing(): taken = b.take(message)`` the last ``taken``
    is ``(frame, size)``; ``b.consumed(size)`` then lets ``a`` send more.
    """

    def __init__(self, *, sending: bytes, receiving: bytes, part_bytes: int = PART_BYTES) -> None:
        self._sending, self._receiving, self._part_bytes = sending, receiving, part_bytes
        self._parts: deque[tuple[bytes, bytes]] = deque()
        """Kind and content of what is to be sent."""
        self.num_waiting_bytes = 0
        """Content that has not been sent yet."""
        self._num_sent = self._num_received = 0
        self._sent_bytes = self._taken_by_peer = 0
        self._taken_bytes = self._told_bytes = 0
        self._frame = bytearray()
        """The parts of a frame whose last is still to come."""
        self.is_authentic = False
        """The other side has shown that it knows the token."""

    def put(self, frame: bytes) -> None:
        """Have a frame sent after all others."""
        for start in range(0, max(1, len(frame)), self._part_bytes):
            part = frame[start : start + self._part_bytes]
            kind = _LAST if start + self._part_bytes >= len(frame) else _PART
            self._parts.append((kind, part))
            self.num_waiting_bytes += len(part)

    def outgoing(self) -> Iterator[bytes]:
        """Yield the messages that may be sent now; ``take`` may allow more."""
        if self._taken_bytes - self._told_bytes >= _ACK_EVERY_BYTES:
            self._told_bytes = self._taken_bytes
            yield self._sealed(_TAKEN, self._told_bytes.to_bytes(8, "little"))
        while self._parts and self._sent_bytes - self._taken_by_peer < WINDOW_BYTES:
            kind, part = self._parts.popleft()
            self.num_waiting_bytes -= len(part)
            self._sent_bytes += HEADER_BYTES + len(part)
            yield self._sealed(kind, part)

    @property
    def is_drained(self) -> bool:
        """Return True if everything that was put has been sent."""
        return not self._parts

    def take(self, message: bytes) -> tuple[bytes, int] | None:
        """Return the frame that a message completes, if it does, and the size to tell ``consumed`` of.

        Raises:
            SequenceBroken: messages before this one were lost.
            ProtocolError: the session says what the protocol does not allow.
        """
        kind, number, content = message[:1], message[1:9], message[HEADER_BYTES:]
        seal = _seal(self._receiving, kind + number, content)
        if len(message) < HEADER_BYTES or not hmac.compare_digest(seal, message[9:HEADER_BYTES]):
            return None  # not from the other side: whoever has sent it, it must not end the session
        self.is_authentic = True
        ahead = int.from_bytes(number, "little") - self._num_received
        if ahead < 0:
            return None  # it came twice
        if ahead > 0:
            raise SequenceBroken(f"{ahead:,} messages were lost on the way")
        self._num_received += 1
        if kind == _TAKEN:
            self._peer_has_taken(content)
            return None
        if len(self._frame) + len(content) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of more than {MAX_FRAME_BYTES:,} bytes, the protocol's limit")
        self._frame += content
        if kind == _PART:
            self.consumed(len(message))
            return None
        frame, self._frame = bytes(self._frame), bytearray()
        return frame, len(message)

    def consumed(self, num_bytes: int) -> None:
        """Record that the owner has dealt with ``num_bytes``: as many more may be sent to it."""
        self._taken_bytes += num_bytes

    def _peer_has_taken(self, content: bytes) -> None:
        taken = int.from_bytes(content, "little")
        if not self._taken_by_peer <= taken <= self._sent_bytes:
            raise ProtocolError(f"{taken:,} bytes are acknowledged, but only {self._sent_bytes:,} were sent")
        self._taken_by_peer = taken

    def _sealed(self, kind: bytes, content: bytes) -> bytes:
        head = kind + self._num_sent.to_bytes(8, "little")
        self._num_sent += 1
        return head + _seal(self._sending, head, content) + content


def _seal(key: bytes, head: bytes, content: bytes) -> bytes:
    return hmac.digest(key, head + content, hashlib.sha256)[:16]
