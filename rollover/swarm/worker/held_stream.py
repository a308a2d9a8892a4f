"""The stream of one call as its worker holds it: decoded, sent, and not yet acknowledged, each token at its position.

::

    origin        start            sent             end
      │ acknowledged │ sent, perhaps  │ to be sent    │
      ▼  (let go)    ▼ lost           ▼               ▼
      ─────────────────────────────────────────────────  ending: a finish reason or a failure, once there is one

Invariants: a position has one token for ever; nothing between ``start`` and ``end`` is forgotten; the ending is
sent after the last token.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from typing import Literal, cast

from rollover.engine.base import Chunk
from rollover.swarm.wire import messages
from rollover.token_bytes import join_bytes
from rollover.types import FinishReason

_BYTES = 4
"""Bytes of a packed token id, and of a packed log-prob."""
_MAX_BESIDE_BYTES = 2**20
"""Most bytes of the kept sets and routes of a message: enough for a thousand tokens, and 3 s of a slow link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnding:
    """The end of a call: for a reason, or with a failure of the engine."""

    reason: FinishReason | None = None
    failure: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class _HeldPiece:
    """Tokens one after the other, of the same versions."""

    start: int
    token_ids: bytes
    logprobs: bytes
    version: int
    kv_version: int
    kept: tuple[bytes, ...] = ()
    routes: tuple[bytes, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids) // _BYTES

    def cut(self, start: int, end: int) -> _HeldPiece:
        part = slice((start - self.start) * _BYTES, (end - self.start) * _BYTES)
        beside = slice(start - self.start, end - self.start)
        return replace(
            self,
            start=start,
            token_ids=self.token_ids[part],
            logprobs=self.logprobs[part],
            kept=self.kept[beside],
            routes=self.routes[beside],
        )

    def sendable(self) -> _HeldPiece:
        """Return as much of its beginning as a frame has room for."""
        pairs = zip_longest(self.kept, self.routes, fillvalue=b"")
        sizes = list(accumulate(len(kept) + len(route) for kept, route in pairs))
        return self.cut(self.start, self.start + bisect_right(sizes, _MAX_BESIDE_BYTES)) if sizes else self

    @staticmethod
    def joined(pieces: Sequence[_HeldPiece]) -> _HeldPiece:
        """Return pieces of the same versions, one after the other, as one."""
        return replace(
            pieces[0],
            token_ids=b"".join(piece.token_ids for piece in pieces),
            logprobs=b"".join(piece.logprobs for piece in pieces),
            kept=tuple(chain.from_iterable(piece.kept for piece in pieces)),
            routes=tuple(chain.from_iterable(piece.routes for piece in pieces)),
        )


class HeldStream:
    """The tokens of one call, from the first that is not acknowledged.

    Args:
        assign: the call, which decodes after its ``response_ids``.
    """

    def __init__(self, assign: messages.Assign) -> None:
        self.call_id = assign.call_id
        self.assign = assign
        self.start = self.end = self.sent = len(assign.response_ids) // _BYTES
        self.ending: StreamEnding | None = None
        self.offered_s: float | None = None
        """Time of its offer to a coordinator that has not accepted it yet: until then nothing of it is sent."""
        self._response = bytearray(assign.response_ids)
        """The whole response, by which another can tell that theirs begins alike."""
        self._pieces: list[_HeldPiece] = []
        self.origin = self.end
        self._num_prefilled = 0
        self.has_sent_ending = False

    @property
    def num_held(self) -> int:
        return self.end - self.start

    @property
    def response_ids(self) -> tuple[int, ...]:
        return messages.unpack_ids(bytes(self._response))

    @property
    def oldest_version(self) -> int | None:
        return min((piece.version for piece in self._pieces), default=None)

    @property
    def is_offered(self) -> bool:
        return self.offered_s is not None

    @property
    def can_send(self) -> bool:
        has_more = self.sent < self.end or (self.ending is not None and not self.has_sent_ending)
        return has_more and not self.is_offered

    def listed(self) -> messages.HeldCall:
        return messages.HeldCall(
            call_id=self.call_id,
            sample_key=self.assign.sample_key,
            start=self.start,
            end=self.end,
            is_running=self.ending is None,
        )

    # -- from the engine ----------------------------------------------------------------------------------------

    def decoded(self, chunk: Chunk) -> None:
        """Take the tokens of a chunk; its finish reason is not looked at."""
        assert self.ending is None
        if self.end == self.origin:
            self._num_prefilled += chunk.num_prefilled_tokens
        if not chunk.token_ids:
            return
        packed = messages.pack_ids(chunk.token_ids)
        logprobs, versions = messages.pack_logprobs(chunk.logprobs), (chunk.policy_version, chunk.kv_version)
        piece = _HeldPiece(self.end, packed, logprobs, *versions, chunk.kept, chunk.routes)
        self._pieces.append(piece)
        self._response += packed
        self.end = piece.end

    def ended(self, ending: StreamEnding) -> None:
        assert self.ending is None
        self.ending = ending

    # -- from the coordinator -----------------------------------------------------------------------------------

    def acked(self, offset: int) -> None:
        """Let go of the tokens before ``offset``. An acknowledgement that comes late means nothing any more.

        Raises ``ProtocolError`` for tokens that have not been decoded.
        """
        if offset > self.end:
            raise messages.ProtocolError(
                f"{offset} tokens of {self.call_id} are acknowledged, but {self.end} are decoded"
            )
        del self._pieces[: self._first_after(offset)]
        if self._pieces and (piece := self._pieces[0]).start < offset:
            self._pieces[0] = piece.cut(offset, piece.end)
        self.start = max(self.start, offset)
        self.sent = max(self.sent, offset)

    def prefix_digest(self, offset: int) -> str:
        """Return the SHA-256 of the packed response before ``offset``."""
        return hashlib.sha256(memoryview(self._response)[: offset * _BYTES]).hexdigest()

    def offer(self, now_s: float) -> None:
        """Wait until a new connection says from where to send, or that the call is no longer wanted."""
        self.offered_s = now_s
        self.has_sent_ending = False

    def take_up(self, call_id: str, offset: int) -> None:
        """Send from ``offset`` on, where another id is given under that; an offered call that was stopped continues."""
        if self.is_offered and self.ending is not None and self.ending.reason is FinishReason.ABORT:
            self.ending = None
        if call_id != self.call_id:  # the response before belongs to an earlier call, which was written down
            self.acked(offset)
        self.call_id, self.offered_s, self.has_sent_ending = call_id, None, False
        self.sent = max(offset, self.start)

    def next_message(self, max_tokens: int) -> messages.Decoded | messages.CallFailed:
        """Return the next message of a stream that ``can_send``, and take it as sent."""
        assert self.can_send
        first, ending = self.sent, self.ending
        piece = self._next_piece(max_tokens)
        if piece is None:
            assert ending is not None
            self.has_sent_ending = True
            if ending.reason is None:
                return messages.CallFailed(call_id=self.call_id, reason=ending.failure)
            piece = _HeldPiece(first, b"", b"", ending.version, ending.version)
        piece = piece.sendable()
        self.sent = piece.end
        reason = ending.reason if ending is not None and self.sent == self.end else None
        self.has_sent_ending = reason is not None
        return messages.Decoded(
            call_id=self.call_id,
            offset=first,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            version=piece.version,
            kv_version=piece.kv_version,
            finish_reason=None if reason is None else cast(Literal["stop", "length", "abort"], reason.value),
            num_prefilled_tokens=self._num_prefilled if first == self.origin else 0,
            kept=join_bytes(piece.kept),
            routes=join_bytes(piece.routes),
        )

    def _next_piece(self, max_tokens: int) -> _HeldPiece | None:
        """Return what is to be sent next: at most ``max_tokens`` tokens, of one version."""
        found: list[_HeldPiece] = []
        size = 0
        for index in range(self._first_after(self.sent), len(self._pieces)):
            piece = self._pieces[index]
            is_same = not found or (piece.version, piece.kv_version) == (found[0].version, found[0].kv_version)
            if not is_same or piece.start - self.sent >= max_tokens or size > _MAX_BESIDE_BYTES:
                break
            found.append(piece)
            size += sum(map(len, (*piece.kept, *piece.routes)))
        return _HeldPiece.joined(found).cut(self.sent, self.sent + max_tokens) if found else None

    def _first_after(self, offset: int) -> int:
        """Return the index of the first piece that ends behind ``offset``."""
        return bisect_right(self._pieces, offset, key=lambda piece: piece.end)
