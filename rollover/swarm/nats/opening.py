"""The messages with which a session over NATS begins, and with which one that does not exist ends.

They are not sealed: before a session there is no key. So none of them proves anything; the first sealed message of each
side does. A message to an inbox begins with a byte: 0 is one of these, followed by a MessagePack map; others are
sealed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rollover.swarm.wire.messages import ProtocolError

_ANSWER = b"\x00"


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a session, to the subject ``hello``, with the worker's inbox as the reply subject.

    Example: ``Opening(protocols=("rollover.swarm.v1",))``
    """

    protocols: tuple[str, ...]
    """Protocols that the worker speaks, in the form of WebSocket subprotocols."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """A message to a worker's inbox that is not sealed."""


class SessionOpened(_Answer, frozen=True, kw_only=True):
    """A session is there: its messages go to ``subject``, the first of them a sealed hello.

    Example: ``SessionOpened(subject="rollover.session.Wm3...")``
    """

    subject: str


class SessionRefused(_Answer, frozen=True, kw_only=True):
    """There is no session for this worker, and will be none.

    Example: ``SessionRefused(cause="token", reason="the worker's token is not one of this run, or was revoked")``
    """

    cause: Literal["token", "protocol"]
    reason: str


class SessionEnded(_Answer, frozen=True, kw_only=True):
    """The session that the worker spoke in does not exist (any more); it should ask for another.

    Example: ``SessionEnded(reason="the coordinator does not know this session: it was started again")``
    """

    reason: str


Answer = SessionOpened | SessionRefused | SessionEnded

_ENCODER = msgspec.msgpack.Encoder()
_OPENING = msgspec.msgpack.Decoder(Opening)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def encode_opening(opening: Opening) -> bytes:
    """Return the payload of a request for a session."""
    return _ENCODER.encode(opening)


def decode_opening(payload: bytes) -> Opening:
    """Return the request in a payload. Raises ``ProtocolError``."""
    try:
        return _OPENING.decode(payload)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ProtocolError(f"a request for a session cannot be read: {e}") from None


def encode_answer(answer: Answer) -> bytes:
    """Return the payload of an answer."""
    return _ANSWER + _ENCODER.encode(answer)


def decode_answer(payload: bytes) -> Answer | None:
    """Return the answer in a payload, ``None`` for one that is sealed. Raises ``ProtocolError``."""
    if payload[:1] != _ANSWER:
        return None
    try:
        return _ANSWERS.decode(payload[1:])
    except (msgspec.DecodeError, RecursionError) as e:
        raise ProtocolError(f"an answer of {len(payload):,} bytes cannot be read: {e}") from None
