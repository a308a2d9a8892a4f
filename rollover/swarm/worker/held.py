"""The streams of all of a worker's calls, and what the coordinator's messages do to them. Pure: no I/O, no clock.

A worker continues to decode through an outage and holds the tokens that were not acknowledged. When it is back, its
``Hello`` offers all that: the coordinator, the same or its successor, adopts each call from the
position that it has reached, or releases it. A call is forgotten when the coordinator says so, and when it was not
taken up long after the offer.

Invariants: within a connection the tokens of a call are sent once and in order, from the position at which it
was adopted; whatever is cut, the receiver has exactly the decoded stream in the end; held tokens are bounded by making
the worker stand still, never by dropping a call that may still be asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from rollover.engine.base import Chunk
from rollover.swarm.wire import messages
from rollover.swarm.worker.held_stream import HeldStream, StreamEnding

MAX_MESSAGE_TOKENS = 2**13
"""Most tokens in a message: 64 kB. Heartbeats wait behind it, and a slow link must not lose its lease by that."""
_ROOM_AGAIN = 0.75
"""Share of the limit at which a worker that stood still resumes, so that it does not stop at every token."""


class HeldCalls:
    """The calls that a worker holds, by id.

    Args:
        max_tokens: held tokens at which the worker is full: it then decodes nothing until some are acknowledged.
        offer_s: how long an offer stands.
    """

    def __init__(self, max_tokens: int, *, offer_s: float = 900.0) -> None:
        assert max_tokens >= 1
        self._max_tokens = max_tokens
        self._offer_s = offer_s
        self._streams: dict[str, HeldStream] = {}
        self._to_send: dict[str, None] = {}
        """Calls of which something can be sent, in the order of their turns."""
        self.is_full = False
        self.num_tokens = 0

    def __iter__(self) -> Iterator[HeldStream]:
        return iter(self._streams.values())

    @property
    def oldest_version(self) -> int | None:
        return min((v for stream in self if (v := stream.oldest_version) is not None), default=None)

    @property
    def num_unsent(self) -> int:
        """Return the number of tokens that this connection has not taken: of an offer that was not answered, all."""
        return sum(stream.end - (stream.start if stream.is_offered else stream.sent) for stream in self)

    def listed(self) -> tuple[messages.HeldCall, ...]:
        """Return what a ``Hello`` offers: the oldest calls, if it cannot name all."""
        return tuple(stream.listed() for stream in islice(self, messages.MAX_HELD_CALLS))

    # -- from the engine ----------------------------------------------------------------------------------------

    def open(self, assign: messages.Assign) -> HeldStream:
        """Hold a new call. Raises ``ProtocolError`` if it is held already."""
        if assign.call_id in self._streams:
            raise messages.ProtocolError(f"it assigned {assign.call_id} twice")
        stream = self._streams[assign.call_id] = HeldStream(assign)
        return stream

    def decoded(self, stream: HeldStream, chunk: Chunk) -> None:
        stream.decoded(chunk)
        self._count(len(chunk.token_ids))
        self._schedule(stream)

    def ended(self, stream: HeldStream, ending: StreamEnding) -> None:
        stream.ended(ending)
        self._schedule(stream)

    # -- from the coordinator -----------------------------------------------------------------------------------

    def connected(self, now_s: float) -> None:
        """Begin a connection, whose ``Hello`` has offered all that is held."""
        self._to_send.clear()
        for stream in self:
            stream.offer(now_s)

    def expired(self, now_s: float) -> list[str]:
        """Return the calls that were offered long ago and not taken up."""
        return [s.call_id for s in self if s.offered_s is not None and now_s - s.offered_s > self._offer_s]

    def acked(self, call_id: str, offset: int) -> None:
        """Let go of tokens. Raises ``ProtocolError`` when they have not been decoded."""
        if (stream := self._streams.get(call_id)) is None:
            return
        before = stream.num_held
        stream.acked(offset)
        self._count(stream.num_held - before)

    def adopt(self, adopt: messages.Adopt) -> HeldStream | messages.CallFailed:
        """Continue a call under the id that it is given, from the offset that is asked for; or say why not, and hold
        the call no longer. Raises ``ProtocolError`` if the call is not offered."""
        stream = self._streams.get(adopt.held)
        if stream is None:
            return messages.CallFailed(call_id=adopt.call_id, reason=f"{adopt.held} is no longer held here")
        if not stream.is_offered:
            raise messages.ProtocolError(f"it adopted {adopt.held}, which is not offered")
        if not stream.start <= adopt.offset <= stream.end:
            reason = f"{adopt.held} is held from {stream.start} to {stream.end}, not from {adopt.offset}"
        elif stream.prefix_digest(adopt.offset) != adopt.prefix:
            reason = f"{adopt.held} has tokens before {adopt.offset} that differ from the coordinator's"
        elif adopt.call_id != adopt.held and adopt.call_id in self._streams:
            reason = f"{adopt.call_id} is the id of another call that is held here"
        else:
            self._take_up(stream, adopt)
            return stream
        self.release((adopt.held,))
        return messages.CallFailed(call_id=adopt.call_id, reason=reason)

    def _take_up(self, stream: HeldStream, adopt: messages.Adopt) -> None:
        del self._streams[adopt.held]
        self._to_send.pop(adopt.held, None)
        before = stream.num_held
        stream.take_up(adopt.call_id, adopt.offset)
        self._streams[adopt.call_id] = stream
        self._count(stream.num_held - before)
        self._schedule(stream)

    def release(self, call_ids: Collection[str]) -> None:
        """Forget calls that are no longer wanted."""
        for call_id in call_ids:
            if (stream := self._streams.pop(call_id, None)) is not None:
                self._count(-stream.num_held)

    # -- sending ------------------------------------------------------------------------------------------------

    def next_message(self) -> messages.Decoded | messages.CallFailed | None:
        """Return what is to be sent next, each call in its turn; ``None`` when all is sent."""
        while self._to_send:
            call_id = next(iter(self._to_send))
            del self._to_send[call_id]
            if (stream := self._streams.get(call_id)) is not None and stream.can_send:
                message = stream.next_message(MAX_MESSAGE_TOKENS)
                self._schedule(stream)
                return message
        return None

    def _schedule(self, stream: HeldStream) -> None:
        if stream.can_send:
            self._to_send[stream.call_id] = None

    def _count(self, change: int) -> None:
        self.num_tokens += change
        limit = self._max_tokens * (_ROOM_AGAIN if self.is_full else 1.0)
        self.is_full = self.num_tokens >= max(1.0, limit)


class ServedHeads:
    """The part of a ``Hello`` about the versions that held tokens may claim."""

    def __init__(self, held: HeldCalls) -> None:
        self._held = held
        self._heads: list[messages.Head] = []

    def add(self, head: messages.Head) -> None:
        """Record weights that are served now. Tokens of those before may still come out of the engine, unless
        this is an older version, of a later epoch."""
        goes_back = any(head.version <= before.version for before in self._heads)
        self._heads = [*(self._of_held() if goes_back else self._heads), head][-messages.MAX_SERVED :]

    def needed(self) -> tuple[messages.Head, ...]:
        """Return those from which held tokens may come, and the newest, oldest first."""
        return tuple(dict.fromkeys([*self._of_held(), *self._heads[-1:]]))

    def _of_held(self) -> list[messages.Head]:
        oldest = self._held.oldest_version
        return [head for head in self._heads if oldest is not None and head.version >= oldest]
