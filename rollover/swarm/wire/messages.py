"""The messages between a coordinator and its workers, and their encoding. ``docs/swarm-protocol.md`` describes them.

A frame is one byte, 0 for plain or 1 for zstd, and a MessagePack map. Token ids travel as little-endian uint32 and
log-probs as little-endian float32, both as bytes: a token takes 8 bytes before compression.

Invariants: nothing is decoded beyond the declared types; a frame is bounded before it is decompressed and while
it is; what cannot be decoded is one ``ProtocolError``.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import zstandard

from rollover.errors import EngineError

T = TypeVar("T")

PROTOCOL = 2
"""The version of the protocol that this code speaks."""
SUBPROTOCOL = f"rollover.swarm.v{PROTOCOL}"
"""Negotiated when the WebSocket is opened."""
MAX_FRAME_BYTES = 16 * 2**20
"""Largest frame, before and after decompression."""
MAX_HELD_CALLS = 16_384
"""Most calls in ``Hello.held``."""
MAX_SERVED = 64
"""Most publications in ``Hello.served``."""
MAX_PROTOCOLS = 64
"""Most versions in ``Hello.protocols``."""
MAX_RUNNING = 65_536
"""Most calls that a worker may have room for."""
MAX_NAME_CHARACTERS = 256
"""Length of what a worker calls its software and its format of numbers."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
_COMPRESS_ABOVE_BYTES = 512
_PLAIN, _ZSTD = b"\x00", b"\x01"


class ProtocolError(EngineError):
    """A frame or message that the protocol does not allow."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower, forbid_unknown_fields=False):
    """A message; receivers ignore fields that they do not know."""


# -- of both sides ----------------------------------------------------------------------------------------------


class Head(_Message, frozen=True, kw_only=True):
    """The newest publication. Workers fetch it, and change to it at a token boundary."""

    version: int
    manifest: str
    """Digest, and so the name, of the blob that holds the signed manifest."""


# -- from a worker ----------------------------------------------------------------------------------------------


class HeldCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose tokens a worker still holds, since they were not acknowledged."""

    call_id: str
    sample_key: str
    start: Count
    """Position in the response of the first token held."""
    end: Count
    """Position after the last token held."""
    is_running: bool
    """The worker continues to decode it."""


class Hello(_Message, frozen=True, kw_only=True):
    """The first message of a connection."""

    protocols: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PROTOCOLS)]
    """Versions of the protocol that the worker speaks."""
    software: Name
    run_id: str = ""
    """The run it served last, and the epoch of it; empty and 0 when it served none."""
    run_epoch: Count = 0
    served: Annotated[tuple[Head, ...], msgspec.Meta(max_length=MAX_SERVED)] = ()
    """The publications of that run that it has served, oldest first, as far back as tokens that it still holds."""
    held: Annotated[tuple[HeldCall, ...], msgspec.Meta(max_length=MAX_HELD_CALLS)] = ()


class Ready(_Message, frozen=True, kw_only=True):
    """The worker's engine is open and may be given calls. ``Serving`` says which weights it has."""

    max_running: Annotated[int, msgspec.Meta(le=MAX_RUNNING)]
    max_context_tokens: Count
    seeded: bool
    number_format: Name
    gives_kept: bool = False
    """Tokens come with the kept sets that a call wants."""
    gives_routes: bool = False
    """Tokens come with the routes that a call wants."""
    keeps_kv: bool = False
    """Tokens may attend to caches that older weights computed; otherwise ``kv_version`` is always ``version``."""


class Serving(_Message, frozen=True, kw_only=True):
    """The engine has confirmed that it serves a version: every token from here on may claim it."""

    version: int
    manifest: str
    """Digest of the manifest that the weights were made from."""
    prepare_s: float = 0.0
    """Time to fetch, verify and materialise the weights, while the engine continued."""
    pause_s: float = 0.0
    """Time that the engine stood still."""
    wire_bytes: Count = 0
    """Bytes fetched."""


class NotServing(_Message, frozen=True, kw_only=True):
    """A version could not be fetched or loaded; the engine continues with the one before."""

    version: int
    reason: str


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sent every third of a lease. It has passed through the engine's loop: a worker whose engine hangs sends none."""

    number: Count
    """Counts the heartbeats of a connection, from 1."""
    num_running: Count
    tokens_per_s: float
    """Decoded tokens per second since the last heartbeat, over all calls."""
    mean_running: float
    """Calls that the engine had at a time, mean since the last heartbeat: they shared ``tokens_per_s``."""
    num_held: Count
    """Decoded that wait for an acknowledgement."""
    is_full: bool = False
    """It holds as many tokens as it may, and resumes decoding once some of them are acknowledged."""


class Decoded(_Message, frozen=True, kw_only=True):
    """Newly decoded tokens of one call, at their position in the response.

    Example: ``Decoded(call_id="8f3a.g4.1#7.", offset=300, ...)`` holds the response's tokens 300 and after. The
    messages of a call follow each other without a gap or a repetition.
    """

    call_id: str
    offset: int
    """Position of the first token in the response, counted from its beginning."""
    token_ids: bytes
    logprobs: bytes
    version: int
    kv_version: int
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """Set on the last message of a call and on no other."""
    num_prefilled_tokens: Count = 0
    """The number of prefilled tokens as in ``Chunk``; only in the first message of a call."""
    kept: bytes = b""
    """Kept sets of the tokens (``rollover.token_bytes.join_bytes``), if the call wants them."""
    routes: bytes = b""
    """Routes of the tokens in the same form."""


class CallFailed(_Message, frozen=True, kw_only=True):
    """A call ended with an error of the engine; the tokens sent before stay valid."""

    call_id: str
    reason: str


class Leaving(_Message, frozen=True, kw_only=True):
    """The worker shuts down: its calls have ended, and it takes no more."""

    reason: str


FromWorker = Hello | Ready | Serving | NotServing | Heartbeat | Decoded | CallFailed | Leaving

# -- from the coordinator -----------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True):
    """The answer to ``Hello``: the worker is a member under a new lease, which fences every earlier one of it."""

    protocol: int
    member: str
    """The name for which the worker's token was created."""
    lease: int
    ttl_s: float
    """Seconds without a message of the worker after which the lease ends."""
    run_id: str
    run_epoch: int
    """Rises with each start of the run, so that a restart from an older checkpoint is not mistaken for news."""
    head: Head
    blob_urls: tuple[str, ...] = ()
    """URLs of blobs, ``{url}/{digest}``, best first; the coordinator's own comes after the last."""


class Assign(_Message, frozen=True, kw_only=True):
    """A generation call: decode from after ``response_ids`` until the limit, a stop or an abort.

    Example: a resumed sample is sent with its 300 ``response_ids``; its first ``Decoded`` have ``offset=300``.
    """

    call_id: str
    sample_key: str
    prompt_key: str
    prompt_ids: bytes
    response_ids: bytes = b""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0
    returns_kept: bool = False
    returns_routes: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int
    least_version: int
    """No token of the call may be sampled from an older version."""


class Adopt(_Message, frozen=True, kw_only=True):
    """Continue an offered call under an id, and send its tokens again from ``offset``. A stopped call resumes.

    A worker that has another response before ``offset``, since the sample was continued elsewhere, answers
    ``CallFailed``."""

    held: str
    call_id: str
    offset: int
    prefix: str
    """SHA-256 of the response's token ids before ``offset``, as ``pack_ids`` packs them."""


class Abort(_Message, frozen=True, kw_only=True):
    """Stop calls; each ends with ``Decoded`` that have the finish reason ``abort``, unless it had ended before."""

    call_ids: tuple[str, ...]


class Ack(_Message, frozen=True, kw_only=True):
    """The response's tokens before ``offset`` are journaled: the worker may forget them."""

    call_id: str
    offset: int
    is_over: bool = False
    """The coordinator has its end as well, or does not wait for it: the worker may forget the call."""


class Release(_Message, frozen=True, kw_only=True):
    """These calls are no longer wanted: stop them and forget their tokens."""

    call_ids: tuple[str, ...]


class Beat(_Message, frozen=True, kw_only=True):
    """The answer to ``Heartbeat``: the lease continues."""

    number: int
    """Number of the heartbeat that is answered."""
    head: Head


class Goodbye(_Message, frozen=True, kw_only=True):
    """The coordinator ends the connection."""

    reason: str
    is_final: bool
    """There is no use in coming back: the worker exits with code 2. Otherwise it tries again."""
    has_ended: bool = False
    """The run is over: the worker exits with code 0."""


FromCoordinator = Welcome | Head | Assign | Adopt | Abort | Ack | Release | Beat | Goodbye


class UpEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a worker with the lease under which it was sent; 0 for ``Hello``."""

    lease: int
    message: FromWorker


class DownEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the coordinator with the lease under which it was sent."""

    lease: int
    message: FromCoordinator


class _Codecs(threading.local):
    """The zstd contexts of a thread: making one costs more than compressing a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_CODECS = _Codecs()
_ENCODER = msgspec.msgpack.Encoder()
_UP = msgspec.msgpack.Decoder(UpEnvelope)
_DOWN = msgspec.msgpack.Decoder(DownEnvelope)


def encode(lease: int, message: FromWorker | FromCoordinator) -> bytes:
    """Return the frame of a message. Raises ``ProtocolError`` when it is too large to be sent."""
    body = _ENCODER.encode({"lease": lease, "message": message})
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body):,} bytes is above the protocol's {MAX_FRAME_BYTES:,}")
    if len(body) <= _COMPRESS_ABOVE_BYTES:
        return _PLAIN + body
    return _ZSTD + _CODECS.compressor.compress(body)


def decode_up(frame: bytes) -> UpEnvelope:
    """Return the envelope in a worker's frame. Raises ``ProtocolError``."""
    return _decode(_UP, frame)


def decode_down(frame: bytes) -> DownEnvelope:
    """Return the envelope in a coordinator's frame. Raises ``ProtocolError``."""
    return _decode(_DOWN, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(_body(frame))
    except (msgspec.DecodeError, UnicodeDecodeError, zstandard.ZstdError, RecursionError) as e:
        raise ProtocolError(f"a frame of {len(frame):,} bytes cannot be read: {e}") from None


def _body(frame: bytes) -> bytes:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame):,} bytes is above the protocol's {MAX_FRAME_BYTES:,}")
    kind, body = frame[:1], frame[1:]
    if kind == _PLAIN:
        return body
    if kind != _ZSTD:
        raise ProtocolError(f"a frame begins with {kind.hex() or 'nothing'}, not with 00 (plain) or 01 (zstd)")
    size = zstandard.frame_content_size(body)
    if not 0 <= size <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame says that it holds {size:,} bytes, but 0 to {MAX_FRAME_BYTES:,} are allowed")
    return _CODECS.decompressor.decompress(body, max_output_size=MAX_FRAME_BYTES)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as uint32, little-endian as every machine that runs PyTorch is."""
    return array("I", ids).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return the token ids in ``packed``. Raises ``ProtocolError``."""
    return tuple(_unpack("I", packed))


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return array("f", logprobs).tobytes()


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    """Return the log-probs in ``packed``. Raises ``ProtocolError``."""
    return tuple(_unpack("f", packed))


def _unpack(code: str, packed: bytes) -> array[Any]:
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes are not a whole number of 4-byte values")
    values: array[Any] = array(code)
    values.frombytes(packed)
    return values
